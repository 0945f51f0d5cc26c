"""Law 8 for the sliding-window layer: the authors' outputs, carried states and gradients over three segments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from block_recurrent.layers import relative_bias
from models.sliding_window import SlidingWindowLayer
from tests.parity.golden import fixture_files, load, relative_error

TOLERANCE = 2e-5

# Our parameter, the authors' path.
NAMES = {
    ("attention_norm",): "tbase/_kvq/pre_attn_layernorm/scale",
    ("keys",): "tbase/_kvq/keys_layer/kernel",
    ("values",): "tbase/_kvq/values_layer/kernel",
    ("queries",): "tbase/_kvq/queries_layer/kernel",
    ("attention_scale",): "tbase/_kvq/attention_scale",
    ("relative_bias",): "relative_positions/rel_embedding",
    ("attention_output",): "tbase/post_attn_mlp/output_layer/kernel",
    ("feed_forward", "norm"): "tbase/pre_ffn_layernorm/scale",
    ("feed_forward", "hidden"): "tbase/ffn/hidden0/kernel",
    ("feed_forward", "output"): "tbase/ffn/output_layer/kernel",
}


def params_from(arrays, prefix):
    params = {"feed_forward": {}}
    for path, name in NAMES.items():
        (params if len(path) == 1 else params[path[0]])[path[-1]] = arrays[f"{prefix}/{name}"]
    return params


@pytest.mark.parametrize("tiles_per_window", [1, 2])
@pytest.mark.parametrize("file", fixture_files("brt", "slide_layer*"))
def test_slide_layer_equals_authors_code(file, tiles_per_window):
    arrays, meta = load(file)
    layer = SlidingWindowLayer(
        heads=meta["H"],
        head_dim=meta["Dh"],
        mlp_dim=meta["F"],
        window=meta["W"],
        query_tile=meta["W"] // tiles_per_window,
    )
    params = params_from(arrays, "params")
    assert len([name for name in arrays if name.startswith("params/")]) == len(NAMES)
    apply = jax.jit(lambda params, x, state, start: layer.apply({"params": params}, x, state, start))
    gradient = jax.jit(
        jax.grad(lambda p, x, state, start, c: jnp.sum(apply(p, x, state, start)[0] * c), argnums=(0, 1))
    )
    state = layer.initial_state(meta["B"])
    for i in range(sum(name.endswith("/xs") for name in arrays)):
        segment = f"seg{i}"
        x = arrays[f"{segment}/xs"]
        start = np.zeros(x.shape[:2], bool)
        start[:, 0] = arrays[f"{segment}/start_of_sequence"]
        given = {
            "keys": arrays[f"{segment}/state_in/previous_keys"],
            "values": arrays[f"{segment}/state_in/previous_values"],
        }
        grad_params, grad_x = gradient(params, x, given, start, arrays[f"{segment}/cotangent"])
        y, state = apply(params, x, state, start)  # our own state, carried from segment to segment
        assert relative_error(y, arrays[f"{segment}/ys"]) < TOLERANCE
        assert relative_error(state["keys"], arrays[f"{segment}/state_out/previous_keys"]) < TOLERANCE
        assert relative_error(state["values"], arrays[f"{segment}/state_out/previous_values"]) < TOLERANCE
        assert relative_error(grad_x, arrays[f"{segment}/grad_xs"]) < TOLERANCE
        expected = params_from(arrays, f"{segment}/grad_params")
        errors = jax.tree.map(relative_error, grad_params, expected)
        assert max(jax.tree.leaves(errors)) < TOLERANCE, errors


@pytest.mark.parametrize("file", fixture_files("brt", "tables_*"))
def test_tile_tables_equal_authors_code(file):
    """Mask and bias of a tile, read off window_bias with a table that names its own buckets."""
    arrays, _ = load(file)
    queries, keys = arrays["causal_mask"].shape
    window = keys - queries
    numbered = jnp.arange(relative_bias.BUCKETS, dtype=jnp.float32)[None]
    tile = np.asarray(relative_bias.window_bias(numbered, jnp.ones(1), window, queries))[0]
    np.testing.assert_array_equal(tile > relative_bias.MASKED / 2, arrays["causal_mask"])
    visible = arrays["causal_mask"]
    np.testing.assert_array_equal(tile[visible], arrays["bucket"][visible])


@pytest.mark.parametrize("file", fixture_files("brt", "bucket_by_distance"))
def test_buckets_equal_authors_code(file):
    arrays, _ = load(file)
    np.testing.assert_array_equal(relative_bias.bucket(arrays["distance"]), arrays["bucket"])
