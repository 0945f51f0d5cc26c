"""MNIST: images and labels as they are in the idx files, and what is refused."""

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from block_recurrent.data import images
from block_recurrent.data.documents import Dropped
from block_recurrent.data.images import Mnist
from block_recurrent.data.rows import RowStream
from block_recurrent.errors import MISTAKE, UserError, run_command
from block_recurrent.prepare import main, prepare

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("BR_DATA") or ROOT.parent / "shared/data")

PIXELS = np.random.default_rng(0).integers(0, 256, (36 + 7, 28, 28), np.uint8)
DIGITS = np.random.default_rng(1).integers(0, 10, 36 + 7, np.uint8)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 2048 + array.ndim, *array.shape) + array.tobytes()


def write_images(folder: Path) -> Path:
    """36 training images and 7 of test."""
    folder.mkdir()
    for part, some in (("train", slice(36)), ("t10k", slice(36, None))):
        for name, array in ((f"{part}-images-idx3-ubyte", PIXELS), (f"{part}-labels-idx1-ubyte", DIGITS)):
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array[some])))
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_images(tmp_path / "mnist")


def documents_of(source):
    return [document for unit in source.units() for document in source.read(unit, Dropped())]


def test_every_image_is_a_document_with_its_label(folder, monkeypatch):
    monkeypatch.setattr(images, "UNIT_IMAGES", 10)
    documents = documents_of(Mnist(str(folder)))
    assert [document.text for document in documents] == [image.tobytes() for image in PIXELS]
    assert [document.label for document in documents] == DIGITS.tolist()
    assert [document.split for document in documents] == ["train"] * 33 + ["validation"] * 3 + ["test"] * 7
    assert documents[33].name == "train/33" and documents[36].name == "test/0"


def test_files_may_be_uncompressed_or_have_a_dot_in_their_names(folder):
    expected = documents_of(Mnist(str(folder)))
    for file in list(folder.iterdir()):
        name = file.name.removesuffix(".gz").replace("-idx3", ".idx3" if "train" in file.name else "-idx3")
        (folder / name).write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    assert documents_of(Mnist(str(folder))) == expected


def test_a_permutation_is_the_same_for_all_images_and_a_seed_decides_it(folder):
    orders = {}
    for seed in (0, 1):
        source = Mnist(str(folder), permuted=True, seed=seed)
        orders[seed] = np.random.default_rng(seed).permutation(784)
        for document, image in zip(documents_of(source), PIXELS.reshape(-1, 784), strict=True):
            assert document.text == image[orders[seed]].tobytes()
    assert (orders[0] != orders[1]).any()


def test_a_store_of_images_gives_rows_with_one_label_each(folder, tmp_path):
    store, _ = prepare("mnist", tmp_path / "store", input=str(folder))
    assert store.manifest["labels"] == list("0123456789") and store.manifest["dtype"] == "<u2"
    split = store.split("train")
    assert split.labels.tolist() == DIGITS[:33].tolist()
    for batch in RowStream(split, 5, 784, 784, epochs=1, shuffle=False):
        for image, targets, weights in zip(batch["inputs"], batch["targets"], batch["weights"], strict=True):
            if weights[-1]:
                (number,) = np.flatnonzero((PIXELS.reshape(-1, 784) == image).all(axis=1))
                assert targets[-1] == DIGITS[number] and weights.sum() == 1


def test_another_seed_is_another_store(folder, tmp_path):
    prepare("mnist_permuted", tmp_path / "store", input=str(folder))
    assert prepare("mnist_permuted", tmp_path / "store", input=str(folder), seed=0)[1] is False
    with pytest.raises(UserError, match="made from other files"):
        prepare("mnist_permuted", tmp_path / "store", input=str(folder), seed=1)


def test_an_image_is_shown_with_its_label_and_labels_are_counted(folder, tmp_path, capsys):
    image = np.zeros((28, 28), np.uint8)
    image[3, 4:7] = 0, 255, 130
    changed = np.concatenate([image[None], PIXELS[1:36]])
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(changed)))
    main(["--task=mnist", f"--input={folder}", f"--output={tmp_path}/store", "--workers=1"])
    told = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    table = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in told}
    assert table["documents"] == ["33", "3", "7"] and table["pixels"] == ["25,872", "2,352", "5,488"]
    assert [int(table[str(digit)][0]) for digit in range(10)] == np.bincount(DIGITS[:33], minlength=10).tolist()
    assert "words" not in table
    main(["--show", f"{tmp_path}/store"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"document 0 of train: train/0, {DIGITS[0]}",
        "784 pixels: 1 segments of 4,096, 2 blocks of 512",
    ]
    assert len(lines) == 2 + 28 and lines[2 + 3] == "     @+"


def cut(content: bytes) -> bytes:
    return content[:-1]


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("train-images-idx3", lambda content: b"", "cut short|decompressed"),
        ("train-images-idx3", lambda content: content[:10], "is cut short"),
        ("train-images-idx3", cut, "is cut short"),
        ("t10k-labels-idx1", cut, "is cut short"),
        ("t10k-labels-idx1", lambda content: content + b"\0", "goes on after the 7 entries"),
        ("train-images-idx3", lambda content: b"\0\0\x08\1" + content[4:], "begins with 2049 instead of 2051"),
        ("train-labels-idx1", lambda content: b"PK" + content[2:], "begins with .* instead of 2049"),
        ("train-images-idx3", lambda content: content[:8] + struct.pack(">2I", 27, 28) + content[16:], "36 x 27 x 28"),
        ("train-images-idx3", lambda content: content[:4] + b"\xff" * 4 + content[8:], "4294967295 x 28 x 28"),
        ("train-labels-idx1", lambda content: idx(DIGITS[:35]), "has 36 images, .* has 35 labels"),
        ("train-labels-idx1", lambda content: content[:8] + b"\x0a" * 36, "has the label 10"),
    ],
)
def test_other_files_are_refused(folder, name, change, told):
    place = folder / f"{name}-ubyte.gz"
    place.write_bytes(gzip.compress(change(gzip.decompress(place.read_bytes()))))
    with pytest.raises(UserError, match=told):
        documents_of(Mnist(str(folder)))


@pytest.mark.parametrize(
    "change", [lambda content: content[:-9], lambda content: b"text", lambda content: content[:500]]
)
def test_damaged_compression_is_refused(folder, change):
    place = folder / "t10k-images-idx3-ubyte.gz"
    place.write_bytes(change(place.read_bytes()))
    with pytest.raises(UserError, match=r"t10k-images-idx3-ubyte\.gz cannot be decompressed"):
        documents_of(Mnist(str(folder)))


def test_all_missing_files_are_named(folder):
    for name in ("train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz"):
        (folder / name).unlink()
    with pytest.raises(UserError, match=r"has no train-labels-idx1-ubyte\.gz, no t10k-images-idx3-ubyte\.gz: give"):
        Mnist(str(folder)).units()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--task=mnist", "--seed=1"], "--seed does not go with --task=mnist"),
        (["--task=mnist_permuted", "--seed=-1"], "--seed: '-1' is not a whole number, 0 or more"),
        (["--task=mnist", "--vocabulary=bytes"], "pixels are not text"),
        (["--task=mnist", "--separator"], "pixels are not text"),
        (["--task=mnist", "--train_vocabulary=x.model"], "pixels are not text"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, told, folder, tmp_path, capsys):
    output = [] if any("--train_vocabulary" in flag for flag in arguments) else [f"--output={tmp_path}/store"]
    with pytest.raises(SystemExit) as code:
        run_command(main, [*arguments, f"--input={folder}", *output])
    error = capsys.readouterr().err
    assert code.value.code == MISTAKE and told in error and error.count("\n") == 1


@pytest.mark.skipif(not (DATA / "mnist").is_dir(), reason="no mnist in BR_DATA")
def test_mnist_has_the_counts_that_were_published():
    source = Mnist(str(DATA / "mnist"))
    units = source.units()
    spans = {split: [unit.places[2] for unit in units if unit.split == split] for split in ("validation", "test")}
    assert len(units) == 14 and spans == {"validation": ["55000:60000"], "test": ["0:5000", "5000:10000"]}
    labels = [document.label for document in source.read(units[-1], Dropped())]
    assert len(labels) == 5_000 and set(labels) == set(range(10))
