"""What the laws do not say of the block-recurrent layer."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from block_recurrent.errors import UserError
from tests.laws.registry import recurrent


def test_unknown_names_are_told():
    with pytest.raises(UserError, match="gate 'gru' is not one of fixed, lstm"):
        recurrent(gate="gru")
    with pytest.raises(UserError, match="configuration 'triple' is not one of dual, single, skip"):
        recurrent(configuration="triple")
    with pytest.raises(UserError, match="z_tanh 'always' is not one of single, lstm"):
        recurrent(z_tanh="always")


def test_training_through_whole_blocks_from_inside_a_block_is_not_silent():
    """Such a call is exact going forward; its gradient is not there, and says so."""
    layer = recurrent()
    x, start, state = np.ones((2, 4, 12), np.float32), np.zeros((2, 4), bool), layer.initial_state(2)
    params = nn.unbox(layer.init(jax.random.key(0), x, state, start))
    total = jax.grad(lambda params, state: jnp.sum(layer.apply(params, x, state, start)[0]))
    assert np.all(np.isfinite(total(params, state)["params"]["keys"]))
    inside = {**state, "position": jnp.ones(2, jnp.int32)}
    assert np.all(np.isnan(total(params, inside)["params"]["keys"]))


def test_states_are_updated_in_the_rows_whose_block_ends():
    """Five rows: one, two or all of them end a block together, one by one or all at once."""
    layer, rows, n = recurrent(gate="lstm"), 5, 14
    x = np.random.default_rng(0).normal(size=(rows, n, 12)).astype(np.float32)
    start, state = np.zeros((rows, n), bool), layer.initial_state(rows)
    start[0, 1] = start[1, 2] = start[2, 2] = True  # blocks end after 5, 6, 6, 4, 4 tokens
    start[:, 9] = True  # and from here all together
    params = nn.unbox(layer.init(jax.random.key(0), x[:, :4], state, start[:, :4]))
    apply = jax.jit(layer.apply)
    decoding = layer.for_decoding(state)
    for t in range(n):
        y, state = apply(params, x[:, t : t + 1], state, start[:, t : t + 1])
        again, decoding = apply(params, x[:, t : t + 1], decoding, start[:, t : t + 1])
        np.testing.assert_allclose(again, y, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(decoding["recurrent"], state["recurrent"], rtol=2e-5, atol=2e-5)


def test_only_the_state_update_is_sequential():
    """The scan over blocks holds the states' four projections, two attentions and the projection into the gate."""
    layer = recurrent()
    x, start, state = np.ones((2, 32, 12), np.float32), np.zeros((2, 32), bool), layer.initial_state(2)
    params = nn.unbox(layer.init(jax.random.key(0), x, state, start))
    traced = jax.make_jaxpr(lambda p: layer.apply(p, x, state, start)[0])(params)
    over_blocks = [e for e in equations(traced.jaxpr) if e.primitive.name == "scan" and e.params["length"] == 32 // 4]
    assert len(over_blocks) == 1
    products = [e for e in equations(over_blocks[0].params["jaxpr"].jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) == 4 + 2 * 2 + 1


def equations(jaxpr):
    """All equations of a traced program, inner ones too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)
