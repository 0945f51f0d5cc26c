"""A text in pieces has the tokens of the whole, and every byte of it belongs to one of them."""

import random

import numpy as np
import pytest

from block_recurrent.data import encoding
from block_recurrent.data.encoding import Encoder
from block_recurrent.data.train_vocabulary import train_sentencepiece
from block_recurrent.data.vocabulary import ByteVocabulary, SentencePieceVocabulary, WordVocabulary

WORDS = [b"one", b"two", b"three,", "für".encode(), b"x"]


@pytest.fixture(scope="module")
def text() -> bytes:
    rng = random.Random(0)
    return b"".join(rng.choice(WORDS) + rng.choice([b" ", b" ", b"  ", b"\n", b" \n"]) for _ in range(900)) + b"last"


@pytest.fixture(scope="module", params=["bytes", "eos", "sentences", "bpe", "unigram"])
def vocabulary(request, text, tmp_path_factory):
    if request.param == "bytes":
        return ByteVocabulary()
    if request.param in ("eos", "sentences"):
        end = {"eos": b"<eos>", "sentences": b"<S>"}[request.param]
        return WordVocabulary([*WORDS, end, b"<unk>"])
    file = tmp_path_factory.mktemp("vocabulary") / "pieces.model"
    train_sentencepiece([text], 280, file, kind=request.param)
    return SentencePieceVocabulary(file)


def in_pieces(vocabulary, text, longest):
    rng, encoder, found = random.Random(longest), Encoder(vocabulary), []
    while text:
        size = rng.randint(0, longest)
        found.append(encoder.feed(text[:size]))
        text = text[size:]
    found.append(encoder.feed(b"", last=True))
    return [np.concatenate(each) for each in zip(*found, strict=True)]


@pytest.mark.parametrize("longest", [1, 50, 4000])
def test_pieces_have_the_tokens_of_the_whole(vocabulary, text, longest, monkeypatch):
    monkeypatch.setattr(encoding, "LONG", 300)
    tokens, sizes = Encoder(vocabulary).feed(text, last=True)
    assert [token.tolist() for token in in_pieces(vocabulary, text, longest)] == [tokens.tolist(), sizes.tolist()]
    assert sizes.sum() == len(text) and len(sizes) == len(tokens)
    np.testing.assert_array_equal(tokens, vocabulary.encode(text))


def test_sizes_are_of_the_tokens(vocabulary, text):
    tokens, sizes = Encoder(vocabulary).feed(text[:200], last=True)
    ends = np.cumsum(sizes)
    for token, begin, end in zip(tokens[1:-1], ends, ends[1:], strict=False):
        content = vocabulary.token_bytes(int(token))
        assert content.strip() == text[begin:end].strip() or not content.strip()
