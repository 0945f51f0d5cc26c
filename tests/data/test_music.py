"""Music: what is read of a piano roll's file, exactly, and what is refused."""

import os
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from block_recurrent.data.documents import SPLITS, Dropped
from block_recurrent.data.music import SONGS, Music
from block_recurrent.data.registry import TASKS
from block_recurrent.data.rows import RowStream
from block_recurrent.data.signals import NoteVocabulary, PixelVocabulary, key_name
from block_recurrent.data.store import open_store, split_in_memory
from block_recurrent.errors import MISTAKE, UserError, run_command
from block_recurrent.prepare import main, prepare

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("BR_DATA") or ROOT.parent / "shared/data")
SHORT = {"train": "train", "validation": "valid", "test": "test"}


def rolls(seed=0) -> dict[str, list[np.ndarray]]:
    """A few songs [frames 88] for each split."""
    rng = np.random.default_rng(seed)
    return {
        split: [rng.integers(0, 2, (int(rng.integers(2, 30)), 88), np.uint8) for _ in range(count)]
        for split, count in zip(SPLITS, (5, 2, 3), strict=True)
    }


def cells(songs) -> np.ndarray:
    row = np.empty((1, len(songs)), object)
    row[0, :] = songs
    return row


def matlab(place, songs, **changes) -> Path:
    arrays = {f"{SHORT[split]}data": cells(some) for split, some in songs.items()}
    scipy.io.savemat(place, {**arrays, **changes}, do_compression=True)
    return place


def packed(place, songs, **changes) -> Path:
    arrays = {}
    for split, some in songs.items():
        arrays[f"{SHORT[split]}_packed"] = np.packbits(np.concatenate(some), axis=1)
        arrays[f"{SHORT[split]}_lengths"] = np.array(list(map(len, some)), np.int32)
    np.savez(place, **{**arrays, **changes})
    return place


def documents_of(source):
    return [document for unit in source.units() for document in source.read(unit, Dropped())]


@pytest.mark.parametrize("write", [matlab, packed])
def test_songs_come_out_of_the_store_as_they_went_in(tmp_path, write):
    songs = rolls()
    write(tmp_path / f"Nottingham.{'mat' if write is matlab else 'npz'}", songs)
    store, _ = prepare("nottingham", tmp_path / "store", input=str(tmp_path))
    for split, expected in songs.items():
        assert list(store.names(split)) == [f"{split}/{i}" for i in range(len(expected))]
        part = store.split(split)
        for i, roll in enumerate(expected):
            frames = part.tokens[part.offsets[i] : part.offsets[i + 1]]
            np.testing.assert_array_equal(np.unpackbits(frames, axis=1), roll)
    batch = next(iter(RowStream(store.split("train"), 2, 8, 4)))
    assert batch["inputs"].shape == batch["targets"].shape == (2, 8, 11) and batch["inputs"].dtype == np.uint8


def test_the_file_itself_can_be_given_and_a_folder_may_have_both(tmp_path):
    there = matlab(tmp_path / "Piano_midi.mat", rolls())
    packed(tmp_path / "Piano_midi.npz", rolls(1))
    by_file, by_folder = (documents_of(Music(str(place), "Piano_midi")) for place in (there, tmp_path))
    assert by_file == by_folder and by_file != documents_of(Music(str(tmp_path / "Piano_midi.npz"), "Piano_midi"))


def test_matrices_of_any_type_of_number_will_do(tmp_path):
    songs = rolls()
    expected = documents_of(Music(str(matlab(tmp_path / "a.mat", songs)), "Nottingham"))
    for dtype in (np.float64, np.int16):
        typed = {split: [roll.astype(dtype) for roll in some] for split, some in songs.items()}
        assert documents_of(Music(str(matlab(tmp_path / "b.mat", typed)), "Nottingham")) == expected


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (cells([np.zeros((3, 87))] * 2), r"song 0 of traindata has the shape \(3, 87\), not \(frames, 88\)"),
        (cells([np.full((3, 88), 2)] * 2), "numbers other than 0 and 1"),
        (cells([np.full((3, 88), np.nan)] * 2), "numbers other than 0 and 1"),
        (cells(["text", np.zeros((3, 88))]), "is no matrix of numbers"),
        (np.zeros((3, 88)), "is no row of matrices"),
        (cells([np.zeros((3, 88))] * 2).T, "is no row of matrices"),
        ({"a": 1}, "is no row of matrices"),
    ],
)
def test_other_matrices_are_refused(tmp_path, train, told):
    matlab(tmp_path / "Nottingham.mat", rolls(), traindata=train)
    with pytest.raises(UserError, match=told):
        documents_of(Music(str(tmp_path), "Nottingham"))


@pytest.mark.parametrize(
    "change",
    [
        {"train_packed": np.zeros((4, 10), np.uint8)},
        {"train_packed": np.zeros((4, 11), np.int32)},
        {"train_packed": np.array([print] * 4, object)},
        {"train_lengths": np.array([1, 2], np.int32)},
        {"train_lengths": np.array([-1, 10**6])},
        {"train_lengths": np.array([1.0])},
        {"train_lengths": np.array(5)},
    ],
)
def test_other_arrays_are_refused(tmp_path, change):
    packed(tmp_path / "Nottingham.npz", rolls(), **change)
    with pytest.raises(UserError, match=r"train_packed|train_lengths|NumPy file"):
        documents_of(Music(str(tmp_path), "Nottingham"))


@pytest.mark.parametrize("ending", ["mat", "npz"])
@pytest.mark.parametrize("keep", [0, 100, 0.5])
def test_what_was_cut_short_is_refused(tmp_path, ending, keep):
    place = {"mat": matlab, "npz": packed}[ending](tmp_path / f"Nottingham.{ending}", rolls())
    place.write_bytes(place.read_bytes()[: keep if keep != 0.5 else place.stat().st_size // 2])
    with pytest.raises(UserError, match=rf"Nottingham.{ending} .*"):
        documents_of(Music(str(tmp_path), "Nottingham"))


def test_a_missing_split_or_file_is_told(tmp_path):
    scipy.io.savemat(tmp_path / "Nottingham.mat", {"traindata": cells(rolls()["train"])})
    with pytest.raises(UserError, match="has no validdata"):
        documents_of(Music(str(tmp_path), "Nottingham"))
    with pytest.raises(UserError, match=r"has no MuseData\.mat, no MuseData\.npz"):
        Music(str(tmp_path), "MuseData").units()
    np.savez(tmp_path / "MuseData.npz", train_packed=np.zeros((1, 11), np.uint8))
    with pytest.raises(UserError, match="has no train_packed or no train_lengths"):
        documents_of(Music(str(tmp_path), "MuseData"))


def test_the_bytes_are_the_same_for_any_number_of_workers(tmp_path):
    matlab(tmp_path / "Nottingham.mat", rolls())
    contents = []
    for workers in (1, 2):
        prepare("nottingham", tmp_path / f"by{workers}", input=str(tmp_path), workers=workers)
        contents.append({file.name: file.read_bytes() for file in (tmp_path / f"by{workers}").iterdir()})
    assert contents[0] == contents[1]


def test_a_song_is_counted_in_frames_and_shown_with_its_notes(tmp_path, capsys):
    songs = rolls()
    songs["train"][1] = np.zeros((5, 88), np.uint8)
    songs["train"][1][[0, 0, 0, 3], [39, 43, 46, 87]] = 1
    matlab(tmp_path / "JSB_Chorales.mat", songs)
    main(["--task=jsb_chorales", f"--input={tmp_path}", f"--output={tmp_path}/store", "--workers=1"])
    told = " ".join(capsys.readouterr().out.split())
    assert "frames" in told and "bytes per token" not in told and "words" not in told
    assert "not as published: train has 5 documents, published are 229" in told
    main(["--show", f"{tmp_path}/store", "--document=1", "--segment=4", "--block=4"])
    assert [line.rstrip("=- ") for line in capsys.readouterr().out.splitlines()] == [
        "document 1 of train: train/1",
        "5 frames: 2 segments of 4, 2 blocks of 4",
        "== segment 0",
        "-- block 0: frames 0 to 3",
        "     0  C4 E4 G4",
        "     1",
        "     2",
        "     3  C8",
        "== segment 1",
        "-- block 1: frames 4 to 4, then 3 of padding",
        "     4",
    ]


def test_keys_have_their_names():
    assert [key_name(key) for key in (0, 1, 2, 3, 39, 48, 87)] == ["A0", "A#0", "B0", "C1", "C4", "A4", "C8"]


@pytest.mark.parametrize("vocabulary", [NoteVocabulary(), PixelVocabulary()])
def test_signals_are_not_text(vocabulary):
    for wants_text in (
        lambda: vocabulary.decode([1]),
        lambda: vocabulary.token_bytes(1),
        vocabulary.as_seqio,
        lambda: split_in_memory([b"text"], vocabulary),
    ):
        with pytest.raises(UserError, match="are not text"):
            wants_text()


def test_bytes_that_are_no_frames_are_refused():
    with pytest.raises(UserError, match="12 bytes are no frames of 11"):
        NoteVocabulary().encode(bytes(12))
    assert NoteVocabulary().encode(bytes(22)).shape == (2, 11) and PixelVocabulary().encode(b"\0\xff").tolist() == [
        0,
        255,
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--task=nottingham"], "--task=nottingham needs --input: the .mat file"),
        (["--task=nottingham", "--input={0}", "--vocabulary=bytes"], "--vocabulary does not go with"),
        (["--task=nottingham", "--input={0}", "--separator"], "--separator does not go with"),
        (["--task=nottingham", "--input={0}", "--seed=1"], "--seed does not go with"),
        (["--task=nottingham", "--input={0}", "--train_vocabulary=x.model"], "--train_vocabulary does not go with"),
        (["--task=text_files", "--input={0}", "--vocabulary=notes"], "notes"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, told, tmp_path, capsys):
    matlab(tmp_path / "Nottingham.mat", rolls())
    with pytest.raises(SystemExit) as code:
        output = [] if "--train_vocabulary=x.model" in arguments else [f"--output={tmp_path}/store"]
        run_command(main, [*(argument.format(tmp_path) for argument in arguments), *output])
    error = capsys.readouterr().err
    assert code.value.code == MISTAKE and told in error and error.count("\n") == 1
    assert not (tmp_path / "store").exists()


def test_stores_and_corpora_that_are_no_text_are_no_seqio_tasks(tmp_path):
    from block_recurrent.data import tasks

    matlab(tmp_path / "Nottingham.mat", rolls())
    prepare("nottingham", tmp_path / "data" / "nottingham", input=str(tmp_path))
    with pytest.raises(UserError, match="seqio's Tasks are made of text"):
        tasks.register_store("x", open_store(tmp_path / "data" / "nottingham"))
    with pytest.raises(UserError, match="seqio's Tasks are made of text"):
        tasks.register("x", Music(str(tmp_path), "Nottingham"), NoteVocabulary())
    assert tasks.register_prepared(str(tmp_path / "data")) == []


@pytest.mark.skipif(not (DATA / "music").is_dir(), reason="no music in BR_DATA")
@pytest.mark.parametrize("ending", ["mat", "npz"])
@pytest.mark.parametrize("collection", ["JSB_Chorales", "Piano_midi"])
def test_the_collections_have_the_songs_that_were_published(collection, ending):
    documents = documents_of(Music(str(DATA / "music" / f"{collection}.{ending}"), collection))
    counts = [sum(document.split == split for document in documents) for split in SPLITS]
    assert tuple(counts) == SONGS[collection]
    if ending == "npz":
        assert documents == documents_of(Music(str(DATA / "music"), collection))


def test_every_collection_is_a_task():
    named = {dict(task.fixed).get("collection") for task in TASKS.values() if task.vocabulary == "notes"}
    assert named == set(SONGS)
