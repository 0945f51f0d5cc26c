"""The back ends of elementwise recurrences agree, on every cell, values and gradients."""

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from block_recurrent.errors import UserError
from block_recurrent.layers import recurrence_pallas
from block_recurrent.layers.recurrence import BACKENDS, best_backend, is_linear, linear, recur
from models import lrn, qrnn, sru

ROWS, LENGTH, WIDTH = 3, 21, 8


@linear
def two_averages(carry, inputs):
    """A carry of two parts, and an output of two."""
    fast, slow = carry["fast"], carry["slow"]
    carry = {"fast": 0.5 * fast + inputs, "slow": 0.9 * slow - inputs * inputs}
    return carry, (carry["fast"] - slow, carry["slow"])


def coupled(carry, inputs):
    """Parts of the carry that depend on each other."""
    a, b = carry
    a, b = jnp.tanh(0.5 * a + b + inputs[0]), jax.nn.sigmoid(a - b * inputs[1])
    return (a, b), a * b


# Cell, number of inputs, of shared vectors, parts of the carry.
CELLS = {
    **{name: (functools.partial(unit, lrn.activation_of(name)), gates, 0) for name, (unit, gates) in lrn.UNITS.items()},
    **{f"{name}_pooling": (cell, gates, 0) for name, (cell, gates) in qrnn.POOLINGS.items()},
    "sru": (functools.partial(sru.sru_cell, jnp.tanh), 4, 4),
    "sru_without_highway": (functools.partial(sru.sru_cell, lambda c: c), 3, 4),
    "two_averages": (two_averages, None, 0),
    "coupled": (coupled, 2, 0),
}


def loop(cell, carry, inputs, starts, shared):
    """One token after another."""
    ys = []
    for t in range(starts.shape[1]):
        carry = jax.tree.map(lambda c, t=t: jnp.where(starts[:, t, None], 0.0, c), carry)
        carry, y = cell(carry, jax.tree.map(lambda a, t=t: a[:, t], inputs), *shared)
        ys.append(y)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *ys)


def arguments(name, dtype=np.float32):
    cell, gates, vectors = CELLS[name]
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=np.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    row = functools.partial(normal, ROWS, WIDTH)
    carry = {"two_averages": lambda: {"fast": row(), "slow": row()}, "coupled": lambda: (row(), row())}.get(name, row)()
    inputs = [jax.nn.sigmoid(normal(ROWS, LENGTH, WIDTH, dtype=dtype)) for _ in range(gates or 1)]
    starts = jnp.asarray(rng.random((ROWS, LENGTH)) < 0.15)
    return cell, carry, tuple(inputs) if gates else inputs[0], starts, tuple(normal(WIDTH) for _ in range(vectors))


def value_and_gradients(run, cell, carry, inputs, starts, shared):
    """Outputs and the last carry, and gradients of a random sum of them by carry, inputs and shared vectors."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda *given: run(cell, *given), carry, inputs, starts, shared)
    cotangents = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float32), shapes)

    def total(carry, inputs, shared):
        outputs = run(cell, carry, inputs, starts, shared)
        return sum(jax.tree.leaves(jax.tree.map(lambda a, c: jnp.sum(a * c), outputs, cotangents))), outputs

    gradients, outputs = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(carry, inputs, shared)
    return outputs, gradients


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CELLS)
def test_back_ends_equal_a_loop(name, backend, monkeypatch):
    """Documents start anywhere; Pallas has several blocks of time, the last of them not full."""
    monkeypatch.setattr(recurrence_pallas, "VMEM_BYTES", 1 << 18)
    given = arguments(name)
    if backend == "associative" and not is_linear(given[0]):
        pytest.skip("this cell is not linear in its carry")
    expected = value_and_gradients(loop, *given)
    actual = value_and_gradients(functools.partial(recur, backend=backend), *given)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_are_kept_in_float32(backend):
    """A thousand small steps that bfloat16 would lose."""

    @linear
    def total(carry, x):
        return carry + x, carry + x

    steps = jnp.full((1, 1000, 8), 1e-3, jnp.bfloat16)
    carry, ys = recur(total, jnp.ones((1, 8)), steps, jnp.zeros((1, 1000), bool), backend=backend)
    assert carry.dtype == jnp.float32
    assert ys.dtype == jnp.bfloat16
    np.testing.assert_allclose(carry, 1.0 + 1000 * float(steps[0, 0, 0]), rtol=1e-5)


def test_the_loop_of_a_linear_cell_is_a_product_and_a_sum():
    """Its gates and outputs are computed for all tokens at once."""

    def inside_scan(jaxpr):
        names = []
        for equation in jaxpr.eqns:
            inner = jax.extend.core.jaxprs_in_params(equation.params)
            if equation.primitive.name == "scan":
                names += [e.primitive.name for e in equation.params["jaxpr"].jaxpr.eqns]
            else:
                names += [name for part in inner for name in inside_scan(part)]
        return names

    @linear
    def cell(carry, inputs):
        forget = jax.nn.sigmoid(inputs[1])
        carry = forget * carry + (1.0 - forget) * jnp.tanh(inputs[0])
        return carry, jax.nn.sigmoid(inputs[2]) * carry

    _, carry, inputs, starts, _ = arguments("fo_pooling")
    names = inside_scan(jax.make_jaxpr(functools.partial(recur, cell, backend="scan"))(carry, inputs, starts).jaxpr)
    assert names.count("mul") == 1 and not {"logistic", "tanh", "sub"} & set(names)


def test_choice_by_platform():
    assert best_backend("tpu", cell_is_linear=False) == "pallas"
    assert best_backend("gpu", cell_is_linear=True) == "associative"
    assert best_backend("cpu", cell_is_linear=True) == "scan"


def test_mistakes_are_told():
    given = arguments("lrn")
    with pytest.raises(UserError, match="recurrence back end 'fast' is not one of scan, associative, pallas"):
        recur(*given, backend="fast")
    with pytest.raises(UserError, match="needs a cell that is linear in its carry"):
        recur(*given, backend="associative")


AHEAD_OF_TIME = """
import sys
import jax, jax.numpy as jnp, numpy as np
from flax import linen as nn
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from block_recurrent.layers.recurrence import recur
from block_recurrent.training.sharding import RULES
from tests.layers.test_recurrence import CELLS

SLICES = {
    "v5e:2x2": {"chip_config_name": "default"},
    "v4:2x2x1": {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)},
}
for name, settings in SLICES.items():
    devices = topologies.get_topology_desc(topology_name=name, platform="tpu", **settings).devices
    for shape, rows, length, dtype in (((1, 1, 1), 6, 100, jnp.float32), ((1, 2, 2), 16, 64, jnp.bfloat16)):
        chips = np.array(devices[: np.prod(shape)]).reshape(shape)
        mesh = Mesh(chips, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

        def placed(shape, dtype, *axes):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

        for cell_name in ("lrn", "sru", "fo_pooling"):
            cell, gates, vectors = CELLS[cell_name]

            def loss(carry, inputs, starts, shared):
                carry, ys = recur(cell, carry, inputs, starts, shared)
                return jnp.sum(ys.astype(jnp.float32)) + jnp.sum(carry)

            with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
                compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 3))).lower(
                    placed((rows, 256), jnp.float32, "fsdp", "tensor"),
                    tuple(placed((rows, length, 256), dtype, "fsdp", None, "tensor") for _ in range(gates)),
                    placed((rows, length), jnp.bool_, "fsdp"),
                    tuple(placed((256,), jnp.float32, "tensor") for _ in range(vectors)),
                ).compile()
            text = compiled.as_text()
            assert text.count("tpu_custom_call") >= 2, "forward and backward are kernels"
            assert "all-gather" not in text, "rows and channels stay where they are"
            print(name, shape, cell_name)
"""


def test_kernels_compile_for_tpus():
    """Forward and backward, on one chip and over four, by the TPU's own compiler."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install libtpu")
    environment = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
    }
    run = subprocess.run(
        [sys.executable, "-c", AHEAD_OF_TIME],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(run.stdout.splitlines()) == 12
