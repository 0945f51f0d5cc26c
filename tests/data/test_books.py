"""Books: PG19 in both of its forms, and raw files of Project Gutenberg."""

import os
import pickle
from pathlib import Path

import fsspec
import numpy as np
import pytest

from block_recurrent.data import sources
from block_recurrent.data.books import Gutenberg, Pg19, Pg19Tfds, pg19, titles_and_years
from block_recurrent.data.documents import SPLITS, Dropped
from block_recurrent.errors import UserError

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("BR_DATA") or ROOT.parent / "shared/data")

METADATA = b"""12,Plain,1900,http://www.gutenberg.org/ebooks/12
13,"Quoted, with a comma",1901,http://www.gutenberg.org/ebooks/13
14,Bare, with commas, two of them,1902,http://www.gutenberg.org/ebooks/14
15,"Never closed,1903,http://www.gutenberg.org/ebooks/15
16,No date

17
18,Latin \xe9t\xe9,1904,http://www.gutenberg.org/ebooks/18
"""


def documents_of(source, dropped=None):
    dropped = Dropped() if dropped is None else dropped
    return [document for unit in source.units() for document in source.read(unit, dropped)]


@pytest.fixture
def folder(tmp_path):
    """One book in each split."""
    for split, identity in zip(SPLITS, (12, 13, 14), strict=True):
        (tmp_path / split).mkdir()
        (tmp_path / split / f"{identity}.txt").write_bytes(f"Book {identity}:\r\nnaïve\r\n".encode())
    return tmp_path


@pytest.fixture
def bucket_of():
    """Copies a folder into a bucket in memory, which goes with the test."""
    system = fsspec.filesystem("memory")

    def copied(folder):
        for place in folder.rglob("*"):
            if place.is_file():
                system.pipe(f"/test-books/{place.relative_to(folder)}", place.read_bytes())
        return "memory://test-books"

    yield copied
    system.rm("/test-books", recursive=True)


# PG19


def test_a_book_is_named_by_id_title_and_year(folder):
    (folder / "metadata.csv").write_bytes(METADATA)
    assert [(document.name, document.split) for document in documents_of(Pg19(str(folder)))] == [
        ("12 Plain (1900)", "train"),
        ("13 Quoted, with a comma (1901)", "validation"),
        ("14 Bare, with commas, two of them (1902)", "test"),
    ]


def test_a_book_without_metadata_is_named_by_its_id(folder):
    assert [document.name for document in documents_of(Pg19(str(folder)))] == ["12", "13", "14"]


def test_broken_lines_of_the_metadata_harm_no_other():
    known = titles_and_years(METADATA)
    assert known["15"] == ("Never closed", "1903")
    assert known["16"] == ("No date", "")
    assert "17" not in known
    assert known["18"][1] == "1904"


def test_line_ends_become_newlines(folder):
    assert documents_of(Pg19(str(folder)))[0].text.decode() == "Book 12:\nnaïve\n"


@pytest.mark.parametrize(
    ("content", "reason"), [(b"a\0b", "NUL bytes"), (b"caf\xe9", "not UTF-8"), (b"", "empty"), (b" \n", "empty")]
)
def test_a_file_that_is_no_text_is_dropped_and_told(folder, content, reason):
    (folder / "train" / "99.txt").write_bytes(content)
    dropped = Dropped()
    assert len(documents_of(Pg19(str(folder)), dropped)) == 3
    assert dropped.examples == {reason: ["train/99.txt"]}


def test_other_files_are_not_books(folder):
    (folder / "train" / "notes.md").write_text("no book")
    (folder / "train" / "deeper").mkdir()
    (folder / "train" / "deeper" / "1.txt").write_text("no book")
    assert len(documents_of(Pg19(str(folder)))) == 3


def test_missing_splits_are_named_in_one_error(folder):
    (folder / "validation" / "13.txt").unlink()
    (folder / "test" / "14.txt").unlink()
    with pytest.raises(UserError, match=r"has no validation/\*.txt, no test/\*.txt: give") as told:
        Pg19(str(folder)).units()
    assert "train/" not in str(told.value)


def test_units_are_groups_of_one_split_in_order(folder, monkeypatch):
    monkeypatch.setattr(sources, "UNIT_FILES", 2)
    for identity in (5, 6, 7):
        (folder / "train" / f"{identity}.txt").write_text("x")
    units = Pg19(str(folder)).units()
    assert [(unit.split, [Path(place).stem for place in unit.places]) for unit in units] == [
        ("train", ["12", "5"]),
        ("train", ["6", "7"]),
        ("validation", ["13"]),
        ("test", ["14"]),
    ]


def test_a_unit_holds_no_more_bytes_than_its_limit(folder, monkeypatch):
    monkeypatch.setattr(sources, "UNIT_BYTES", 40)
    for identity in (5, 6):
        (folder / "train" / f"{identity}.txt").write_text("x" * 39)
    assert [len(unit.places) for unit in Pg19(str(folder)).units()] == [1] * 5


@pytest.mark.parametrize("changed", ["train/12.txt", "metadata.csv"])
def test_a_rewritten_file_changes_the_stamp(folder, changed):
    before = Pg19(str(folder)).units()[0]
    (folder / changed).write_text("something else")
    after = Pg19(str(folder)).units()[0]
    assert before.places == after.places
    assert before.stamp != after.stamp


def test_a_bucket_is_read_as_a_folder_is(folder, bucket_of):
    (folder / "metadata.csv").write_bytes(METADATA)
    source = pg19(bucket_of(folder))
    assert isinstance(source, Pg19)
    assert documents_of(source) == documents_of(Pg19(str(folder)))


# PG19 of TensorFlow Datasets


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A dataset with PG19's features: five books for training in two shards, the fourth of them broken."""
    import tensorflow_datasets as tfds

    folder = tmp_path_factory.mktemp("tfds")
    (folder / "pg19" / "0.1.1").mkdir(parents=True)
    place = tfds.core.dataset_info.DatasetIdentity(
        name="pg19", version=tfds.core.Version("0.1.1"), data_dir=str(folder / "pg19" / "0.1.1"), module_name=__name__
    )
    texts = dict.fromkeys(("book_text", "book_title", "publication_date", "book_link"), tfds.features.Text())
    features = tfds.features.FeaturesDict({"book_id": np.int32, **texts})
    writer = tfds.core.SequentialWriter(tfds.core.DatasetInfo(builder=place, features=features), 3)
    writer.initialize_splits(list(SPLITS))
    writer.add_examples(
        {split: map(prepared_book, ids) for split, ids in zip(SPLITS, (range(5), [6], [7]), strict=True)}
    )
    writer.close_all()
    return folder


def prepared_book(identity):
    text = {0: b"Book 0:\r\nnaive", 3: b"Book \xff"}.get(identity, b"Book")
    date = "1900" if identity else "half a title"
    about = {"book_title": f"Title {identity}", "publication_date": date, "book_link": ""}
    return {"book_id": identity, "book_text": text, **about}


@pytest.mark.parametrize("below", ["", "pg19", "pg19/0.1.1"])
def test_a_prepared_dataset_is_found_at_its_folder_and_above(prepared, below):
    assert pg19(str(prepared / below)) == Pg19Tfds(str(prepared / below))


def test_every_shard_of_a_prepared_dataset_is_a_unit_and_every_book_is_read_once(prepared):
    dropped, source = Dropped(), pg19(str(prepared))
    units = source.units()
    assert len([unit for unit in units if unit.split == "train"]) == 2
    documents = sorted(documents_of(source, dropped), key=lambda document: document.name)
    assert [(document.name, document.split) for document in documents] == [
        ("0 Title 0", "train"),
        ("1 Title 1 (1900)", "train"),
        ("2 Title 2 (1900)", "train"),
        ("4 Title 4 (1900)", "train"),
        ("6 Title 6 (1900)", "validation"),
        ("7 Title 7 (1900)", "test"),
    ]
    assert documents[0].text == b"Book 0:\nnaive"
    assert dropped.examples == {"not UTF-8": ["3 Title 3 (1900)"]}


def test_a_folder_without_a_prepared_dataset_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no dataset_info"):
        Pg19Tfds(str(tmp_path)).units()


# Project Gutenberg

BOOK = "    THE TITLE\n\nChapter 1\n\nIt was a dark café.\n"
NEW = (
    "The Project Gutenberg EBook of X\n\nTitle: The Title\n\n*** START OF THIS PROJECT GUTENBERG EBOOK THE\n"
    f"TITLE ***\n\n\nProduced by A. Volunteer and\nothers\n\nE-text prepared by B.\n\n\n\n{BOOK}\n\n\n"
    "End of the Project Gutenberg EBook of X\n\n*** END OF THIS PROJECT GUTENBERG EBOOK THE TITLE ***\n\nLicence\n"
)
OLD = (
    "*The Project Gutenberg Etext of X*\n\nTitle: The Title\n\n***START**THE SMALL PRINT!**START***\n\nlaw\n"
    "\n*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n\nThis etext was prepared by C.\n\n\n"
    f"{BOOK * 50}\n\nEnd of The Project Gutenberg Etext of X\n"
)


def raw(tmp_path, **files):
    for name, content in files.items():
        place = tmp_path / name.replace("_", "/")
        place.parent.mkdir(exist_ok=True)
        place.with_suffix(".txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    return Gutenberg(str(tmp_path))


def test_boilerplate_of_today_is_stripped(tmp_path):
    (document,) = documents_of(raw(tmp_path, **{"77": NEW}))
    assert (document.name, document.text.decode(), document.split) == ("77 The Title", BOOK, None)


def test_boilerplate_of_the_first_years_is_stripped(tmp_path):
    (document,) = documents_of(raw(tmp_path, **{"77": OLD}))
    assert document.text.decode() == BOOK * 50


def test_small_print_after_the_book_is_stripped(tmp_path):
    text = f"{BOOK}\n***START**THE SMALL PRINT!***\nlaw\n*END*THE SMALL PRINT! *END*\n"
    (document,) = documents_of(raw(tmp_path, **{"77": text}))
    assert document.text.decode() == BOOK


def test_a_collection_does_not_end_with_its_first_volume(tmp_path):
    volumes = f"{BOOK * 50}\nEnd of the Project Gutenberg EBook of X, volume 1\n\n{BOOK * 50}"
    (document,) = documents_of(raw(tmp_path, **{"77": NEW.replace(BOOK, volumes)}))
    assert document.text.decode() == volumes


def test_notes_of_the_transcriber_at_the_end_are_stripped(tmp_path):
    text = NEW.replace(BOOK, f"{BOOK * 50}\n\n[Transcriber's Notes:]\n\nA typo was mended.\n")
    (document,) = documents_of(raw(tmp_path, **{"77": text}))
    assert document.text.decode() == BOOK * 50


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_encodings_and_line_ends_become_utf8_and_newlines(tmp_path, encoding):
    (document,) = documents_of(raw(tmp_path, **{"77": NEW.replace("\n", "\r\n").encode(encoding)}))
    assert document.text.decode() == BOOK


def test_of_one_books_files_the_richest_encoding_is_read(tmp_path):
    latin, utf8 = NEW.replace("café", "caf\xe9, Latin").encode("latin-1"), NEW
    source = raw(tmp_path, **{"77": "ASCII", "77-8": latin, "77-0": utf8, "old_77-0": "superseded", "78": OLD})
    assert [document.name for document in documents_of(source)] == ["77 The Title", "78 The Title"]
    assert documents_of(source)[0].text.decode() == BOOK


def test_what_is_no_book_is_dropped_and_told(tmp_path):
    empty = "*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\n*** END OF THE PROJECT GUTENBERG EBOOK X ***\n"
    dropped = Dropped()
    source = raw(tmp_path, clean=BOOK, zeros=b"\0" + NEW.encode(), nothing="", a_bare=empty)
    assert documents_of(source, dropped) == []
    assert dropped.examples == {
        "nothing between the marks": ["a/bare.txt"],
        "no mark of Project Gutenberg": ["clean.txt"],
        "empty": ["nothing.txt"],
        "NUL bytes": ["zeros.txt"],
    }


def test_a_bucket_of_raw_files_names_its_books_as_a_folder_does(tmp_path, bucket_of):
    local = documents_of(raw(tmp_path, **{"77": NEW, "a_alice": OLD}))
    assert documents_of(Gutenberg(bucket_of(tmp_path))) == local


@pytest.mark.parametrize("source", [Pg19, Gutenberg, Pg19Tfds])
def test_nothing_to_read_is_an_error_of_one_line(source, tmp_path):
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError) as told:
            source(str(place)).units()
        assert str(place) in str(told.value)
        assert "\n" not in str(told.value)


@pytest.mark.parametrize("source", [Pg19("x"), Gutenberg("x"), Pg19Tfds("x")], ids=lambda source: source.name)
def test_sources_go_to_other_processes(source):
    assert pickle.loads(pickle.dumps(source)) == source
    assert set(source.published) <= {"words", "documents"}


# The miniature of PG19


@pytest.fixture
def mini():
    if not (DATA / "mini_pg19").is_dir():
        pytest.skip("no mini_pg19: set BR_DATA to the folder that has it")
    return DATA / "mini_pg19"


def test_the_miniature_has_its_documents_and_words(mini):
    documents, dropped = {split: [] for split in SPLITS}, Dropped()
    for document in documents_of(Pg19(str(mini)), dropped):
        documents[document.split].append(document)
    assert not dropped.counts
    assert {split: len(held) for split, held in documents.items()} == {"train": 69, "validation": 7, "test": 8}
    words = {split: sum(len(document.text.split()) for document in held) for split, held in documents.items()}
    assert words == {"train": 8_266_958, "validation": 1_169_932, "test": 1_058_200}
    assert "2701 Moby Dick; Or, The Whale (1851)" in {document.name for held in documents.values() for document in held}


def test_stripped_originals_equal_the_clean_books(mini):
    dropped = Dropped()
    documents = documents_of(Gutenberg(str(mini / "raw_with_boilerplate")), dropped)
    assert len(documents) == 6
    assert not dropped.counts
    clean = {place.stem: place for split in SPLITS for place in (mini / split).glob("*.txt")}
    for document in documents:
        assert document.text == clean[document.name.split()[0]].read_bytes(), document.name
