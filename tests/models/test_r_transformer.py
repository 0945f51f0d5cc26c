"""What the laws do not say of the R-Transformer: windows a stretch at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from models import r_transformer
from models.r_transformer import RTransformerLayer

ROWS = 2


def run(layer, n):
    """Outputs, next state and gradients over n tokens, documents starting here and there."""
    rng = np.random.default_rng(0)
    x, before = (rng.normal(size=(ROWS, length, layer.dim)).astype(np.float32) for length in (n, 5))
    start = np.zeros((ROWS, n), bool)
    start[0, n // 2] = start[1, 0] = start[1, n - 2] = True
    empty, none = layer.initial_state(ROWS), np.zeros((ROWS, 5), bool)
    params = nn.unbox(jax.jit(layer.init)(jax.random.key(0), before, empty, none))
    _, state = layer.apply(params, before, empty, none)

    def total(params, x):
        y, after = layer.apply(params, x, state, start)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), (y, after)

    return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(params, x)


@pytest.mark.parametrize("cell", ["gru", "lstm", "rnn", "sru"])
@pytest.mark.parametrize("n", [12, 13])
def test_in_stretches_is_the_same(cell, n, monkeypatch):
    """Also where the stretches do not divide the length, and are shorter than a window."""
    layer = RTransformerLayer(8, heads=2, context=4, window=4, cell=cell)
    whole = run(layer, n)
    gates = {"gru": 3, "lstm": 4, "rnn": 1, "sru": 3}[cell]
    monkeypatch.setattr(r_transformer, "KEPT", 4 * 2 * ROWS * 3 * gates * 8 * 5)  # of 5 positions
    inputs = jnp.zeros((ROWS, n, 8)), layer.initial_state(ROWS), jnp.zeros((ROWS, n), bool)
    traced = jax.make_jaxpr(lambda *inputs: layer.init(jax.random.key(0), *inputs))(*inputs)
    assert "length=3" in str(traced), "there are three stretches"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), run(layer, n), whole)


def test_the_matrix_of_a_cell_learns_in_float32():
    """In bfloat16 its gradient is close to that of float32: sums over many positions stop growing in bfloat16."""
    exact, rough = (
        run(RTransformerLayer(8, heads=2, context=4, window=4, dtype=dtype), 300)[1][0]["params"][
            "local_0_carry_kernel"
        ]
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert rough.dtype == jnp.float32
    np.testing.assert_allclose(rough, exact, atol=0.03 * np.abs(exact).max())
