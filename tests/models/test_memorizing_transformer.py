"""What the laws do not say of the layer with a memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from block_recurrent.errors import UserError
from models.memorizing_transformer import in_rounds
from tests.laws.registry import memorizing

COMPILE_ON_A_MESH = """
import sys, jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 4)
from flax import linen as nn
from jax.sharding import NamedSharding
from block_recurrent.training.sharding import BATCH, in_mesh, make_mesh
from tests.laws.registry import memorizing

layer = memorizing(memory=997, search=sys.argv[1])
mesh = make_mesh(fsdp=2, tensor=2, data=1)
x, start, state = jnp.zeros((4, 8, 12)), jnp.zeros((4, 8), bool), layer.initial_state(4)
params = nn.unbox(layer.init(jax.random.key(0), x, state, start))
rows = NamedSharding(mesh, BATCH)
with in_mesh(mesh):
    step = jax.jit(layer.apply, in_shardings=(None, rows, rows, rows), out_shardings=rows)
    print(step.lower(params, x, state, start).compile().as_text())
"""


@pytest.mark.parametrize("search", ["exact", "approximate"])
def test_neither_scores_nor_memory_are_exchanged_between_devices(search):
    """On a mesh of rows and heads, whatever a device sends is small: no axis is as long as the memory."""
    program = subprocess.run(
        [sys.executable, "-c", COMPILE_ON_A_MESH, search],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    sent = re.findall(r"= (\S+) (?:all-gather|all-to-all|collective-permute)\(", program)
    assert sent, "the heads of what leaves the window are gathered"
    assert not [shape for shape in sent if re.search(r"\b(997|1005)\b", shape)]


def test_wrong_sizes_and_names_are_told():
    with pytest.raises(UserError, match="search 'fast' is not one of exact, approximate"):
        memorizing(search="fast")
    with pytest.raises(UserError, match=r"MemorizingLayer.top_k is 0: give a whole number, 1 or more"):
        memorizing(top_k=0)


def test_a_position_in_rounds_is_the_same_place_and_never_grows():
    memory, window = 7, 4
    counted = np.arange(200)
    rounds = np.asarray(in_rounds(counted, memory, window))
    full = counted >= memory + window
    np.testing.assert_array_equal(rounds[~full], counted[~full])
    np.testing.assert_array_equal((rounds - window) % memory, (counted - window) % memory)
    assert np.all(rounds[full] >= memory + window) and rounds.max() < 2 * memory + window
    np.testing.assert_array_equal(in_rounds(rounds + 1, memory, window)[:-1], rounds[1:])


def test_bfloat16_keeps_its_memory_in_bfloat16():
    """Half the bytes; positions stay whole numbers, and what is found is close to what float32 finds."""
    x = np.random.default_rng(0).normal(size=(2, 24, 12)).astype(np.float32)
    start, outputs = np.zeros((2, 24), bool), {}
    for dtype in (jnp.float32, jnp.bfloat16):
        layer = memorizing(memory=40, top_k=40, dtype=dtype)  # all there is: rounding cannot choose
        state = layer.initial_state(2)
        params = nn.unbox(layer.init(jax.random.key(0), x, state, start))
        outputs[dtype], after = jax.jit(layer.apply)(params, x, state, start)
        types = jax.tree.map(lambda leaf: leaf.dtype, (state, after))
        assert types[0] == types[1] and types[1]["memory_keys"] == dtype and types[1]["position"] == jnp.int32
    np.testing.assert_allclose(
        outputs[jnp.bfloat16].astype(np.float32), np.asarray(outputs[jnp.float32]), rtol=0.05, atol=0.05
    )


def test_a_token_does_not_copy_the_memory():
    """In a loop that carries its state, as generation does, the memory is written in its place."""
    layer = memorizing(memory=4096)
    x, start, state = jnp.zeros((1, 1, 12)), jnp.zeros((1, 1), bool), layer.initial_state(1)
    params = nn.unbox(layer.init(jax.random.key(0), x, state, start))

    def tokens(params, x, state):
        return jax.lax.scan(lambda carry, _: (layer.apply(params, *carry, start), None), (x, state), length=4)[0]

    compiled = jax.jit(tokens, donate_argnums=2).lower(params, x, state).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < state["memory_keys"].nbytes
