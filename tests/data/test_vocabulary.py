"""Vocabularies: the ids of seqio and the papers, texts that come back as they were, models made from a corpus."""

import os
import pickle
import random
from collections import Counter
from itertools import chain
from pathlib import Path

import fsspec
import numpy as np
import pytest

from block_recurrent.data import vocabulary as vocabularies
from block_recurrent.data.train_vocabulary import (
    count_words,
    even_sample,
    stretches_of_lines,
    train_sentencepiece,
    word_vocabulary,
)
from block_recurrent.data.vocabulary import ByteVocabulary, WordVocabulary, saved_vocabulary, vocabulary
from block_recurrent.errors import UserError

DATA = Path(os.environ.get("BR_DATA") or Path(__file__).parents[2].parent / "shared/data")
LATEX = "\\begin{equation}\n\t\\frac{1}{2} \\sum_{i=1}^{n} x_i^2 % naïve\n\\end{equation}\n"
CODE = "def f(x):\n\treturn {\n        'a':  x[0],   # two, three blanks\n    }\n\n\nclass A:  \n    pass"
AWKWARD = {
    "code": CODE,
    "latex": LATEX,
    "tabs": "\t\ta\tb\t \t",
    "runs of blanks": "   three   and four    .",
    "line ends": "a\r\nb\r\n\n\n\nc\rd\n",
    "nul": "a\0b\0\0",
    "emoji": "👩‍👩‍👧 and 🇫🇮",
    "combining": "e\u0301 \u0308 é \u1100\u1161 ﬁ ｆｕｌｌ　ｗｉｄｔｈ",
    "specials": "</s><pad><unk> <0x0A>",
    "blank": " ",
    "empty": "",
}


LONG_TEXTS = ["".join(AWKWARD.values()).encode() * 5, "a \u0301 of a\u3000 text\u3000 b  a".encode() * 40, b"x" * 3000]


def miniature(name: str) -> Path:
    if not (DATA / name).exists():
        pytest.skip(f"{name} is not in {DATA}: set BR_DATA to where the miniature corpora are")
    return DATA / name


def corpus() -> list[bytes]:
    """Sentences of made-up words, then code and LaTeX: enough for a few hundred pieces."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 8))) for _ in range(300)]
    lines = (" ".join(rng.choices(words, k=12)) + "." for _ in range(200))
    return ["\n".join(lines).encode(), (CODE + LATEX).encode() * 20]


@pytest.fixture(scope="session", params=["bpe", "unigram"])
def model(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sentencepiece") / f"{request.param}.model"
    train_sentencepiece(corpus(), 450, path, kind=request.param)
    return path


@pytest.fixture(scope="session")
def default_model(tmp_path_factory) -> Path:
    """As sentencepiece trains where nothing is asked of it: white space is not kept, a blank goes first."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "corpus.txt").write_bytes(b"\n".join(corpus()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "default"), vocab_size=200, minloglevel=2
    )
    return folder / "default.model"


@pytest.mark.parametrize("text", [b"", "naïve\n\t\x00 façade 漢字".encode()])
def test_bytes_agree_with_seqio(text):
    ours, theirs = ByteVocabulary(), ByteVocabulary().as_seqio()
    assert (ours.size, ours.separator) == (theirs.vocab_size, theirs.eos_id)
    assert ours.encode(text).tolist() == list(theirs.encode(text.decode()))
    assert ours.encode(text).dtype == np.int32
    assert ours.decode(ours.encode(text)) == text.decode()


def test_bytes_need_not_be_utf8():
    text = bytes(range(256))
    tokens = ByteVocabulary().encode(text)
    assert b"".join(ByteVocabulary().token_bytes(int(token)) for token in tokens) == text
    assert ByteVocabulary().decode([0, 1, 2, 3 + 97, 259]) == "a"


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD)
def test_every_text_comes_back_from_a_trained_model(model, text):
    words = vocabulary(model)
    tokens = words.encode(text.encode())
    assert words.decode(tokens) == text
    assert b"".join(words.token_bytes(int(token)) for token in tokens) == text.encode()


def test_the_one_character_that_does_not_come_back(model):
    words = vocabulary(model)
    assert words.decode(words.encode("a▁b".encode())) == "a b"


def test_a_trained_model_has_the_ids_of_seqio(model):
    words = vocabulary(model)
    assert (words.size, words.separator) == (450, 1)
    assert (words.processor.pad_id(), words.processor.unk_id(), words.processor.bos_id()) == (0, 2, -1)
    theirs = words.as_seqio()
    for text in AWKWARD.values():
        assert words.encode(text.encode()).tolist() == theirs.encode(text) == theirs.encode_tf(text).numpy().tolist()


@pytest.mark.parametrize(
    "name",
    [
        "pg19train_bpe_4000.model",
        "pg19train_bpe_32000.model",
        "sentencepiece_cc_all.32000.100extra-sentencepiece.model",
    ],
)
def test_published_models_have_the_ids_of_seqio(name):
    words = vocabulary(miniature(f"sentencepiece/{name}"))
    book = next(miniature("mini_pg19/test").glob("*.txt")).read_text()[:200_000]
    assert words.separator == (1 if "cc_all" in name else None)
    for text in (*AWKWARD.values(), book):
        assert words.encode(text.encode()).tolist() == words.as_seqio().encode(text)


def test_a_blank_that_the_model_adds_is_no_part_of_the_text(default_model):
    words, text = vocabulary(default_model), "the cat, ate."
    tokens = words.encode(text.encode())
    assert words.decode(tokens) == text
    assert b"".join(words.token_bytes(int(token)) for token in tokens) == b" " + text.encode()


def test_long_texts_have_the_same_ids_in_stretches(model, monkeypatch):
    monkeypatch.setattr(vocabularies, "LONG", 50)
    words = vocabulary(model)
    assert words.cuttable == (model.stem == "bpe")
    for text in LONG_TEXTS:
        assert words.encode(text).tolist() == words.processor.encode(text)
    assert (len(list(words.stretches(corpus()[0]))) > 100) == words.cuttable


@pytest.mark.parametrize("name", ["pg19train_bpe_4000.model", "pg19train_bpe_32000.model"])
def test_published_models_have_the_same_ids_in_stretches(name, monkeypatch):
    monkeypatch.setattr(vocabularies, "LONG", 50)
    words = vocabulary(miniature(f"sentencepiece/{name}"))
    book = next(miniature("mini_pg19/test").glob("*.txt")).read_bytes()[:300_000]
    for text in (book, *LONG_TEXTS):
        assert words.encode(text).tolist() == words.processor.encode(text)
    assert words.cuttable and len(list(words.stretches(book))) > 1000


def test_a_model_in_a_bucket(model):
    place = f"memory://vocabularies/{model.parent.name}/{model.name}"
    with fsspec.open(place, "wb") as file:
        file.write(model.read_bytes())
    assert vocabulary(place).identity == vocabulary(model).identity
    assert vocabulary(place).as_seqio().encode("a b") == vocabulary(model).encode(b"a b").tolist()


def test_files_that_are_no_vocabulary_are_refused(tmp_path):
    (tmp_path / "x.model").write_text("not a model")
    with pytest.raises(UserError, match="cannot be read as a SentencePiece model"):
        vocabulary(tmp_path / "x.model")
    with pytest.raises(UserError, match=r"none.model cannot be read: No such file"):
        vocabulary(tmp_path / "none.model")
    for text, message in (
        ("a\n<eos>\na\n", r"x.txt has 'a' twice"),
        ("<eos>\na 12\n", r"x.txt: line 2 is not one word: 'a 12'"),
        ("<eos>\n\nb\n", r"x.txt: line 2 is not one word: ''"),
        ("a\nb\n", r"x.txt has neither <eos> nor <S>"),
    ):
        (tmp_path / "x.txt").write_text(text)
        with pytest.raises(UserError, match=message):
            vocabulary(tmp_path / "x.txt")


def test_vocabularies_are_saved_and_opened(model, tmp_path):
    for words in (ByteVocabulary(), vocabulary(model), WordVocabulary([b"<eos>", "été".encode(), b"<unk>"])):
        words.save(tmp_path)
        for again in (
            saved_vocabulary({"kind": words.kind, "sha256": words.identity}, tmp_path),
            pickle.loads(pickle.dumps(words)),
        ):
            assert (again.identity, again.size, again.separator) == (words.identity, words.size, words.separator)
            assert again.encode(b"a b\n").tolist() == words.encode(b"a b\n").tolist()
    with pytest.raises(UserError, match="unknown kind, 'syllables'"):
        saved_vocabulary({"kind": "syllables"}, tmp_path)


def test_words_are_ordered_by_frequency_then_by_name():
    words = word_vocabulary(count_words([b" b a b \n c a b \n", b"\n"]))
    assert words.words == [b"<eos>", b"b", b"a", b"c"]
    assert words.separator == 0
    tokens = words.encode(b"c b \n\n a")
    assert tokens.tolist() == [3, 1, 0, 0, 2] and tokens.dtype == np.int32
    assert words.decode(tokens) == "c b\n\na"
    assert b"".join(words.token_bytes(int(token)) for token in tokens) == b" c b\n\n a"


def test_both_ends_of_a_sentence_can_be_marked():
    words = word_vocabulary(count_words([b"a b\nb\n"], "sentences"))
    assert words.words == [b"<S>", b"b", b"a"] and words.line_ends == "sentences"
    assert words.encode(b"a b\nb\n").tolist() == [0, 2, 1, 0, 1, 0]
    assert words.encode(b"a b").tolist() == [0, 2, 1], "a prompt is gone on from"
    assert words.encode(b"").tolist() == []
    for text in ("a b\nb\n", "a\n\nb\n", "\n"):
        assert words.decode(words.encode(text.encode())) == text


def test_unknown_words():
    counts = Counter({b"<eos>": 9, b"a": 5, b"b": 2, b"c": 4, b"d": 2})
    words = word_vocabulary(counts, minimum=3, unknown="<UNK>")
    assert words.words == [b"<eos>", b"a", b"<UNK>", b"c"], "which occurs as often as what it stands for"
    assert words.encode(b"a d \xff\n").tolist() == [1, 2, 2, 0]
    with pytest.raises(UserError, match="need a word to stand for them"):
        word_vocabulary(counts, minimum=3)
    with pytest.raises(UserError, match=r"'naïve' is not in the vocabulary, which has no <unk>"):
        word_vocabulary(counts).encode("a naïve b".encode())


@pytest.mark.parametrize("style", ["eos", "sentences", "spelt"])
def test_words_in_blocks_are_those_of_the_whole(style, monkeypatch):
    text = b"".join(corpus())
    whole = list(chain.from_iterable(vocabularies.word_blocks(text, style)))
    monkeypatch.setattr(vocabularies, "BLOCK", 7)
    assert list(chain.from_iterable(vocabularies.word_blocks(text, style))) == whole
    assert count_words([text], style) == Counter(whole)


def test_words_have_the_same_ids_in_seqio():
    words = WordVocabulary([b"<eos>", b"a", b"<unk>", b"b"])
    theirs, text = words.as_seqio(), "a b\nc a\n"
    assert theirs.vocab_size == 4 and theirs.unk_id == 2
    assert theirs.encode(text) == words.encode(text.encode()).tolist()
    assert theirs.decode(theirs.encode(text)) == "a b\n<unk> a\n"
    import tensorflow as tf

    for tokens in tf.data.Dataset.from_tensors(text).map(theirs.encode_tf):
        assert tokens.numpy().tolist() == theirs.encode(text)
        assert theirs.decode_tf(tokens).numpy() == b"a b\n<unk> a\n"


@pytest.mark.parametrize(("level", "size", "tokens"), [("", 10_000, 929_589), ("char.", 50, 4_975_414 + 42_068)])
def test_penn_treebank_has_its_published_size(level, size, tokens):
    texts = {split: miniature(f"ptb/ptb.{level}{split}.txt").read_bytes() for split in ("train", "valid", "test")}
    words = word_vocabulary(count_words([texts["train"]]))
    assert words.size == size
    assert len(words.encode(texts["train"])) == tokens
    words.ids.unknown = None
    assert max(words.encode(texts[split]).max() for split in ("valid", "test")) < size, "nothing new in them"


def test_training_is_reproducible_atomic_and_quiet(model, tmp_path, capfd):
    train_sentencepiece(corpus(), 450, tmp_path / "new" / "again.model", kind=model.stem)
    assert (tmp_path / "new" / "again.model").read_bytes() == model.read_bytes()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["again.model"]
    assert capfd.readouterr() == ("", "")


def test_training_refuses_what_cannot_be_done(tmp_path, capfd):
    output = tmp_path / "x.model"
    with pytest.raises(UserError, match=r"cannot fill a vocabulary of 100,000 pieces: the largest it can is \d+$"):
        train_sentencepiece(corpus(), 100_000, output)
    with pytest.raises(UserError, match=r"of 100 pieces cannot hold this text's characters: it takes \d+$"):
        train_sentencepiece(corpus(), 100, output)
    for texts in ([], [b"", b"\n\n", b"\0"]):
        with pytest.raises(UserError, match="no text to train"):
            train_sentencepiece(texts, 300, output)
    assert not list(tmp_path.iterdir())
    output.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        train_sentencepiece(corpus(), 300, output)
    assert output.read_text() == "mine" and capfd.readouterr() == ("", "")
    train_sentencepiece(corpus(), 320, output, overwrite=True)
    assert vocabulary(output).size == 320


def test_a_sample_is_even_and_bounded():
    texts = [b"".join(b"%d %d\n" % (i, j) for j in range(100)) for i in range(50)]
    assert b"".join(even_sample(texts, 1 << 20)) == b"".join(texts)
    sample = even_sample(iter(texts), 4000)
    assert 2000 <= sum(map(len, sample)) <= 4000
    seen = Counter(int(part.split()[0]) // 10 for part in sample)
    assert len(seen) == 5 and max(seen.values()) <= 2 * min(seen.values())
    assert all(part.endswith(b"\n") for part in sample)
    assert b"".join(stretches_of_lines([b"x" * 1000], 10)) == b"x" * 1000
