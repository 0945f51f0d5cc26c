"""The step itself: accumulation and sharding change nothing, factored statistics are sharded with their parameters."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from block_recurrent.data.rows import RowStream
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.stack import pattern, stack
from block_recurrent.training import optimizers
from block_recurrent.training.sharding import make_mesh, optimizer_specs
from block_recurrent.training.step import Trainer
from models.sliding_window import SlidingWindowLayer


def model(**changes):
    layer = SlidingWindowLayer(heads=2, head_dim=8, mlp_dim=32, window=8, **changes)
    return LanguageModel(260, 16, stack(pattern("2*slide", {"slide": layer})))


def losses(corpus, accumulate=1, optimizer=None, steps=4, mesh=None):
    optimizer = optimizer or optimizers.adafactor(optimizers.inverse_square_root(warmup=4))
    trainer = Trainer(model(), optimizer, mesh or make_mesh(), rows=8, accumulate=accumulate)
    stream = RowStream(corpus.split("train"), rows=8, segment=16, block=8)
    state, cursor, seen = trainer.init(0), stream.begin(), []
    for _ in range(steps):
        batch, cursor = stream.read(cursor)
        state, metrics = trainer.step(state, batch)
        seen.append(float(metrics["loss"]))
    return seen, jax.device_get(state.memory)


def test_accumulated_parts_equal_one_step(corpus):
    whole, parts = losses(corpus), losses(corpus, accumulate=4)
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), parts[1], whole[1])


@pytest.mark.parametrize("clip", [None, 0.1])
def test_adam_learns(corpus, clip):
    seen, _ = losses(corpus, optimizer=optimizers.adam(optimizers.cosine(1e-2, 12), clip=clip), steps=12)
    assert seen[-1] < seen[0] - 0.5


def test_schedules():
    rsqrt = optimizers.inverse_square_root(warmup=100)
    np.testing.assert_allclose([rsqrt(0), rsqrt(99), rsqrt(399)], [0.001, 0.1, 0.05], rtol=1e-6)
    cosine = optimizers.cosine(peak=2.0, steps=110, floor=1.0, warmup=10)
    np.testing.assert_allclose([cosine(4), cosine(9), cosine(59), cosine(109)], [1.0, 2.0, 1.5, 1.0], rtol=2e-2)


def test_factored_statistics_take_their_parameters_spec_less_the_averaged_axis():
    params = {
        "wide": jax.ShapeDtypeStruct((3, 128, 256), np.float32),
        "tall": jax.ShapeDtypeStruct((256, 128), np.float32),
        "small": jax.ShapeDtypeStruct((16, 8), np.float32),
    }
    specs = {
        "wide": PartitionSpec(None, "fsdp", "tensor"),
        "tall": PartitionSpec("tensor", "fsdp"),
        "small": PartitionSpec("fsdp", "tensor"),
    }
    tx = optax.adafactor(0.1, momentum=0.9)
    found = optimizer_specs(tx, params, specs)
    shapes = jax.eval_shape(tx.init, params)
    factored, factored_shapes = found[0], shapes[0]
    assert factored_shapes.v_row["wide"].shape == (3, 128) and factored.v_row["wide"] == PartitionSpec(None, "fsdp")
    assert factored_shapes.v_col["wide"].shape == (3, 256) and factored.v_col["wide"] == PartitionSpec(None, "tensor")
    assert factored_shapes.v_row["tall"].shape == (128,) and factored.v_row["tall"] == PartitionSpec("fsdp")
    assert factored_shapes.v_col["tall"].shape == (256,) and factored.v_col["tall"] == PartitionSpec("tensor")
    assert factored.v["small"] == specs["small"] and factored.v_row["small"] == PartitionSpec()
    momentum = next(
        leaf
        for leaf in jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, optax.EmaState))
        if isinstance(leaf, optax.EmaState)
    )
    assert momentum.ema == specs
