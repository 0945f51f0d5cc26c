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
from block_recurrent.training.optimizers import layer_by_layer
from block_recurrent.training.sharding import make_mesh, optimizer_specs
from block_recurrent.training.step import Trainer
from models.block_recurrent_transformer import BlockRecurrentLayer
from models.lrn import ATRLayer, LRNLayer
from models.memorizing_transformer import MemorizingLayer
from models.qrnn import QRNNLayer
from models.sliding_window import SlidingWindowLayer
from models.sru import SRULayer, SRUppLayer

SIZES = {"heads": 2, "head_dim": 8, "mlp_dim": 32, "window": 8}
LAYERS = {
    "slide": SlidingWindowLayer(**SIZES),
    "rec": BlockRecurrentLayer(**SIZES, states=8, dim=16),
    "mem": MemorizingLayer(**SIZES, memory=24, top_k=4, search_tile=8),
    "qrnn": QRNNLayer(16, 16, backend="associative"),
    "sru": SRULayer(16, 16, backend="pallas"),
    "srupp": SRUppLayer(16, 16, projection=8, context=8),
    "lrn": LRNLayer(16, 16),
    "atr": ATRLayer(16, 16),
}


def model(scan_depth=True, spec="2*slide", build=stack, **options):
    return LanguageModel(260, 16, build(pattern(spec, LAYERS), scan_depth=scan_depth), **options)


def losses(corpus, accumulate=1, optimizer=None, steps=4, mesh=None, **options):
    optimizer = optimizer or optimizers.adafactor(optimizers.inverse_square_root(warmup=4))
    trainer = Trainer(model(**options), optimizer, mesh or make_mesh(), rows=8, accumulate=accumulate)
    stream = RowStream(corpus.split("train"), rows=8, segment=16, block=8, local=trainer.local_rows())
    state, cursor, seen = trainer.init(0), stream.begin(), []
    for _ in range(steps):
        batch, cursor = stream.read(cursor)
        state, metrics = trainer.step(state, batch)
        seen.append(float(metrics["loss"]))
    return seen, state.memory


def test_accumulated_parts_equal_one_step(corpus):
    whole, parts = losses(corpus), losses(corpus, accumulate=4)
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), parts[1], whole[1])


def test_adafactor_treats_stacked_layers_one_by_one():
    """The update of stacked layers of very different scale is that of each layer alone."""
    rng = np.random.default_rng(0)
    transformation = optax.adafactor(0.1, momentum=0.9)
    params = {"layers": np.stack([rng.normal(size=(130, 140)) * scale for scale in (1.0, 10.0)]), "other": np.ones(3)}
    params = jax.tree.map(lambda a: a.astype(np.float32), params)
    gradients = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float32), params)
    together = layer_by_layer(transformation, {"layers": 2, "other": 0})
    updates, _ = together.update(gradients, together.init(params), params)
    for i in range(2):
        alone, _ = transformation.update(
            gradients["layers"][i], transformation.init(params["layers"][i]), params["layers"][i]
        )
        np.testing.assert_allclose(updates["layers"][i], alone, rtol=1e-5)
    alone, _ = transformation.update(gradients["other"], transformation.init(params["other"]), params["other"])
    np.testing.assert_allclose(updates["other"], alone, rtol=1e-6)


def test_scan_over_depth_does_not_change_training(corpus):
    """The same parameters, stacked and not, give the same losses step after step."""
    stacked, unrolled = (
        Trainer(model(scan), optimizers.adafactor(optimizers.inverse_square_root(warmup=4)), make_mesh(), rows=8)
        for scan in (True, False)
    )
    first = stacked.init(0)
    layers = first.params["stack"]["layers_0"]
    apart = {f"layers_{i}": jax.tree.map(lambda a, i=i: a[i].copy(), layers) for i in range(2)}
    same = {**jax.tree.map(jax.numpy.copy, {**first.params, "stack": None}), "stack": apart}
    second = unrolled.init(0).replace(params=same)
    stream, seen = RowStream(corpus.split("train"), rows=8, segment=16, block=8), []
    cursor = stream.begin()
    for _ in range(4):
        batch, cursor = stream.read(cursor)
        first, metrics = stacked.step(first, batch)
        second, other = unrolled.step(second, batch)
        seen.append((float(metrics["loss"]), float(other["loss"])))
    np.testing.assert_allclose(*np.transpose(seen), rtol=1e-5)


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
