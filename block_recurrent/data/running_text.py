"""Corpora of running text: enwik8, WikiText, Penn Treebank and the Billion Word benchmark.

Each split is one text (each file, for Billion Word). Published counts of tokens are words, or characters, and one end
of line for every line: the vocabulary writes it where the text has a newline.
"""

import bz2
import contextlib
import gzip
import io
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import BinaryIO, ClassVar

from block_recurrent.data.documents import SPLITS, Document, Dropped, Unit
from block_recurrent.data.files import is_file, join, open_file, stamp_of
from block_recurrent.errors import UserError

BUFFER = 1 << 16
BLANKS = b" \t\r\n"


def units_of(folder: str, files: dict[str, list[str]], advice: str) -> list[Unit]:
    """A unit for each file, given by split; a UserError names all that are not there."""
    places = [(split, join(folder, name)) for split in SPLITS for name in files[split]]
    missing = [place for _, place in places if not is_file(place)]
    if missing:
        names = [place.removeprefix(folder).lstrip("/") for place in missing]
        raise UserError(f"{folder} has no {', no '.join(names)}: {advice}")
    return [Unit((place,), stamp_of(place), split) for split, place in places]


def lines_of(place: str) -> Iterator[bytes]:
    """The lines of a file, refused where they cannot be text: such a file was not fetched whole."""
    with open_file(place) as file:
        for number, line in enumerate(io.BufferedReader(file, BUFFER), start=1):
            reason = flaw(line)
            if reason:
                raise UserError(f"{place}, line {number}, has {reason}: fetch the file again")
            yield line


def flaw(line: bytes) -> str | None:
    if b"\0" in line:
        return "NUL bytes"
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return f"the byte 0x{line[error.start]:02x}, which is not UTF-8"
    return None


def bare(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without blanks around them; blank lines stay, for they count."""
    for line in lines:
        text = line.strip(BLANKS)
        if text or line.endswith(b"\n"):  # Penn Treebank's characters end in a newline and a blank that is no line
            yield text + b"\n"


def spaced(line: bytes) -> bytes:
    """A line's characters with blanks between, `_` for a blank of its own."""
    text, newline, _ = line.decode().replace(" ", "_").partition("\n")
    return (" ".join(text) + newline).encode()


def joined(place: str, lines: Iterable[bytes]) -> bytes:
    text = b"".join(lines)
    if not text or text.isspace():
        raise UserError(f"{place} is empty: fetch the file again")
    return text


class OneTextPerSplit:
    """What WikiText and Penn Treebank share: a file for each split, read as one document."""

    contiguous: ClassVar[bool] = True

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        (place,) = unit.places
        yield Document(f"{self.name}/{unit.split}", joined(place, bare(lines_of(place))), split=unit.split)


@dataclass(frozen=True)
class WikiText(OneTextPerSplit):
    """wiki.{train,valid,test}.tokens, or .raw where there are none, in the input or the archive's folder in it."""

    input: str
    archive: ClassVar[str]
    counts: ClassVar[dict[str, dict[str, int]]]

    def units(self) -> list[Unit]:
        folder, ending = self._found()
        files = {split: [f"wiki.{short(split)}.{ending}"] for split in SPLITS}
        return units_of(folder, files, f"give the folder of the unpacked {self.archive}")

    @property
    def published(self) -> dict[str, dict[str, int]]:
        """Of the .tokens; nobody has published counts of the raw text's words."""
        return self.counts if self._found()[1] == "tokens" else {}

    def _found(self) -> tuple[str, str]:
        """Folder and ending of the first of the forms that is there; where none is, of what to ask for."""
        forms = [
            (folder, ending)
            for ending, archive in (("tokens", self.archive), ("raw", f"{self.archive}-raw"))
            for folder in (self.input, join(self.input, archive))
        ]
        there = (
            (folder, ending)
            for folder, ending in forms
            if any(is_file(join(folder, f"wiki.{short(split)}.{ending}")) for split in SPLITS)
        )
        return next(there, (self.input, "tokens"))


def short(split: str) -> str:
    return {"validation": "valid"}.get(split, split)


@dataclass(frozen=True)
class WikiText2(WikiText):
    name: ClassVar[str] = "wikitext2"
    archive: ClassVar[str] = "wikitext-2"
    counts: ClassVar[dict[str, dict[str, int]]] = {
        "tokens": {"train": 2_088_628, "validation": 217_646, "test": 245_569},
        "vocabulary": {"train": 33_278},
    }


@dataclass(frozen=True)
class WikiText103(WikiText):
    name: ClassVar[str] = "wikitext103"
    archive: ClassVar[str] = "wikitext-103"
    counts: ClassVar[dict[str, dict[str, int]]] = {
        "tokens": {"train": 103_227_021, "validation": 217_646, "test": 245_569},
        "vocabulary": {"train": 267_735},
    }


PENN_WORDS = {
    "tokens": {"train": 929_589, "validation": 73_760, "test": 82_430},
    "vocabulary": {"train": 10_000},  # with the end of line
}
PENN_SPELT = {  # 49 is in the R-Transformer's code; the others are counted from the files of the published checksums
    "tokens": {"train": 5_269_890, "validation": 413_262, "test": 464_989},
    "vocabulary": {"train": 49},
}
PENN_CHARACTERS = {
    "tokens": {"train": 5_017_482, "validation": 393_042, "test": 442_423},
    "vocabulary": {"train": 50},  # with the end of line
}


@dataclass(frozen=True)
class PennTreebank(OneTextPerSplit):
    """Mikolov's ptb.{train,valid,test}.txt; as characters, ptb.char.*.txt: symbols with blanks between, `_` a space.

    `spelt` makes such characters of the former, all blanks among them, as the code of TCN and of the R-Transformer
    does: there the end of a line is the five characters of `<eos>`, which the vocabulary writes where a newline is.
    """

    input: str
    characters: bool = False
    spelt: bool = False

    @property
    def name(self) -> str:
        kind = "_spelt" if self.spelt else "_characters" if self.characters else ""
        return f"penn_treebank{kind}"

    @property
    def published(self) -> dict[str, dict[str, int]]:
        return PENN_SPELT if self.spelt else PENN_CHARACTERS if self.characters else PENN_WORDS

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        if not self.spelt:
            yield from super().read(unit, dropped)
            return
        (place,) = unit.places
        yield Document(f"{self.name}/{unit.split}", joined(place, map(spaced, lines_of(place))), split=unit.split)

    def units(self) -> list[Unit]:
        kind = "ptb.char" if self.characters else "ptb"
        files = {split: [f"{kind}.{short(split)}.txt"] for split in SPLITS}
        folders = (self.input, join(self.input, "simple-examples", "data"))  # the latter: where the archive has them
        there = (folder for folder in folders if any(is_file(join(folder, names[0])) for names in files.values()))
        return units_of(next(there, self.input), files, "give the folder simple-examples/data of Mikolov's archive")


@dataclass(frozen=True)
class BillionWord:
    """The 1-billion-word benchmark: shuffled sentences, one in a line, as they are.

    Training is its 99 training files. Of the fifty held-out ones the first is the test set, as in the benchmark's paper
    and since; the second is validation; the others are not read.
    """

    input: str
    name: ClassVar[str] = "billion_word"
    contiguous: ClassVar[bool] = True
    published: ClassVar[dict[str, dict[str, int]]] = {
        "words": {"train": 768_648_884},
        "predictions": {"train": 798_949_912},  # words and 30,301,028 lines
    }
    TRAINING: ClassVar[str] = "training-monolingual.tokenized.shuffled"
    HELD_OUT: ClassVar[str] = "heldout-monolingual.tokenized.shuffled"

    def units(self) -> list[Unit]:
        files = {
            "train": [f"{self.TRAINING}/news.en-{number:05d}-of-00100" for number in range(1, 100)],
            "validation": [f"{self.HELD_OUT}/news.en.heldout-00001-of-00050"],
            "test": [f"{self.HELD_OUT}/news.en.heldout-00000-of-00050"],
        }
        inside = join(self.input, "1-billion-word-language-modeling-benchmark-r13output")
        folder = inside if is_file(join(inside, files["test"][0])) else self.input
        return units_of(folder, files, f"give the folder that holds {self.TRAINING} and {self.HELD_OUT}")

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        (place,) = unit.places
        yield Document(f"{self.name}/{PurePosixPath(place).name}", joined(place, lines_of(place)), split=unit.split)


@dataclass(frozen=True)
class Enwik8:
    """The first 10^8 bytes of Wikipedia's dump of March 2006, markup and all: 90, 5 and 5 million, in this order.

    Another file is split in the same proportions. It may be compressed, and is then read as a stream.
    """

    input: str
    name: ClassVar[str] = "enwik8"
    contiguous: ClassVar[bool] = True
    published: ClassVar[dict[str, dict[str, int]]] = {
        "tokens": {"train": 90_000_000, "validation": 5_000_000, "test": 5_000_000}
    }
    FILES: ClassVar[tuple[str, ...]] = ("enwik8", "enwik8.zip", "enwik8.gz", "enwik8.bz2")

    def units(self) -> list[Unit]:
        places = (self.input, *(join(self.input, name) for name in self.FILES))
        place = next((place for place in places if is_file(place)), None)
        if place is None:
            raise UserError(
                f"{self.input} is no file and has no {', no '.join(self.FILES)}: "
                f"fetch http://mattmahoney.net/dc/enwik8.zip"
            )
        return [Unit((place,), stamp_of(place), split) for split in SPLITS]

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        (place,) = unit.places
        with uncompressed(place) as stream:
            # Seeking in a compressed stream decompresses it piece by piece and keeps nothing.
            begin, end = range_of(unit.split, stream.seek(0, io.SEEK_END))
            stream.seek(begin)
            text = taken(stream, end - begin)
        name = f"{self.name}/{unit.split}"
        if text:
            yield Document(name, text, split=unit.split)
        else:
            dropped.add("empty", name)


def range_of(split: str, size: int) -> tuple[int, int]:
    """Where a split begins and ends in a text of `size` bytes."""
    train, validation = size * 90 // 100, size * 5 // 100
    bounds = (0, train, train + validation, size)
    at = SPLITS.index(split)
    return bounds[at], bounds[at + 1]


def taken(stream: BinaryIO, size: int) -> bytes:
    """The next bytes of a stream, in pieces: asked for all at once, decompressors hold them several times."""
    text = io.BytesIO()
    while piece := stream.read(min(BUFFER, size - text.tell())):
        text.write(piece)
    return text.getvalue()


@contextlib.contextmanager
def uncompressed(place: str) -> Iterator[BinaryIO]:
    """A file's bytes as a stream that can seek, decompressed where its name says so."""
    with open_file(place) as file, contextlib.ExitStack() as stack:
        try:
            if place.endswith(".zip"):
                archive = stack.enter_context(zipfile.ZipFile(file))
                member = stack.enter_context(archive.open(only_member(archive, place)))
                member.MAX_SEEK_READ = BUFFER  # how much it holds at once, 16 MB if one lets it
                yield member
            elif place.endswith(".gz"):
                yield stack.enter_context(gzip.GzipFile(fileobj=file))
            elif place.endswith(".bz2"):
                yield stack.enter_context(bz2.BZ2File(file))
            else:
                yield file
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise UserError(f"{place} cannot be decompressed ({error}): fetch the file again") from error


def only_member(archive: zipfile.ZipFile, place: str) -> zipfile.ZipInfo:
    members = [member for member in archive.infolist() if not member.is_dir()]
    named = [member for member in members if PurePosixPath(member.filename).name == "enwik8"]
    if len(named or members) != 1:
        raise UserError(f"{place} holds {len(members)} files, none or several of them enwik8: give the one to read")
    return (named or members)[0]
