"""Laws 1 to 7 of the state contract, over every layer of the registry."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers import products
from block_recurrent.layers.language_model import LanguageModel
from models.r_transformer import RTransformerLayer
from tests.laws.registry import CASES
from tests.reference.constants import recorded, repeated

ROWS = 3
BLOCKS = 4
PIECE = 6  # tokens that stand for a block where a layer has none
ONE_OF_EACH = {case.name for case in {type(case.layer): case for case in reversed(CASES)}.values()}
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


class Subject:
    """A layer with random parameters, a random state as if from an earlier segment, and four blocks of input."""

    def __init__(self, case):
        self.case, self.layer = case, case.layer
        self.block = self.layer.block if self.layer.block > 1 else PIECE
        self.length = BLOCKS * self.block
        rng = np.random.default_rng(0)
        if case.vocabulary:
            self.x = rng.integers(0, case.vocabulary, (ROWS, self.length))
        elif case.record:
            self.x = rng.integers(0, 256, (ROWS, self.length, case.record)).astype(np.uint8)
        else:
            self.x = rng.normal(size=(ROWS, self.length, case.dim)).astype(np.float32)
        self.no_start = np.zeros((ROWS, self.length), bool)
        self.start = self.no_start.copy()
        self.start[0, 0] = self.start[1, self.block] = self.start[1, 3 * self.block] = True
        empty = self.layer.initial_state(ROWS)
        params = nn.unbox(jax.jit(self.layer.init)(jax.random.key(0), self.x, empty, self.no_start))["params"]
        # Scales, biases and whatever starts as a constant must matter in the comparison: move everything a little.
        self.params = jax.tree.map(lambda p: p + 0.2 * rng.normal(size=p.shape).astype(np.float32), params)
        self.apply = jax.jit(lambda params, x, state, start: self.layer.apply({"params": params}, x, state, start))
        _, self.state = self.run(self.x[:, : self.block], empty, self.no_start[:, : self.block])

    def run(self, x, state, start):
        return self.apply(self.params, jnp.asarray(x), state, jnp.asarray(start))

    def run_in_pieces(self, lengths):
        """Outputs and final state of the whole input, fed in pieces of the given lengths."""
        assert sum(lengths) == self.length
        state, outputs, at = self.state, [], 0
        for n in lengths:
            y, state = self.run(self.x[:, at : at + n], state, self.start[:, at : at + n])
            outputs.append(y)
            at += n
        return jnp.concatenate(outputs, axis=1), state

    @functools.cached_property
    def gradient(self):
        """Of sum(y * cotangent), by the parameters, compiled once for all that need it."""

        def total(params, state, cotangent):
            return jnp.sum(self.apply(params, self.x, state, self.start)[0] * cotangent)

        return jax.jit(jax.grad(total))

    def reference(self, params):
        """The slow version's outputs and state, in float64."""
        x = self.x.astype(np.float64) if self.x.dtype == np.float32 else self.x
        return self.case.reference(self.layer, params, x, in_float64(self.state), self.start)

    @functools.cached_property
    def whole(self):
        return self.run(self.x, self.state, self.start)

    def altered(self, t):
        """The input with token t of every row changed."""
        x = self.x.copy()
        if self.case.vocabulary:
            x[:, t] = (x[:, t] + 1) % self.case.vocabulary
        else:
            x[:, t] = ~x[:, t] if self.case.record else -x[:, t] + 1.0
        return x


@pytest.fixture(scope="module", params=CASES, ids=[case.name for case in CASES])
def subject(request):
    """A module's fixture, so that all laws of a layer run one after another and its compiled programs can go."""
    yield Subject(request.param)
    jax.clear_caches()


def assert_trees_close(actual, expected, **tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, err_msg=jax.tree_util.keystr(path), **(tolerance or TOLERANCE))


def rows(tree, index):
    return jax.tree.map(lambda a: a[index], tree)


def test_state_keeps_its_shape(subject):
    """State in and out have the same tree, shapes and types, all led by the batch axis."""
    empty = subject.layer.initial_state(ROWS)
    _, after = subject.whole
    shapes = [jax.tree.map(lambda a: (a.shape, a.dtype), tree) for tree in (empty, subject.state, after)]
    assert shapes[0] == shapes[1] == shapes[2]
    assert all(leaf.shape[0] == ROWS for leaf in jax.tree.leaves(empty))


@pytest.mark.parametrize("pieces", ["blocks", "halves", "odd"])
def test_chunks_equal_whole(subject, pieces):
    """Law 1, also where the pieces are no multiple of the block and a document starts inside one."""
    w = subject.block
    lengths = {"blocks": [w] * BLOCKS, "halves": [2 * w, 2 * w], "odd": [w + 1, 1, 2 * w - 1, w - 1]}[pieces]
    assert_trees_close(subject.run_in_pieces(lengths), subject.whole)


def test_steps_equal_whole(subject):
    """Law 2: one token at a time, across block edges and document starts."""
    assert_trees_close(subject.run_in_pieces([1] * subject.length), subject.whole)


def test_steps_and_blocks_continue_each_other(subject):
    """Laws 1 and 2 together: single tokens, odd pieces and whole blocks in one stream."""
    w = subject.block
    x, state = subject.x, subject.state
    expected, expected_state = subject.run(x, state, subject.no_start)
    outputs, at = [], 0
    for n in (1, w, 2, 2 * w, w - 3):
        y, state = subject.run(x[:, at : at + n], state, subject.no_start[:, at : at + n])
        outputs.append(y)
        at += n
    assert at == subject.length
    assert_trees_close((jnp.concatenate(outputs, axis=1), state), (expected, expected_state))


@pytest.mark.parametrize("blocks", [0.5, 1.5])
def test_a_call_of_odd_length_takes_starts_anywhere(subject, blocks):
    """Law 4 where no block helps: also for a length that only a smaller layer of a stack would call whole."""
    n = int(blocks * subject.block)
    if n % subject.block == 0:
        pytest.skip("every length is a multiple of this layer's block")
    x, start = subject.x[:, :n], np.zeros((ROWS, n), bool)
    start[0, 1] = start[1, n - 1] = start[2, n // 2] = True
    whole = subject.run(x, subject.state, start)
    state, outputs = subject.state, []
    for t in range(n):
        y, state = subject.run(x[:, t : t + 1], state, start[:, t : t + 1])
        outputs.append(y)
    assert_trees_close((jnp.concatenate(outputs, axis=1), state), whole)


def test_states_for_decoding(subject):
    """Laws 1, 2, 4 and 6 by the state that decoding keeps: from inside a block, starts anywhere, and back again."""
    if not hasattr(subject.layer, "for_decoding"):
        pytest.skip("this layer decodes by the state that it trains with")
    if isinstance(subject.layer, LanguageModel | RTransformerLayer) and subject.case.name not in ONE_OF_EACH:
        pytest.skip("the same window, under another head or cell")
    for_decoding, from_decoding = (jax.jit(getattr(subject.layer, f"{way}_decoding")) for way in ("for", "from"))
    inside = subject.block + 1  # a length that law 1 has compiled
    n = inside + subject.block + 1
    x, start = subject.x[:, :n], np.zeros((ROWS, n), bool)
    start[0, inside] = start[1, inside + 2] = start[2, n - 2] = True
    _, state = subject.run(x[:, :inside], subject.state, subject.no_start[:, :inside])
    decoding = for_decoding(state)
    assert all(leaf.shape[0] == ROWS for leaf in jax.tree.leaves(decoding))
    assert_trees_close(from_decoding(decoding), state)

    order = np.array([2, 0, 1])
    permuted = rows(decoding, order)
    for t in range(inside, n):
        y, state = subject.run(x[:, t : t + 1], state, start[:, t : t + 1])
        again, after = subject.run(x[:, t : t + 1], decoding, start[:, t : t + 1])
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, decoding)
        decoding = after
        moved, permuted = subject.run(x[order, t : t + 1], permuted, start[order, t : t + 1])
        assert_trees_close(again, y)
        assert_trees_close(moved, again[order])
    assert_trees_close(from_decoding(decoding), state)
    assert_trees_close(rows(from_decoding(decoding), order), from_decoding(permuted))
    segment, none = subject.x[:, : subject.block], subject.no_start[:, : subject.block]
    (y, state), (again, after) = (subject.run(segment, given, none) for given in (state, decoding))
    assert_trees_close((again, from_decoding(after)), (y, state))


def test_causality(subject):
    """Law 3: changing input t changes outputs from t on, and none before."""
    y, _ = subject.whole
    for t in (1, subject.block - 1, subject.block, 2 * subject.block + 1):
        changed, _ = subject.run(subject.altered(t), subject.state, subject.start)
        np.testing.assert_array_equal(changed[:, :t], y[:, :t])
        assert np.all(np.any(changed[:, t] != y[:, t], axis=-1))


def test_a_start_forgets_and_neighbours_do_not_notice(subject):
    """Law 4."""
    w = subject.block
    start = subject.no_start.copy()
    start[1, w] = True
    y, after = subject.run(subject.x, subject.state, start)
    plain, plain_after = subject.run(subject.x, subject.state, subject.no_start)
    others = np.array([0, 2])
    assert_trees_close(rows((y, after), others), rows((plain, plain_after), others), rtol=0, atol=0)
    assert not np.allclose(y[1, w:], plain[1, w:])

    alone_x = np.roll(subject.x, -w, axis=1)[:, : 3 * w]
    alone_start = np.zeros((ROWS, 3 * w), bool)
    alone_start[:, 0] = True
    alone, alone_after = subject.run(alone_x, subject.layer.initial_state(ROWS), alone_start)
    assert_trees_close(rows((y[:, w:], after), 1), rows((alone, alone_after), 1))


def test_every_parameter_learns(subject):
    """Law 5: after two segments every parameter has a gradient that is not zero."""
    cotangent = np.random.default_rng(1).normal(size=subject.whole[0].shape).astype(np.float32)
    first = subject.gradient(subject.params, subject.layer.initial_state(ROWS), cotangent)
    second = subject.gradient(subject.params, subject.state, cotangent)
    total = jax.tree.map(lambda a, b: np.abs(a) + np.abs(b), first, second)
    for path, gradient in jax.tree_util.tree_leaves_with_path(total):
        assert np.all(np.isfinite(gradient)), jax.tree_util.keystr(path)
        assert np.any(gradient != 0.0), jax.tree_util.keystr(path)


def test_rows_are_independent_and_ordered(subject):
    """Law 6."""
    order = np.array([2, 0, 1])
    permuted = subject.run(subject.x[order], rows(subject.state, order), subject.start[order])
    assert_trees_close(permuted, rows(subject.whole, order))


def in_float64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def test_reference_values(subject):
    """Law 7, values and carried state, against the NumPy loop."""
    assert_trees_close(subject.whole, subject.reference(in_float64(subject.params)), rtol=2e-5, atol=5e-5)


def test_reference_gradients(subject):
    """Law 7, gradients: the derivative along random directions equals the reference's difference quotient."""
    rng = np.random.default_rng(2)
    cotangent = rng.normal(size=subject.whole[0].shape).astype(np.float32)
    params = in_float64(subject.params)

    def slow(params):
        with repeated(constants):
            return np.sum(subject.reference(params)[0] * cotangent)

    with recorded() as constants:
        subject.reference(params)
    gradient = in_float64(subject.gradient(subject.params, subject.state, cotangent))
    for _ in range(2):
        direction = jax.tree.map(lambda p: rng.normal(size=p.shape), params)
        step = 1e-7  # so small that hardly any relu turns on the way
        moved = [jax.tree.map(lambda p, d, s=s: p + s * d, params, direction) for s in (step, -step)]
        expected = (slow(moved[0]) - slow(moved[1])) / (2 * step)
        along = sum(jax.tree.leaves(jax.tree.map(lambda g, d: np.sum(g * d), gradient, direction)))
        size = np.sqrt(sum(jax.tree.leaves(jax.tree.map(lambda g: np.sum(g * g), gradient))))
        assert abs(along - expected) < 1e-4 * size


def test_a_start_forgets_what_is_no_number(subject):
    """Law 4 in decoding: what an earlier document has spoilt does not reach the next one."""
    if not hasattr(subject.layer, "for_decoding") or subject.case.name not in ONE_OF_EACH:
        pytest.skip("this layer decodes by the state that it trains with, or another case is of its kind")
    fresh = subject.layer.for_decoding(subject.layer.initial_state(ROWS))
    x, start = subject.x[:, :1], np.ones((ROWS, 1), bool)

    def spoilt(path, leaf):
        holds = str(getattr(path[-1], "key", "")).endswith(("keys", "values", "recurrent"))
        return leaf * jnp.nan if holds and "memory" not in str(path[-1]) else leaf

    expected, state = subject.run(x, fresh, start)
    found, again = subject.run(x, jax.tree_util.tree_map_with_path(spoilt, fresh), start)
    assert_trees_close(found, expected)
    assert_trees_close(*(subject.layer.from_decoding(each) for each in (again, state)))


def test_gradients_do_not_depend_on_the_form_of_products(subject):
    """The form that the platform prefers is the one that the other laws run."""
    if subject.case.name not in ONE_OF_EACH:
        pytest.skip("another case is of this kind")
    cotangent = np.random.default_rng(1).normal(size=subject.whole[0].shape).astype(np.float32)

    def total(params):  # a function of its own, so that it is traced anew
        return jnp.sum(subject.layer.apply({"params": params}, subject.x, subject.state, subject.start)[0] * cotangent)

    (other,) = (form for form in products.FORMS if form != products.form_in_use())
    with products.forced(other):
        found = jax.jit(jax.grad(total))(subject.params)
    assert_trees_close(found, subject.gradient(subject.params, subject.state, cotangent), rtol=1e-4, atol=1e-4)


SINGLE = {type(layer): layer for case in CASES for layer in getattr(case.layer, "layers", (case.layer,))}
WRONG = {int: (-1, 2.5, True, "a"), float: (math.nan, math.inf, "a"), bool: ("yes", 1)}


@pytest.mark.parametrize("layer", SINGLE.values(), ids=[kind.__name__ for kind in SINGLE])
def test_fields_out_of_range_are_refused_when_a_layer_is_built(layer):
    for field in dataclasses.fields(layer):
        wrong = list(WRONG.get(field.type, ()))
        wrong += [1.0, -0.5] if field.name.endswith("dropout") else []
        wrong += ["float17", "int8", None] if field.name == "dtype" else []
        for value in wrong:
            with pytest.raises(UserError, match=f"{field.name} is "):
                layer.clone(**{field.name: value})
