"""Preparing: sources, vocabularies, and a store that is either whole or not there."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from block_recurrent.data import sources
from block_recurrent.data.store import open_store, split_in_memory
from block_recurrent.data.vocabulary import ByteVocabulary, vocabulary
from block_recurrent.errors import UserError
from block_recurrent.prepare import prepare

TEXTS = {f"{i}.txt": f"Document {i}: naïve façade\n\tand more {'words ' * i}" for i in range(8)}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "texts" / name).write_text(text)
    return tmp_path / "texts"


def store_of(folder, **changes):
    options = {"task": "text_files", "files": str(folder), "vocabulary_name": "bytes", "overwrite": False}
    return prepare(output=folder.parent / "store", **{**options, **changes})


def documents_in(store):
    """Every document of a store, decoded."""
    for name in store.manifest["splits"]:
        split = store.split(name)
        for i in range(len(split.offsets) - 1):
            yield store.vocabulary.decode(split.tokens[split.offsets[i] : split.offsets[i + 1]])


def test_every_file_is_one_document_of_one_split(folder):
    store, made = store_of(folder)
    assert made
    assert sorted(documents_in(store)) == sorted(TEXTS.values())
    splits = store.manifest["splits"]
    assert {name: entry["documents"] for name, entry in splits.items()} == {
        "train": 6,
        "validation": 1,
        "test": 1,
    }
    assert sum(entry["words"] for entry in splits.values()) == sum(len(text.split()) for text in TEXTS.values())
    # The first byte of a document is never predicted, so it does not count.
    assert sum(entry["bytes"] for entry in splits.values()) == sum(len(text.encode()) - 1 for text in TEXTS.values())


def test_preparing_again_finds_the_store_and_a_changed_file_is_noticed(folder):
    store_of(folder)
    assert store_of(folder)[1] is False
    (folder / "3.txt").write_text("other text")
    with pytest.raises(UserError, match="made from other files"):
        store_of(folder)
    store, made = store_of(folder, overwrite=True)
    assert made and "other text" in set(documents_in(store))


def test_overwrite_never_removes_what_is_not_a_store(folder):
    (folder.parent / "store").mkdir()
    (folder.parent / "store" / "precious").write_text("mine")
    with pytest.raises(UserError, match="no prepared store"):
        store_of(folder, overwrite=True)
    assert (folder.parent / "store" / "precious").exists()


def test_own_splits_are_kept(tmp_path):
    for split in sources.SPLITS:
        (tmp_path / "texts" / split).mkdir(parents=True)
        (tmp_path / "texts" / split / "a.txt").write_text(f"text of {split}")
    store, _ = store_of(tmp_path / "texts")
    assert list(documents_in(store)) == [f"text of {split}" for split in sources.SPLITS]


@pytest.mark.parametrize("pattern", ["*.txt", "[0-3].txt"])
def test_globs(folder, pattern):
    documents = [d for part in sources.text_files(str(folder / pattern)).splits.values() for d in part]
    assert len(documents) == len(list(folder.glob(pattern)))


def test_missing_files_and_empty_corpora_are_refused(tmp_path):
    with pytest.raises(UserError, match="no files in"):
        sources.text_files(str(tmp_path / "nothing" / "*.txt"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "empty.txt").touch()
    with pytest.raises(UserError, match="corpus is empty"):
        store_of(tmp_path / "texts")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_a_split_without_anything_to_predict_is_empty(tmp_path):
    for split, text in (("train", "enough"), ("validation", "x"), ("test", "")):
        (tmp_path / "texts" / split).mkdir(parents=True)
        (tmp_path / "texts" / split / "a.txt").write_text(text)
    store, _ = store_of(tmp_path / "texts")
    assert store.has("train") and not store.has("validation") and not store.has("test")
    with pytest.raises(UserError, match=r"split 'test' of .* is empty"):
        store.split("test")


def test_text_that_is_not_utf8_is_named_with_its_place(folder):
    (folder / "bad.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"bad.txt is not UTF-8: byte 0xe9 at offset 3"):
        store_of(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["texts"], "nothing half-written is left"


def test_a_killed_prepare_leaves_no_store(folder, tmp_path):
    """Killed for real while the tokens are being written."""
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from block_recurrent.data.store import write_store\n"
        "from block_recurrent.data.vocabulary import ByteVocabulary\n"
        "def documents():\n"
        "    yield b'abc', ByteVocabulary().encode('abc')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_store(Path(sys.argv[1]), {'train': documents()}, ByteVocabulary(), {'task': 'x', 'fingerprint': 'x'})\n"
    )
    output = tmp_path / "store"
    died = subprocess.run([sys.executable, "-c", program, str(output)], env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert died.returncode == -signal.SIGKILL
    assert not output.exists() and list(tmp_path.glob(".store.*.partial"))
    store_of(folder)
    assert not list(tmp_path.glob(".store.*.partial"))


def test_bytes_agree_with_seqio():
    ours, theirs = ByteVocabulary(), ByteVocabulary().as_seqio()
    text = "naïve\n\t\x00 façade 漢字"
    assert ours.size == theirs.vocab_size
    assert ours.encode(text).tolist() == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == text


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory):
    """A small model trained on the spot, with the ids that seqio expects and bytes for what it does not know."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "corpus.txt").write_text("\n".join(TEXTS.values()) + "\nThe quick brown fox jumps over the lazy dog.\n")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tiny"),
        vocab_size=310,
        hard_vocab_limit=False,
        byte_fallback=True,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return folder / "tiny.model"


def test_sentencepiece(folder, sentencepiece_model):
    ours = vocabulary(str(sentencepiece_model))
    text = "The quick brown fox, 漢字."
    tokens = ours.encode(text)
    assert tokens.tolist() == ours.as_seqio().encode(text)
    streamed = b"".join(ours.token_bytes(int(token)) for token in tokens).decode()
    assert streamed == " " + text and ours.decode(tokens) == text
    split = split_in_memory([text.encode()], ours)
    assert split.bytes[0] == len(text.encode()) - len(ours.token_bytes(int(tokens[0])).strip())
    store, _ = store_of(folder, vocabulary_name=str(sentencepiece_model))
    assert store.vocabulary.identity == ours.identity
    assert open_store(store.folder).manifest["vocabulary"]["size"] == ours.size


def test_a_file_that_is_no_sentencepiece_model_is_refused(tmp_path):
    (tmp_path / "x.model").write_text("not a model")
    with pytest.raises(UserError, match="cannot be read as a SentencePiece model"):
        vocabulary(str(tmp_path / "x.model"))


def test_a_damaged_store_is_refused(folder):
    store, _ = store_of(folder)
    with open(store.folder / "train.tokens", "ab") as file:
        file.write(b"xx")
    with pytest.raises(UserError, match="does not match its manifest"):
        open_store(store.folder).split("train")
    (store.folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        open_store(store.folder)


def test_in_memory_split_equals_the_store(folder):
    store, _ = store_of(folder)
    split = store.split("train")
    texts = [
        store.vocabulary.decode(split.tokens[a:b]).encode()
        for a, b in zip(split.offsets, split.offsets[1:], strict=False)
    ]
    again = split_in_memory(texts, store.vocabulary)
    for name in ("tokens", "offsets", "bytes", "words"):
        np.testing.assert_array_equal(getattr(again, name), getattr(split, name))


def test_python_stdlib_is_split_by_top_level_name():
    source = sources.python_stdlib()
    names = {split: {document.name for document in documents} for split, documents in source.splits.items()}
    assert (
        not names["train"] & names["validation"]
        and not names["train"] & names["test"]
        and not names["validation"] & names["test"]
    )
    json_package = next(d for part in source.splits.values() for d in part if d.name == "json")
    assert [file.name for file in json_package.files][:2] == ["__init__.py", "decoder.py"]
    assert json_package.text().startswith(Path(json.__file__).read_bytes())
