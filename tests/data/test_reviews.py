"""IMDB: what is read of a review, from a folder or an archive, and what is refused."""

import io
import os
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from block_recurrent.data import reviews, sources
from block_recurrent.data.documents import Dropped
from block_recurrent.data.reviews import imdb, split_of, words_of
from block_recurrent.data.rows import RowStream
from block_recurrent.errors import MISTAKE, UserError, run_command
from block_recurrent.prepare import main, prepare

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("BR_DATA") or ROOT.parent / "shared/data")

REVIEWS = {
    f"{part}/{group}/{i}_{rating}": f"A {group} film.<br /><br />It isn't {'very ' * (i % 7)}{group}!"
    for part in ("train", "test")
    for group, rating in (("neg", 3), ("pos", 9))
    for i in range(30)
}


@pytest.fixture
def folder(tmp_path) -> Path:
    root = tmp_path / "aclImdb"
    for name, text in {**REVIEWS, "train/unsup/0_0": "unlabelled", "train/pos/notes": "no review"}.items():
        (root / f"{name}.txt").parent.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.txt").write_text(text)
    (root / "imdb.vocab").write_text("the\n")
    return root


def archived(folder: Path, name: str = "aclImdb_v1.tar.gz") -> Path:
    place = folder.parent / name
    with tarfile.open(place, "w:gz" if name.endswith("gz") else "w") as archive:
        archive.add(folder, "aclImdb")
    return place


def documents_of(source, dropped=None):
    dropped = Dropped() if dropped is None else dropped
    return [document for unit in source.units() for document in source.read(unit, dropped)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Great film!", "great film !\n"),
        ("It isn't.<br /><br />No<BR>way", "it isn't . no way\n"),
        ("'quoted' rock'n'roll 1 1/2", "' quoted ' rock'n'roll 1 1 / 2\n"),
        ("naïve\N{NO-BREAK SPACE}É…\r\n\x85 a_b", "naïve é … a_b\n"),
        ("<unk> <eos>", "< unk > < eos >\n"),
        (" \t<br />", "\n"),
    ],
)
def test_words_of_a_review(text, words):
    assert words_of(text).decode() == words


def test_a_folder_and_its_archives_hold_the_same_reviews(folder, monkeypatch):
    monkeypatch.setattr(sources, "UNIT_FILES", 7)
    documents = {document.name: document for document in documents_of(imdb(str(folder)))}
    assert set(documents) == set(REVIEWS)
    for name, document in documents.items():
        part, group, _ = name.split("/")
        assert document.text == words_of(REVIEWS[name])
        assert document.label == ("neg", "pos").index(group)
        assert document.split == (split_of(name) if part == "train" else "test")
    for place in (folder.parent, archived(folder, "aclImdb_v1.tar.gz"), archived(folder, "other.tar")):
        assert {document.name: document for document in documents_of(imdb(str(place)))} == documents


def test_a_folder_that_holds_the_archive_will_do(folder, tmp_path):
    (tmp_path / "held").mkdir()
    place = archived(folder).rename(tmp_path / "held" / "aclImdb_v1.tar.gz")
    assert imdb(str(tmp_path / "held")) == imdb(str(place))


def test_one_in_twenty_is_held_out_by_its_name():
    held_out = [split_of(f"train/pos/{i}_9") == "validation" for i in range(10_000)]
    assert 400 < sum(held_out) < 600 and 40 < sum(held_out[:1_000]) < 65


def test_a_store_of_reviews(folder, tmp_path, capsys):
    main(["--task=imdb_words", f"--input={folder}", f"--output={tmp_path}/store", "--workers=1"])
    told = capsys.readouterr().out
    assert "negative" in told and "positive" in told and "test has 60 documents, published are 25,000" in told
    store, made = prepare("imdb_words", tmp_path / "store", input=str(folder))
    assert not made and store.manifest["labels"] == ["negative", "positive"]
    split, words = store.split("train"), store.vocabulary
    for i, name in enumerate(store.names("train")):
        assert split_of(name) == "train"
        assert words.decode(split.tokens[split.offsets[i] : split.offsets[i + 1]]).encode() == words_of(REVIEWS[name])
        assert split.labels[i] == ("pos" in name)
    batches = list(RowStream(split, 3, 16, 8, epochs=1))
    told_at = np.concatenate([batch["inputs"][batch["weights"] > 0] for batch in batches])
    assert len(told_at) == len(split.lengths) and set(told_at) == {words.separator}, "labels are told at ends"
    main(["--show", f"{tmp_path}/store", "--split=test"])
    assert capsys.readouterr().out.startswith("document 0 of test: test/neg/0_3, negative\n")


def test_words_are_counted_from_training_reviews_alone(folder, tmp_path):
    held_out = next(name for name in REVIEWS if name.startswith("train") and split_of(name) == "validation")
    for name in (held_out, "test/pos/0_9"):
        (folder / f"{name}.txt").write_text("secret " * 10)
    trained = next(name for name in REVIEWS if name.startswith("train") and split_of(name) == "train")
    (folder / f"{trained}.txt").write_text("known " * 5 + "rare " * 4)
    store, _ = prepare("imdb_words", tmp_path / "store", input=str(folder))
    assert {b"known", b"<unk>", b"<eos>"} <= set(store.vocabulary.words)
    assert not {b"secret", b"rare"} & set(store.vocabulary.words)


def test_the_bytes_are_the_same_for_any_number_of_workers(folder, tmp_path):
    contents, place = [], str(archived(folder))
    for workers in (1, 2):
        prepare("imdb_words", tmp_path / f"by{workers}", input=place, workers=workers)
        contents.append({file.name: file.read_bytes() for file in (tmp_path / f"by{workers}").iterdir()})
    assert contents[0] == contents[1]


def test_what_is_no_review_is_dropped_with_its_reason(folder, monkeypatch):
    monkeypatch.setattr(reviews, "LONGEST", 1_000)
    bad = {"100_9": b"caf\xe9", "101_9": b"a\0b", "102_9": b" <br />\n", "103_9": b"long " * 300}
    for name, content in bad.items():
        (folder / "train" / "pos" / f"{name}.txt").write_bytes(content)
    (folder / "train" / "pos" / "104_9.txt").symlink_to("/etc/passwd")
    for source in (imdb(str(folder)), imdb(str(archived(folder)))):
        dropped = Dropped()
        units = source.units()
        listed = [name for unit in units for _, name in unit.dropped]
        assert {document.name for unit in units for document in source.read(unit, dropped)} == set(REVIEWS)
        assert {"not UTF-8": 1, "NUL bytes": 1, "empty": 1, "longer than a review": 1}.items() <= dropped.counts.items()
        assert dropped.counts.total() + len(listed) == 5


def test_an_archive_is_read_in_flat_memory(tmp_path):
    peaks = []
    for times in (1, 10):
        place = tmp_path / f"{times}.tar.gz"
        with tarfile.open(place, "w:gz", compresslevel=1) as archive:
            for name in (f"{name}{i}" for name in REVIEWS for i in range(times)):
                header = tarfile.TarInfo(f"aclImdb/{name}.txt")
                header.size = 2_000
                archive.addfile(header, io.BytesIO(b"word " * 400))
        source = imdb(str(place))
        tracemalloc.start()
        for unit in source.units():
            for _ in source.read(unit, Dropped()):
                pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 200_000, peaks


@pytest.mark.parametrize("keep", [0, 20, 0.5, -9])
def test_a_damaged_archive_is_refused(folder, keep):
    place = archived(folder)
    content = place.read_bytes()
    place.write_bytes(content[: len(content) // 2 if keep == 0.5 else keep])
    with pytest.raises(UserError, match=r"is no archive, or is damaged or cut short|has no train/neg"):
        documents_of(imdb(str(place)))


def test_an_archive_or_folder_of_something_else_is_refused(folder, tmp_path):
    for file in (folder / "test" / "neg").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="test/neg has no reviews"):
        documents_of(imdb(str(folder)))
    with pytest.raises(UserError, match="has no test/neg/ID_RATING"):
        documents_of(imdb(str(archived(folder))))
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(UserError, match="is no archive and no folder with train/pos"):
            imdb(str(place))


def test_an_archive_that_expands_without_end_is_refused(folder, monkeypatch):
    monkeypatch.setattr(reviews.repositories, "LARGEST_REPOSITORY", 10_000)
    with pytest.raises(UserError, match="expands to more"):
        documents_of(imdb(str(archived(folder))))


def test_a_separator_after_the_label_is_refused(folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as code:
        run_command(main, ["--task=imdb_words", f"--input={folder}", f"--output={tmp_path}/store", "--separator"])
    error = capsys.readouterr().err
    assert code.value.code == MISTAKE and "a label is told at" in error and error.count("\n") == 1


@pytest.mark.skipif(not (DATA / "imdb").is_dir(), reason="no imdb in BR_DATA")
def test_the_archive_of_imdb_begins_with_reviews():
    source = imdb(str(DATA / "imdb"))
    test = next(unit for unit in source.units() if unit.split == "test")
    some = [document for document, _ in zip(source.read(test, Dropped()), range(100), strict=False)]
    assert len(some) == 100 and all(len(document.text) > 20 and document.split == "test" for document in some)
