"""A split measured document by document, with more and less of its past, and while the model goes on learning."""

import collections
import itertools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from block_recurrent import evaluate
from block_recurrent.data.rows import RowStream
from block_recurrent.data.store import Mixture, split_in_memory
from block_recurrent.data.vocabulary import ByteVocabulary, WordVocabulary
from block_recurrent.errors import UserError
from block_recurrent.inference import dynamic
from block_recurrent.inference.dynamic import DynamicEvaluator, Learning
from block_recurrent.inference.evaluation import Evaluator
from block_recurrent.inference.history import history_curve
from block_recurrent.inference.measuring import Texts, difference, kinds_of_words, measure
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.stack import stack
from models.rnn import RNNLayer
from tests.training.test_step import model

VOCABULARY = ByteVocabulary()
TEXTS = [f"the {name} and the {name} and zebra{i}, the end. ".encode() * 2 for i, name in enumerate("abcdefghijk")]
TEXTS[3] = b"x"  # nothing to predict
PTB = Path(os.environ.get("BR_DATA") or Path(__file__).parents[3] / "shared/data") / "ptb"
BLOCK = 8
LONGEST = 80  # tokens


@pytest.fixture(scope="module")
def module():
    return model(spec="slide rec")


@pytest.fixture(scope="module")
def params(module):
    tokens = np.zeros((1, BLOCK), np.int32)
    variables = jax.jit(module.init)(jax.random.key(1), tokens, module.initial_state(1), tokens.astype(bool))
    return nn.unbox(variables)["params"]


@pytest.fixture(scope="module")
def losses(module, params):
    """Nats of every target of a text, in one call; what it is padded with does not matter to what is before it."""
    start = np.arange(LONGEST)[None] == 0

    @jax.jit
    def padded_losses(tokens):
        state = module.initial_state(1)
        return module.apply({"params": params}, tokens[:, :-1], tokens[:, 1:], state, start, method="losses")[0][0]

    def losses(text: bytes) -> np.ndarray:
        tokens = np.pad(VOCABULARY.encode(text), (0, LONGEST + 1 - len(text)))
        return np.asarray(padded_losses(tokens[None]))[: len(text) - 1]

    return losses


@pytest.fixture(scope="module")
def measured(module, params):
    split = split_in_memory(TEXTS, VOCABULARY)
    evaluator = Evaluator(module, 3, 16, uncut=True)
    return measure(evaluator, params, split, VOCABULARY, [f"text {i}" for i in range(len(TEXTS))])


def test_every_document_has_its_own_sum(measured, losses):
    texts = {f"text {i}": text for i, text in enumerate(TEXTS) if len(text) > 1}
    assert measured.names == tuple(texts)
    np.testing.assert_allclose(measured.nats, [losses(text).sum() for text in texts.values()], rtol=1e-4)
    np.testing.assert_array_equal(measured.tokens, [len(text) - 1 for text in texts.values()])
    np.testing.assert_array_equal(measured.bytes, measured.tokens)
    assert measured.score.tokens == measured.tokens.sum() and measured.score.documents == len(texts)
    low, high = measured.interval()
    assert low < measured.score.bits_per_token < high


def test_positions_are_those_in_the_document(measured, losses):
    assert measured.positions.labels[:3] == ("0 to 8", "8 to 16", "16 to 32")
    each = [losses(text) for text in TEXTS if len(text) > 1]
    for i, (begin, end) in enumerate([(0, 8), (8, 16), (16, 32)]):
        expected = np.concatenate([found[begin:end] for found in each])
        assert measured.positions.tokens[:, i].sum() == len(expected)
        np.testing.assert_allclose(measured.positions.bits_per_token[i], expected.mean() / np.log(2), rtol=1e-4)
    assert measured.positions.tokens.sum() == measured.score.tokens


def test_rare_words_are_found_when_they_come_and_when_they_come_again(module):
    stream = Evaluator(module, 2, 16, uncut=True).stream(split_in_memory(TEXTS, VOCABULARY))
    texts = Texts(stream, VOCABULARY)
    kinds = kinds_of_words(texts)(texts.tokens(0))
    text = TEXTS[0]
    first, again = text.index(b"zebra0"), text.rindex(b"zebra0")
    expected = np.full(len(text), 2)
    expected[first : first + 6], expected[again : again + 6] = 0, 1
    np.testing.assert_array_equal(kinds, expected)


def test_kinds_of_words_add_up(measured):
    assert measured.words.tokens.sum() == measured.score.tokens
    np.testing.assert_allclose(measured.words.nats.sum(), measured.score.nats)
    assert measured.words.tokens[0].tolist() == [6, 6, len(TEXTS[0]) - 1 - 12]


def test_two_runs_are_paired(measured):
    worse = type(measured)(**{**vars(measured), "nats": measured.nats + 0.1 * measured.tokens})
    apart, (low, high) = difference(worse, measured)
    np.testing.assert_allclose([apart, low, high], 0.1 / np.log(2), rtol=1e-6)
    with pytest.raises(UserError, match="same documents"):
        difference(measured, type(measured)(**{**vars(measured), "names": measured.names[::-1]}))


def test_the_parts_of_a_mixture_follow_one_another(module, params, losses):
    parts = [split_in_memory(TEXTS[:2], VOCABULARY), split_in_memory(TEXTS[4:6], VOCABULARY)]
    mixture = Mixture(tuple((part, 1.0) for part in parts))
    found = measure(Evaluator(module, 3, 16, uncut=True), params, mixture, VOCABULARY)
    expected = [losses(text).sum() for text in (*TEXTS[:2], *TEXTS[4:6])]
    np.testing.assert_allclose(found.nats, expected, rtol=1e-4)
    assert found.words is None  # too few documents to call a word rare


def test_a_model_that_forgets_reads_every_stretch_alone(module, params, losses):
    text = TEXTS[0]
    split = split_in_memory([text], VOCABULARY)
    found = measure(Evaluator(module, 1, 16, uncut=True, reset_every=2), params, split, VOCABULARY)
    stretches = [text[at : at + 17] for at in range(0, len(text) - 1, 16)]
    np.testing.assert_allclose(found.nats.sum(), sum(losses(stretch).sum() for stretch in stretches), rtol=1e-4)


def test_history_scores_the_same_blocks_with_more_before_them(module, params, losses):
    """Each figure is that of the block's losses in a text that begins so many blocks before it."""
    split = split_in_memory(TEXTS[:2], VOCABULARY)
    curve = history_curve(module, params, split, longest=4, rows=2)
    assert curve.blocks == (0, 1, 2, 4)
    places = [(text, at) for text in TEXTS[:2] for at in range(32, len(text) - BLOCK, 40)]
    assert len(places) == len(curve.nats)
    for (text, at), found in zip(places, curve.nats, strict=True):
        expected = [losses(text[at - n * BLOCK : at + BLOCK + 1])[n * BLOCK :].sum() for n in curve.blocks]
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    gains = curve.gains()
    assert gains[0][0] == 0.0
    np.testing.assert_allclose(gains[-1][0], curve.bits_per_token[0] - curve.bits_per_token[-1])
    with pytest.raises(UserError, match="no document has 8,009 tokens"):
        history_curve(module, params, split, longest=1000)


@pytest.fixture(scope="module")
def learner():
    """A recurrent model and its parameters, as they come."""
    module = model(spec="lrn")
    variables = module.init(jax.random.key(1), np.zeros((1, 1), int), module.initial_state(1), np.zeros((1, 1), bool))
    return module, nn.unbox(variables)["params"]


def test_dynamic_evaluation_follows_the_equations(learner, monkeypatch):
    """Against a plain loop: each document from the trained parameters, each segment scored and then learned from."""
    module, params = learner
    monkeypatch.setattr(dynamic, "STATISTICS_BATCH", BLOCK)  # one row of a segment
    texts = [text[: 9 * BLOCK + 1] for text in TEXTS[:2]]  # nine segments each
    split, learning = split_in_memory(texts, VOCABULARY), Learning(rate=0.01, decay=0.1, epsilon=1e-3)
    seen = []
    evaluator = DynamicEvaluator(module, BLOCK, split, learning, lambda *told: seen.append(told))
    found = measure(evaluator, params, split, VOCABULARY)
    assert seen[-1] == (18 * BLOCK, 18 * BLOCK) == learning.reach(split), "the whole training split is read"

    @jax.jit
    def gradient_of(params, tokens, state, start):
        def loss(params):
            each, after = module.apply({"params": params}, tokens[:, :-1], tokens[:, 1:], state, start, method="losses")
            return jnp.mean(each), (jnp.sum(each), after)

        return jax.grad(loss, has_aux=True)(params)

    def segments(text):
        tokens = VOCABULARY.encode(text)[None]
        for at in range(0, 9 * BLOCK, BLOCK):
            yield tokens[:, at : at + BLOCK + 1], np.arange(BLOCK)[None] + at == 0

    squares, state = jax.tree.map(np.zeros_like, params), module.initial_state(1)
    for tokens, start in itertools.chain(*map(segments, texts)):
        gradient, (_, state) = gradient_of(params, tokens, state, start)
        squares = jax.tree.map(lambda s, g: s + np.asarray(g) ** 2 / 18, squares, gradient)
    scales = jax.tree.map(np.sqrt, squares)
    mean_scale = np.mean([leaf.mean() for leaf in jax.tree.leaves(scales)])
    rate, decay = 0.01 * BLOCK / 5, 1.0 - 0.9 ** (BLOCK / 5)

    def moved(now, trained, gradient, scale):
        pull = np.minimum(decay * scale / mean_scale, 1.0)
        return now - rate * np.asarray(gradient) / (scale + learning.epsilon) + pull * (trained - now)

    params = jax.tree.map(np.asarray, params)
    for text, nats in zip(texts, found.nats, strict=True):
        now, state, expected = params, module.initial_state(1), 0.0
        for tokens, start in segments(text):
            gradient, (segment_nats, state) = gradient_of(now, tokens, state, start)
            expected += float(segment_nats)
            now = jax.tree.map(moved, now, params, gradient, scales)
        np.testing.assert_allclose(nats, expected, rtol=1e-3)


def trained(module, params, split, rows: int, segment: int, steps: int):
    """The parameters after some steps of Adam on rows that remember nothing."""
    optimizer = optax.adam(0.01)

    @jax.jit
    def step(params, moments, batch):
        def loss(params):
            given = batch["inputs"], batch["targets"], module.initial_state(rows), batch["start"]
            return jnp.mean(module.apply({"params": params}, *given, method="losses")[0])

        updates, moments = optimizer.update(jax.grad(loss)(params), moments)
        return optax.apply_updates(params, updates), moments

    moments = optimizer.init(params)
    for batch in itertools.islice(RowStream(split, rows, segment, 1), steps):
        params, moments = step(params, moments, batch)
    return params


def test_dynamic_evaluation_lowers_the_loss_by_its_defaults(learner):
    """A model trained on some letters reads a text that goes on about others."""
    module, params = learner
    split = split_in_memory(TEXTS, VOCABULARY)
    params = trained(module, params, split, rows=8, segment=16, steps=60)
    unseen = split_in_memory([b"the mule and the mule and the plum, the end. " * 20], VOCABULARY)
    fixed = measure(Evaluator(module, 1, 20, uncut=True), params, unseen, VOCABULARY)
    following = measure(DynamicEvaluator(module, 5, split, Learning()), params, unseen, VOCABULARY)
    assert following.score.bits_per_token < 0.98 * fixed.score.bits_per_token


@pytest.mark.skipif(not PTB.exists(), reason=f"no Penn Treebank in {PTB}")
def test_dynamic_evaluation_lowers_the_perplexity_of_a_small_lstm_on_the_penn_treebank():
    """One layer of 32 on the most frequent words, briefly trained; by the defaults, its whole training split read."""
    train, test = ((PTB / f"ptb.{split}.txt").read_bytes() for split in ("train", "test"))
    counts = collections.Counter(train.split())
    words = WordVocabulary([b"<eos>", *(word for word, _ in counts.most_common(999))])
    train, test = (split_in_memory([text[:size]], words) for text, size in ((train, 200_000), (test, 8_000)))
    module = LanguageModel(words.size, 32, stack([RNNLayer(32, 32)]), embedding_init=nn.initializers.normal(0.1))
    tokens, start = np.zeros((1, 1), np.int32), np.ones((1, 1), bool)
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), tokens, module.initial_state(1), start))["params"]
    params = trained(module, params, train, rows=1, segment=64, steps=400)
    fixed = measure(Evaluator(module, 1, 64, uncut=True), params, test, words).score
    following = measure(DynamicEvaluator(module, 5, train, Learning()), params, test, words).score
    print(2**fixed.bits_per_token, 2**following.bits_per_token)
    assert 2**following.bits_per_token < 0.97 * 2**fixed.bits_per_token


def test_statistics_of_gradients_are_bounded(learner):
    module, params = learner
    split, learning, seen = split_in_memory(TEXTS, VOCABULARY), Learning(statistics=70), []
    DynamicEvaluator(module, 20, split, learning, lambda *told: seen.append(told)).gradient_scales(params)
    assert learning.reach(split) == (70, sum(len(text) - 1 for text in TEXTS))
    assert seen[-1][0] >= 70 and [total for _, total in seen] == [70] * len(seen)


@pytest.mark.parametrize("wrong", [{"rate": float("nan")}, {"decay": 1.0}, {"epsilon": 0.0}, {"statistics": 0}])
def test_a_learning_rate_out_of_range_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(UserError, match=f"^{name} is "):
        Learning(**wrong)


def test_what_is_of_dynamic_evaluation_is_not_ignored_without_it():
    with pytest.raises(UserError, match="--epsilon is of dynamic evaluation: give --dynamic too"):
        evaluate.main(["runs/any", "--epsilon=1e-3"])
    with pytest.raises(UserError, match="--decay: '1' is not a number, 0 or more, below 1"):
        evaluate.main(["runs/any", "--dynamic", "--decay=1"])
