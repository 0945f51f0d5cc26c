"""MNIST from its four idx files: a document is an image, pixel after pixel, and its label the digit.

The usual practice has no validation split; here the last twelfth of the training images, 5,000 of 60,000, is held out.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from block_recurrent.data.documents import Document, Dropped, Unit
from block_recurrent.data.files import is_file, join, stamp_of
from block_recurrent.data.running_text import taken, uncompressed
from block_recurrent.errors import UserError

SIDE = 28
UNIT_IMAGES = 5_000
HELD_OUT = 12  # one of so many training images
MOST_IMAGES = 1_000_000  # no set of digits has more: a header that says so is damaged
IMAGES, LABELS = 2051, 2049  # the first number of an idx file: bytes, in three dimensions or one


@dataclass(frozen=True)
class Mnist:
    """Images row by row or, `permuted`, all in one order that a seed decides."""

    input: str
    permuted: bool = False
    seed: int = 0

    name: ClassVar[str] = "mnist"
    contiguous: ClassVar[bool] = False
    labels: ClassVar[tuple[str, ...]] = tuple("0123456789")
    published: ClassVar[dict[str, dict[str, int]]] = {
        "documents": {"train": 55_000, "validation": 5_000, "test": 10_000}
    }

    def __post_init__(self):
        if self.seed < 0:
            raise UserError(f"--seed={self.seed}: give 0 or more")

    def units(self) -> list[Unit]:
        """A few thousand images each; places are the two files, and which images of them."""
        names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
        found = {name: place_of(self.input, name) for name in names}
        missing = [f"{name}-ubyte.gz" for name, place in found.items() if place is None]
        if missing:
            raise UserError(f"{self.input} has no {', no '.join(missing)}: give the folder with MNIST's four files")
        train, test = list(found.values())[:2], list(found.values())[2:]
        count = count_of(*train)
        kept = count - count // HELD_OUT
        return [
            *units_of(train, 0, kept, "train"),
            *units_of(train, kept, count, "validation"),
            *units_of(test, 0, count_of(*test), "test"),
        ]

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        images_place, labels_place, span = unit.places
        first, end = map(int, span.split(":"))
        images = entries(images_place, IMAGES, first, end).reshape(-1, SIDE * SIDE)
        labels = entries(labels_place, LABELS, first, end)
        if np.any(labels >= len(self.labels)):
            raise UserError(f"{labels_place} has the label {labels.max()}: those of MNIST are 0 to 9")
        order = np.random.default_rng(self.seed).permutation(SIDE * SIDE) if self.permuted else slice(None)
        part = "test" if unit.split == "test" else "train"  # as the files are called, also of what is held out
        for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True), first):
            yield Document(f"{part}/{number}", image[order].tobytes(), unit.split, label=label)


def place_of(folder: str, name: str) -> str | None:
    """Where a file is, compressed or not; some have a dot where the original has a dash."""
    spellings = (name, ".".join(name.rsplit("-", 1)))
    places = [join(folder, f"{spelling}-ubyte{end}") for spelling in spellings for end in (".gz", "")]
    return next(filter(is_file, places), None)


def units_of(places: list[str], first: int, end: int, split: str) -> Iterator[Unit]:
    stamp = "\n".join(map(stamp_of, places))
    for begin in range(first, end, UNIT_IMAGES):
        yield Unit((*places, f"{begin}:{min(begin + UNIT_IMAGES, end)}"), stamp, split)


def count_of(images: str, labels: str) -> int:
    """How many images there are, once the two files agree."""
    counts = [header(images, IMAGES)[0], header(labels, LABELS)[0]]
    if counts[0] != counts[1]:
        raise UserError(f"{images} has {counts[0]:,} images, {labels} has {counts[1]:,} labels: fetch them again")
    return counts[0]


def header(place: str, kind: int) -> tuple[int, ...]:
    """The sizes that an idx file gives itself, (count,) or (count, 28, 28)."""
    dimensions = kind % 256
    with uncompressed(place) as stream:
        content = stream.read(4 + 4 * dimensions)
    if len(content) < 4 + 4 * dimensions:
        raise UserError(f"{place} is cut short: fetch it again")
    magic, *sizes = struct.unpack(f">{1 + dimensions}I", content)
    if magic != kind:
        raise UserError(f"{place} begins with {magic} instead of {kind}: it is no such file of MNIST")
    if tuple(sizes[1:]) != (SIDE, SIDE)[: dimensions - 1] or sizes[0] > MOST_IMAGES:
        raise UserError(f"{place} has the sizes {' x '.join(map(str, sizes))}: MNIST's images are {SIDE} x {SIDE}")
    return tuple(sizes)


def entries(place: str, kind: int, first: int, end: int) -> np.ndarray:
    """Some images or labels of a file, as bytes one after another; with the last, the file's end is looked at too."""
    count, *sizes = header(place, kind)
    size = prod(sizes)
    with uncompressed(place) as stream:
        stream.seek(4 + 4 * (kind % 256) + first * size)
        content = taken(stream, (end - first) * size)
        rest = stream.read(1) if end == count else b""
    if len(content) < (end - first) * size:
        raise UserError(f"{place} is cut short: fetch it again")
    if rest:
        raise UserError(f"{place} goes on after the {count:,} entries that it says it has: fetch it again")
    return np.frombuffer(content, np.uint8)
