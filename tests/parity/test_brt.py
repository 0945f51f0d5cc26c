"""Law 8 for the Block-Recurrent Transformer: the authors' outputs, carried states and gradients over three segments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from block_recurrent.layers import relative_bias
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.products import FORMS, forced
from block_recurrent.layers.stack import stack
from models.block_recurrent_transformer import BlockRecurrentLayer
from models.feedback import feedback_stack
from models.sliding_window import SlidingWindowLayer
from tests.parity.golden import fixture_files, load, relative_error
from tests.parity.names import layer_params

TOLERANCE = 2e-5


def layer_of(meta, recurrent):
    sizes = {"heads": meta["H"], "head_dim": meta["Dh"], "mlp_dim": meta["F"], "window": meta["W"]}
    sizes["query_tile"] = meta["W"] // 2 if meta["W"] % 2 == 0 else None
    if not recurrent:
        return SlidingWindowLayer(**sizes)
    configuration = "skip" if meta["skip_ffn"] else "single" if meta["single_gate"] else "dual"
    kind = {"bias": "fixed"}.get(meta["gate"], meta["gate"])
    return BlockRecurrentLayer(**sizes, states=meta["S"], dim=meta["D"], gate=kind, configuration=configuration)


def state_of(layer, arrays, prefix):
    """The authors' carried state as ours."""
    keys, values = arrays[f"{prefix}/previous_keys"], arrays[f"{prefix}/previous_values"]
    if isinstance(layer, SlidingWindowLayer):
        return {"keys": keys, "values": values}
    older = np.zeros_like(keys)
    return {
        **layer.initial_state(len(keys)),
        "keys": np.concatenate([older, keys], axis=1),
        "values": np.concatenate([older, values], axis=1),
        "recurrent": arrays[f"{prefix}/recurrent_state"],
    }


def assert_close(actual, expected, what):
    errors = jax.tree.map(relative_error, actual, expected)
    worst = max(jax.tree.leaves(errors))
    assert worst < TOLERANCE, f"{what}: {errors}"


def segments(arrays):
    return [f"seg{i}" for i in range(sum(name.endswith("/start_of_sequence") for name in arrays))]


def starts(arrays, segment, shape):
    start = np.zeros(shape, bool)
    start[:, 0] = arrays[f"{segment}/start_of_sequence"]
    return start


@pytest.mark.parametrize("file", fixture_files("brt", "slide_layer*", "rec_*"))
def test_layer_equals_authors_code(file):
    arrays, meta = load(file)
    layer = layer_of(meta, meta["recurrent"])
    params = layer_params(arrays, "params")
    apply = jax.jit(lambda params, x, state, start: layer.apply({"params": params}, x, state, start))
    gradient = jax.jit(
        jax.grad(lambda p, x, state, start, c: jnp.sum(apply(p, x, state, start)[0] * c), argnums=(0, 1))
    )
    state = layer.initial_state(meta["B"])
    for segment in segments(arrays):
        x = arrays[f"{segment}/xs"]
        start = starts(arrays, segment, x.shape[:2])
        given = state_of(layer, arrays, f"{segment}/state_in")
        grad_params, grad_x = gradient(params, x, given, start, arrays[f"{segment}/cotangent"])
        y, state = apply(params, x, state, start)  # our own state, carried from segment to segment
        assert_close(y, arrays[f"{segment}/ys"], "outputs")
        assert_close(state, state_of(layer, arrays, f"{segment}/state_out"), "state")
        assert_close(grad_x, arrays[f"{segment}/grad_xs"], "gradient of the input")
        assert_close(grad_params, layer_params(arrays, f"{segment}/grad_params"), "gradients")


def model_params(arrays, prefix, layers):
    return {
        "embedding": arrays[f"{prefix}/embed/embedding"],
        "final_norm": arrays[f"{prefix}/final_layernorm/scale"],
        "stack": {f"layers_{i}": layer_params(arrays, f"{prefix}/transformer{i}") for i in range(layers)},
    }


@pytest.fixture(params=FORMS)
def form(request):
    with forced(request.param):
        yield request.param


@pytest.mark.parametrize("file", fixture_files("brt", "stack_*"))
def test_model_equals_authors_code(file, form):
    """Tokens to logits and summed loss, through sliding-window and recurrent layers, by products of both forms."""
    arrays, meta = load(file)
    if meta["feedback"] and form == "plain":
        pytest.skip("the laws compare both forms there")
    layers = [layer_of(meta, i in meta["recurrent_layers"]) for i in range(meta["L"])]
    build = feedback_stack if meta["feedback"] else stack
    model = LanguageModel(meta["V"], meta["D"], build(layers, scan_depth=False), loss_chunk=meta["W"])
    params = model_params(arrays, "params", meta["L"])

    def total(params, tokens, targets, mask, state, start):
        losses, _ = model.apply({"params": params}, tokens, targets, state, start, method="losses")
        return jnp.sum(losses * mask)

    apply = jax.jit(lambda tokens, state, start: model.apply({"params": params}, tokens, state, start))
    value_and_grad = jax.jit(jax.value_and_grad(total))
    state = model.initial_state(meta["B"])
    for segment in segments(arrays):
        tokens, targets, mask = (arrays[f"{segment}/{name}"] for name in ("tokens", "targets", "loss_mask"))
        start = starts(arrays, segment, tokens.shape)
        loss, gradient = value_and_grad(params, tokens, targets, mask, state, start)
        logits, state = apply(tokens, state, start)
        expected = tuple(
            state_of(layer, arrays, f"{segment}/state_out/transformer{i}") for i, layer in enumerate(layers)
        )
        assert_close(logits, arrays[f"{segment}/logits"], "logits")
        assert_close(loss, arrays[f"{segment}/loss_sum"], "loss")
        assert_close(state, expected, "state")
        assert_close(gradient, model_params(arrays, f"{segment}/grad_params", meta["L"]), "gradients")


@pytest.mark.parametrize("file", fixture_files("brt", "tables_*"))
def test_tile_tables_equal_authors_code(file):
    """Mask and bias of a tile, read off window_bias with a table that names its own buckets."""
    arrays, _ = load(file)
    queries, keys = arrays["causal_mask"].shape
    numbered = jnp.arange(relative_bias.BUCKETS, dtype=jnp.float32)[None]
    tile = np.asarray(relative_bias.window_bias(numbered, jnp.ones(1), keys - queries, queries))[0]
    np.testing.assert_array_equal(tile > relative_bias.MASKED / 2, arrays["causal_mask"])
    visible = arrays["causal_mask"]
    np.testing.assert_array_equal(tile[visible], arrays["bucket"][visible])


@pytest.mark.parametrize("file", fixture_files("brt", "bucket_by_distance"))
def test_buckets_equal_authors_code(file):
    arrays, _ = load(file)
    np.testing.assert_array_equal(relative_bias.bucket(arrays["distance"]), arrays["bucket"])
