"""One document scored whole, in odd pieces and token by token: the same bits, for every architecture."""

import jax
import numpy as np
import pytest
from flax import linen as nn

from block_recurrent.data.vocabulary import ByteVocabulary
from block_recurrent.errors import UserError
from block_recurrent.inference import streaming
from block_recurrent.inference.streaming import Scorer, Stream
from block_recurrent.layers.adaptive import Adaptive
from block_recurrent.layers.heads import MixtureOfSoftmaxes
from models.feedback import feedback_stack
from tests.training.test_step import model

MODELS = {
    "slide": {"spec": "2*slide"},
    "recurrent": {"spec": "slide rec slide"},
    "feedback": {"spec": "slide rec", "build": feedback_stack},
    "memorizing": {"spec": "slide mem"},
    "recurrences": {"spec": "qrnn sru srupp lrn atr"},
    "mixed": {"spec": "2*sru rec qrnn"},
    "adaptive": {"spec": "lrn", "head": Adaptive(cutoffs=(60, 120), div_value=2)},
    "mixture of softmaxes": {"spec": "2*qrnn", "head": MixtureOfSoftmaxes(experts=3)},
}
TEXT = "Call me Ishmael. Some years ago, never mind how long precisely; für sich."
IDENTITY = {"config": "this", "step": 1}


@pytest.fixture(scope="module", params=MODELS, ids=MODELS)
def opened(request):
    module = model(**MODELS[request.param])
    tokens = np.zeros((1, module.block), np.int32)
    variables = jax.jit(module.init)(jax.random.key(1), tokens, module.initial_state(1), tokens.astype(bool))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "LONGEST", 16)
        scorer = Scorer(module)
    return scorer, nn.unbox(variables)["params"], ByteVocabulary()


def truth(opened) -> np.ndarray:
    """Bits by one call of the model over the whole document."""
    scorer, params, vocabulary = opened
    tokens = vocabulary.encode(TEXT.encode())[None]
    start = np.arange(tokens.shape[1] - 1)[None] == 0
    state = scorer.model.initial_state(1)
    logits, _ = jax.jit(scorer.model.apply)({"params": params}, tokens[:, :-1], state, start)
    return -np.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[0, :, 0] / np.log(2)


def test_whole_in_pieces_and_token_by_token_cost_the_same(opened):
    expected = truth(opened)
    content = TEXT.encode()
    for sizes in ([len(content)], [1, 13, 1, 7, 20, 100], [1] * len(content)):
        stream, at, scores = Stream(*opened, IDENTITY), 0, None
        for size in sizes:
            piece = stream.feed(content[at : at + size])
            scores, at = piece if scores is None else scores + piece, at + size
        np.testing.assert_allclose(scores.bits[1:], expected, rtol=1e-4, atol=1e-4)
        assert np.isnan(scores.bits[0])
        np.testing.assert_array_equal(scores.offsets, np.arange(len(content) + 1))
        np.testing.assert_allclose(scores.bits_per_byte, expected.mean(), rtol=1e-4)
        assert stream.position == stream.offset == len(content)


def test_a_stream_is_put_away_and_taken_up_again(opened, tmp_path):
    """In the middle of a block, as another stream object; the first one goes on too."""
    first = Stream(*opened, IDENTITY)
    first.feed(TEXT[:21])
    first.save(tmp_path / "halfway.npz")
    second = Stream(*opened, IDENTITY, tmp_path / "halfway.npz")
    np.testing.assert_array_equal(second.feed(TEXT[21:]).bits, first.feed(TEXT[21:]).bits)
    assert second.position == first.position


def test_tokens_may_be_fed_as_they_are(opened):
    by_text, by_tokens = Stream(*opened, IDENTITY), Stream(*opened, IDENTITY)
    tokens = ByteVocabulary().encode(TEXT.encode())
    np.testing.assert_array_equal(by_tokens.feed(tokens).bits, by_text.feed(TEXT).bits)
    with pytest.raises(UserError, match="tokens from 7 to 300"):
        by_tokens.feed([7, 300])


@pytest.fixture(scope="module")
def one():
    module = model(spec="lrn")
    tokens = np.zeros((1, 1), np.int32)
    variables = module.init(jax.random.key(1), tokens, module.initial_state(1), tokens.astype(bool))
    return Scorer(module), nn.unbox(variables)["params"], ByteVocabulary()


def damaged(file, tmp_path):
    (tmp_path / "cut.npz").write_bytes(file.read_bytes()[:-30])
    (tmp_path / "other.npz").write_bytes(b"no archive")
    with np.load(file) as saved:
        arrays = dict(saved)
    np.savez(tmp_path / "shape.npz", **{**arrays, "state_0": arrays["state_0"][:, :3]})
    np.savez(tmp_path / "pickled.npz", **{**arrays, "about": np.array({"format": 1}, dtype=object)})
    return [tmp_path / f"{name}.npz" for name in ("cut", "other", "shape", "pickled", "absent")]


def test_a_file_that_is_no_stream_of_this_run_is_refused(one, tmp_path):
    stream = Stream(*one, IDENTITY)
    stream.feed("abc")
    stream.save(tmp_path / "stream.npz")
    for file in damaged(tmp_path / "stream.npz", tmp_path):
        with pytest.raises(UserError, match=f"{file.name}"):
            Stream(*one, IDENTITY, file)
    with pytest.raises(UserError, match="saved by another step"):
        Stream(*one, {**IDENTITY, "step": 2}, tmp_path / "stream.npz")


def test_memory_does_not_grow_with_the_document(one):
    """One program for every length there is, and the same arrays after a thousand tokens as after ten."""
    stream = Stream(*one, IDENTITY)
    stream.feed("x" * 10)
    shapes = jax.tree.map(np.shape, stream.state)
    for _ in range(50):
        stream.feed("some more text, " * 4)
    assert jax.tree.map(np.shape, stream.state) == shapes
    assert stream.scorer._losses._cache_size() <= len(stream.scorer.lengths)
