"""The language model's loss in chunks, and dropout where the authors put it."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AbstractMesh

from block_recurrent.layers.dropout import tied_dropout
from block_recurrent.layers.heads import cross_entropy
from block_recurrent.layers.language_model import LanguageModel, tokens_at_once
from block_recurrent.layers.stack import pattern, stack
from block_recurrent.training.sharding import in_mesh
from models.sliding_window import SlidingWindowLayer

ROWS, LENGTH, VOCABULARY = 2, 32, 23


def model(dropout=0.0, chunk=8, **options):
    layer = SlidingWindowLayer(heads=2, head_dim=8, mlp_dim=20, window=8, dropout=dropout)
    return LanguageModel(
        VOCABULARY, 12, stack(pattern("2*s", {"s": layer}), **options), dropout=dropout, loss_chunk=chunk
    )


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (ROWS, LENGTH + 1))
    start = np.zeros((ROWS, LENGTH), bool)
    start[:, 0] = True
    return tokens[:, :-1], tokens[:, 1:], model().initial_state(ROWS), start


@pytest.fixture(scope="module")
def params(inputs):
    tokens, _, state, start = inputs
    return nn.unbox(jax.jit(model().init)(jax.random.key(0), tokens, state, start))


def total_loss(module):
    def total(params, tokens, targets, state, start):
        return jnp.sum(module.apply(params, tokens, targets, state, start, method="losses")[0])

    return total


@pytest.mark.parametrize("chunk", [5, 8, 16, 100])
def test_chunked_loss_equals_cross_entropy_of_all_logits(inputs, params, chunk):
    """Values and gradients, also for a chunk that does not divide the length."""
    tokens, targets, state, start = inputs

    def whole(params, *rest):
        return jnp.sum(cross_entropy(model().apply(params, tokens, state, start)[0], targets))

    value, gradient = jax.jit(jax.value_and_grad(total_loss(model(chunk=chunk))))(params, *inputs)
    expected, expected_gradient = jax.jit(jax.value_and_grad(whole))(params, *inputs)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradient, expected_gradient)


def test_a_device_scores_as_many_tokens_at_once_as_make_256_mebibytes():
    """The fewer rows and the smaller part of the vocabulary a device has, the more tokens of each row."""
    assert tokens_at_once(rows=32, scores=2**15) == 64
    assert tokens_at_once(rows=32, scores=2**30) == 1
    with in_mesh(AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"))):
        assert tokens_at_once(rows=32, scores=2**15) == 64 * 8 * 2


def shapes_in(jaxpr):
    """Every shape that a traced program makes, in its loops too."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval.shape
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from shapes_in(inner)


def test_all_logits_are_never_held(inputs, params):
    """No array of the training loss and its gradient has the size of rows x length x vocabulary."""
    for chunk, held in ((8, False), (LENGTH, True)):
        traced = jax.make_jaxpr(jax.grad(total_loss(model(chunk=chunk))))(params, *inputs)
        largest = max(np.prod(shape) for shape in shapes_in(traced.jaxpr) if VOCABULARY in shape and len(shape) > 2)
        assert (largest >= ROWS * LENGTH * VOCABULARY) == held


@pytest.mark.parametrize(
    "options",
    [
        {"scan_depth": False},
        {"remat": True},
        {"remat": "products"},
        {"remat": "projections"},
        {"remat": True, "scan_depth": False},
    ],
)
def test_remat_and_depth_scan_change_nothing(inputs, params, options):
    """Same parameters, whether they are stacked, recomputed or neither, give the same losses and gradients."""
    reference = jax.jit(jax.value_and_grad(total_loss(model())))(params, *inputs)
    other, state = model(**options), model(**options).initial_state(ROWS)
    if not options.get("scan_depth", True):
        layers = params["params"]["stack"]["layers_0"]
        unstacked = {f"layers_{i}": jax.tree.map(lambda a, i=i: a[i], layers) for i in range(2)}
        params = {"params": {**params["params"], "stack": unstacked}}
    tokens, targets, _, start = inputs
    value, gradient = jax.jit(jax.value_and_grad(total_loss(other)))(params, tokens, targets, state, start)
    np.testing.assert_allclose(value, reference[0], rtol=1e-6)
    np.testing.assert_allclose(
        gradient["params"]["embedding"], reference[1]["params"]["embedding"], rtol=1e-4, atol=1e-5
    )


def test_dropout_is_on_exactly_where_a_key_is_given(inputs, params):
    tokens, _, state, start = inputs

    def run(module, **rngs):
        return module.apply(params, tokens, state, start, rngs=rngs)[0]

    plain = run(model())
    np.testing.assert_array_equal(run(model(dropout=0.5)), plain)
    first, second = (run(model(dropout=0.5), dropout=jax.random.key(i)) for i in (1, 2))
    assert not np.allclose(first, plain) and not np.allclose(first, second)
    np.testing.assert_array_equal(run(model(dropout=0.5), dropout=jax.random.key(1)), first)


def test_dropout_masks_are_shared_by_rows_and_repeat_in_time():
    class Drop(nn.Module):
        @nn.compact
        def __call__(self, x):
            return tied_dropout(self, x, 0.5, period=4)

    dropped = np.asarray(Drop().apply({}, jnp.ones((3, 10, 64)), rngs={"dropout": jax.random.key(0)}))
    np.testing.assert_array_equal(dropped[0], dropped[1])
    np.testing.assert_array_equal(dropped[:, :4], dropped[:, 4:8])
    np.testing.assert_array_equal(dropped[:, :2], dropped[:, 8:])
    assert set(np.unique(dropped)) == {0.0, 2.0} and 0.3 < np.mean(dropped == 0.0) < 0.7


@pytest.mark.parametrize("single", [False, True])
def test_rows_have_masks_of_their_own_where_every_number_is_dropped_by_itself(inputs, params, single):
    tokens, _, state, start = inputs
    module = model(dropout=0.5).clone(single_dropout=single)
    features = jax.jit(functools.partial(module.apply, method="features"))
    first, second = features(params, tokens, state, start, rngs={"dropout": jax.random.key(0)})[0]
    assert np.array_equal(first == 0.0, second == 0.0) == (not single)


def test_bfloat16_embedding_gradient_adds_up_frequent_tokens():
    """A token used a thousand times: a bfloat16 sum would stop growing at 256."""
    tokens = np.ones((4, 512), np.int32)
    start, targets = np.zeros(tokens.shape, bool), np.full(tokens.shape, 2)

    def gradient(dtype):
        layer = SlidingWindowLayer(heads=2, head_dim=8, mlp_dim=20, window=64, dtype=dtype)
        module = LanguageModel(VOCABULARY, 12, stack(pattern("s", {"s": layer})), dtype=dtype)
        params = nn.unbox(module.init(jax.random.key(0), tokens[:, :64], module.initial_state(4), start[:, :64]))
        return jax.jit(jax.grad(total_loss(module)))(params, tokens, targets, module.initial_state(4), start)

    exact, half = (np.asarray(gradient(dtype)["params"]["embedding"][1]) for dtype in (jnp.float32, jnp.bfloat16))
    assert np.linalg.norm(half - exact) < 0.03 * np.linalg.norm(exact)


def test_dropout_does_not_depend_on_the_query_tile(inputs, params):
    tokens, targets, state, start = inputs

    def losses(tile):
        layer = SlidingWindowLayer(heads=2, head_dim=8, mlp_dim=20, window=8, dropout=0.3, query_tile=tile)
        module = LanguageModel(VOCABULARY, 12, stack(pattern("2*s", {"s": layer})))
        rngs = {"dropout": jax.random.key(0)}
        return module.apply(params, tokens, targets, state, start, method="losses", rngs=rngs)[0]

    np.testing.assert_allclose(losses(2), losses(8), rtol=1e-5, atol=1e-5)


def test_bfloat16_compute_keeps_float32_parameters_and_close_losses(inputs, params):
    layer = SlidingWindowLayer(heads=2, head_dim=8, mlp_dim=20, window=8, dtype=jnp.bfloat16)
    half = LanguageModel(VOCABULARY, 12, stack(pattern("2*s", {"s": layer})), dtype=jnp.bfloat16)
    tokens, targets, _, start = inputs
    shapes = jax.eval_shape(half.init, jax.random.key(0), tokens, half.initial_state(ROWS), start)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}
    losses, state = half.apply(params, tokens, targets, half.initial_state(ROWS), start, method="losses")
    assert losses.dtype == jnp.float32 and {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("bfloat16")}
    expected, _ = model().apply(params, tokens, targets, model().initial_state(ROWS), start, method="losses")
    np.testing.assert_allclose(losses, expected, atol=0.15)
