"""Running text: what is read of each corpus, exactly, and what is refused."""

import bz2
import gzip
import os
import pickle
import tracemalloc
import zipfile
from pathlib import Path

import fsspec
import numpy as np
import pytest

from block_recurrent.data.documents import SPLITS, Dropped
from block_recurrent.data.encoding import Encoder
from block_recurrent.data.running_text import BillionWord, Enwik8, PennTreebank, WikiText2, WikiText103, range_of
from block_recurrent.data.train_vocabulary import count_words, word_vocabulary
from block_recurrent.errors import UserError

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("BR_DATA") or ROOT.parent / "shared/data")

WIKI = " \n = Title = \n \n <unk> naïve words , \n"


def documents_of(source, dropped=None):
    dropped = Dropped() if dropped is None else dropped
    return [document for unit in source.units() for document in source.read(unit, dropped)]


def texts_of(source):
    return {document.name: document.text for document in documents_of(source)}


def wiki(folder, ending="tokens"):
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        (folder / f"wiki.{split}.{ending}").write_text(WIKI + f" {split} \n")
    return folder


def tokens_of(text):
    """Words, and the end of each line."""
    return len(text.split()) + text.count(b"\n")


# WikiText


def test_lines_lose_the_blanks_around_them_and_blank_lines_stay(tmp_path):
    texts = texts_of(WikiText2(str(wiki(tmp_path))))
    assert list(texts) == ["wikitext2/train", "wikitext2/validation", "wikitext2/test"]
    assert texts["wikitext2/train"].decode() == "\n= Title =\n\n<unk> naïve words ,\ntrain\n"


def test_wikitext_counts_an_end_for_every_line_blank_ones_too(tmp_path):
    assert tokens_of(texts_of(WikiText2(str(wiki(tmp_path))))["wikitext2/train"]) == 8 + 5


def test_a_last_line_without_a_newline_gets_one(tmp_path):
    (wiki(tmp_path) / "wiki.test.tokens").write_bytes(b"a b\nc")
    assert texts_of(WikiText2(str(tmp_path)))["wikitext2/test"] == b"a b\nc\n"


@pytest.mark.parametrize(("source", "folder"), [(WikiText2, "wikitext-2"), (WikiText103, "wikitext-103")])
def test_the_folder_of_the_archive_is_found(tmp_path, source, folder):
    wiki(tmp_path / folder)
    assert texts_of(source(str(tmp_path))) == texts_of(source(str(tmp_path / folder)))


def test_raw_text_is_read_and_compared_with_no_published_count(tmp_path):
    source = WikiText2(str(wiki(tmp_path, "raw")))
    assert len(documents_of(source)) == 3
    assert source.published == {}
    assert WikiText2(str(wiki(tmp_path))).published["tokens"]["train"] == 2_088_628


def test_all_missing_files_are_named_in_one_error(tmp_path):
    (wiki(tmp_path) / "wiki.train.tokens").unlink()
    (tmp_path / "wiki.test.tokens").unlink()
    with pytest.raises(UserError, match=r"has no wiki\.train\.tokens, no wiki\.test\.tokens: give"):
        WikiText2(str(tmp_path)).units()


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"fine\na\0b\n", "line 2, has NUL bytes"), (b"caf\xe9\n", "line 1, has the byte 0xe9"), (b"", "is empty")],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, content, told):
    (wiki(tmp_path) / "wiki.test.tokens").write_bytes(content)
    with pytest.raises(UserError, match=rf"wiki\.test\.tokens.* {told}.*: fetch the file again"):
        documents_of(WikiText2(str(tmp_path)))


def test_a_bucket_is_read_as_a_folder_is(tmp_path):
    system = fsspec.filesystem("memory")
    for place in wiki(tmp_path).iterdir():
        system.pipe(f"/test-running/{place.name}", place.read_bytes())
    try:
        assert texts_of(WikiText103("memory://test-running")) == texts_of(WikiText103(str(tmp_path)))
    finally:
        system.rm("/test-running", recursive=True)


# Penn Treebank


def test_words_and_characters_are_two_corpora_of_one_folder(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"ptb.{split}.txt").write_bytes(b" an <unk> N \n")
        (tmp_path / f"ptb.char.{split}.txt").write_bytes(b"a n _ < u n k > _ N \n ")
    assert texts_of(PennTreebank(str(tmp_path)))["penn_treebank/test"] == b"an <unk> N\n"
    characters = texts_of(PennTreebank(str(tmp_path), characters=True))
    assert characters["penn_treebank_characters/test"] == b"a n _ < u n k > _ N\n"


def test_characters_can_be_those_of_the_words_with_the_ends_of_lines_spelt_out(tmp_path):
    """As TCN's and the R-Transformer's code reads them: the file's text, `<eos>` in the place of each newline."""
    text = " an <unk> N \n so it goes \n"
    for split in ("train", "valid", "test"):
        (tmp_path / f"ptb.{split}.txt").write_text(text)
    source = PennTreebank(str(tmp_path), spelt=True)
    read = texts_of(source)["penn_treebank_spelt/train"]
    words = word_vocabulary(count_words([read], "spelt"))
    symbols = [words.words[token].decode().replace("_", " ") for token in words.encode(read)]
    assert "".join(symbols) == text.replace("\n", "<eos>")
    assert words.line_ends == "spelt" and words.separator is None
    assert words.encode(b"a _\ng").tolist() == words.encode(b"a _ < e o s > g").tolist()
    in_pieces, sizes = Encoder(words).feed(read, last=True)
    assert in_pieces.tolist() == words.encode(read).tolist() and sizes.sum() == len(read)


@pytest.mark.parametrize(("how", "line_end"), [({}, 1), ({"characters": True}, 1), ({"spelt": True}, len("<eos>"))])
def test_penn_treebank_has_its_published_counts(how, line_end):
    if not (DATA / "ptb").is_dir():
        pytest.skip("no Penn Treebank: set BR_DATA to the folder that has it")
    source = PennTreebank(str(DATA / "ptb"), **how)
    documents = {document.split: document.text for document in documents_of(source)}
    counts = {split: len(text.split()) + line_end * text.count(b"\n") for split, text in documents.items()}
    assert counts == source.published["tokens"]
    marks = 1 if line_end == 1 else 0
    assert len(set(documents["train"].split())) + marks == source.published["vocabulary"]["train"]


# Billion Word


def benchmark(folder):
    for name in ("training", "heldout"):
        (folder / f"{name}-monolingual.tokenized.shuffled").mkdir(parents=True)
    for number in range(1, 100):
        place = folder / f"training-monolingual.tokenized.shuffled/news.en-{number:05d}-of-00100"
        place.write_text(f"Sentence {number} . \n")
    for number in range(3):
        place = folder / f"heldout-monolingual.tokenized.shuffled/news.en.heldout-{number:05d}-of-00050"
        place.write_text(f"Held out {number} .\n")
    return folder


def test_the_first_held_out_file_is_the_test_set_and_the_second_validation(tmp_path):
    documents = documents_of(BillionWord(str(benchmark(tmp_path))))
    held = {split: [document.text for document in documents if document.split == split] for split in SPLITS}
    assert len(held["train"]) == 99
    assert held["train"][0] == b"Sentence 1 . \n"
    assert held["validation"] == [b"Held out 1 .\n"]
    assert held["test"] == [b"Held out 0 .\n"]


def test_the_folder_of_the_benchmarks_archive_is_found(tmp_path):
    benchmark(tmp_path / "1-billion-word-language-modeling-benchmark-r13output")
    assert len(BillionWord(str(tmp_path)).units()) == 101


def test_a_missing_training_file_is_named(tmp_path):
    (benchmark(tmp_path) / "training-monolingual.tokenized.shuffled/news.en-00042-of-00100").unlink()
    with pytest.raises(UserError, match=r"no training-monolingual\S*/news\.en-00042-of-00100: give") as told:
        BillionWord(str(tmp_path)).units()
    assert "00041" not in str(told.value)


# enwik8

BYTES = np.random.default_rng(0).integers(0, 256, 1_000_003, dtype=np.uint8).tobytes()


def compressed(folder, ending):
    place = folder / f"enwik8{ending}"
    if ending == ".zip":
        with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("readme.txt", b"not this")
            archive.writestr("enwik8", BYTES)
    else:
        place.write_bytes({"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}[ending](BYTES))
    return place


@pytest.mark.parametrize("ending", ["", ".zip", ".gz", ".bz2"])
@pytest.mark.parametrize("given", ["file", "folder"])
def test_bytes_are_split_in_order_however_they_are_packed(tmp_path, ending, given):
    place = compressed(tmp_path, ending)
    texts = texts_of(Enwik8(str(place if given == "file" else tmp_path)))
    assert list(texts) == ["enwik8/train", "enwik8/validation", "enwik8/test"]
    assert [len(text) for text in texts.values()] == [900_002, 50_000, 50_001]
    assert b"".join(texts.values()) == BYTES


@pytest.mark.parametrize(
    ("size", "sizes"), [(10**8, [90_000_000, 5_000_000, 5_000_000]), (6_089_746, [5_480_771, 304_487, 304_488])]
)
def test_enwik8_and_its_like_are_split_90_5_5(size, sizes):
    ranges = [range_of(split, size) for split in SPLITS]
    assert [end - begin for begin, end in ranges] == sizes
    assert [end for _, end in ranges[:-1]] == [begin for begin, _ in ranges[1:]]
    assert ranges[-1][1] == size


@pytest.mark.parametrize("ending", ["", ".zip", ".gz", ".bz2"])
def test_reading_a_split_does_not_hold_the_others(tmp_path, ending):
    source = Enwik8(str(compressed(tmp_path, ending)))
    unit = source.units()[-1]
    list(source.read(unit, Dropped()))  # what is allocated only once
    tracemalloc.start()
    (document,) = source.read(unit, Dropped())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(document.text) < peak < len(BYTES) / 2


@pytest.mark.parametrize("ending", [".zip", ".gz", ".bz2"])
def test_a_file_cut_short_is_refused(tmp_path, ending):
    place = compressed(tmp_path, ending)
    place.write_bytes(place.read_bytes()[:-100_000])
    with pytest.raises(UserError, match=r"enwik8.* cannot be decompressed .*: fetch the file again"):
        documents_of(Enwik8(str(place)))


def test_an_archive_of_other_files_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w") as archive:
        archive.writestr("a", b"a")
        archive.writestr("b", b"b")
    with pytest.raises(UserError, match="holds 2 files"):
        documents_of(Enwik8(str(tmp_path)))


def test_an_empty_file_gives_no_documents(tmp_path):
    (tmp_path / "enwik8").write_bytes(b"")
    dropped = Dropped()
    assert documents_of(Enwik8(str(tmp_path)), dropped) == []
    assert dropped.counts == {"empty": 3}


def test_the_sample_of_wikipedia_is_split_as_its_readme_says():
    places = sorted((DATA / "enwik_sample").glob("*.bz2"))
    if not places:
        pytest.skip("no enwik_sample: set BR_DATA to the folder that has it")
    texts = texts_of(Enwik8(str(places[0])))
    assert [len(text) for text in texts.values()] == [5_480_771, 304_487, 304_488]
    assert texts["enwik8/train"].startswith(b"<mediawiki")


# All


SOURCES = [WikiText2, WikiText103, PennTreebank, BillionWord, Enwik8]


@pytest.mark.parametrize("source", SOURCES)
def test_nothing_to_read_is_an_error_of_one_line(source, tmp_path):
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError) as told:
            source(str(place)).units()
        assert str(told.value).startswith(str(place))
        assert "\n" not in str(told.value)


@pytest.mark.parametrize("source", SOURCES)
def test_sources_go_to_other_processes_and_are_running_text(source):
    source = source("x")
    assert pickle.loads(pickle.dumps(source)) == source
    assert source.contiguous
    assert set(next(iter(source.published.values()))) <= set(SPLITS)
