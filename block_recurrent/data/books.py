"""Books: PG19, as its bucket or TensorFlow Datasets holds it, and raw files of Project Gutenberg."""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import ClassVar

from block_recurrent.data.documents import SPLITS, Document, Dropped, Unit
from block_recurrent.data.files import (
    File,
    is_file,
    is_folder,
    join,
    listing,
    read_bytes,
    relative,
    stamp_of,
)
from block_recurrent.data.sources import flaw, units_of, with_links
from block_recurrent.errors import UserError
from block_recurrent.quiet import import_tensorflow, quiet_stderr

# Of the paper (Rae et al., 2020, table 1).
PG19_PUBLISHED = {
    "words": {"train": 1_973_136_207, "validation": 3_007_061, "test": 6_966_499},
    "documents": {"train": 28_602, "validation": 50, "test": 100},
}


def book_name(identity: str, title: str = "", year: str = "") -> str:
    """ID title (year), as far as known."""
    title, year = " ".join(title.split()), year.strip()
    return " ".join(part for part in (identity, title, f"({year})" if year.isdecimal() else "") if part)


def titles_and_years(metadata: bytes) -> dict[str, tuple[str, str]]:
    """id -> title, year of every line `id,title,year,url`; titles may hold commas, quoted or not."""
    found = {}
    # Line by line: one quotation mark that is never closed would swallow all books after it.
    for line in metadata.decode("utf-8-sig", errors="replace").splitlines():
        identity, *others = fields_of(line)
        if others and "://" in others[-1]:
            others.pop()
        year = others.pop().strip() if others and others[-1].strip().isdecimal() else ""
        if identity.strip() and others:
            found[identity.strip()] = (",".join(others).strip(' "'), year)
    return found


def fields_of(line: str) -> list[str]:
    try:
        fields = next(csv.reader([line]), [""])
    except csv.Error:
        fields = []
    return fields if len(fields) == 4 else line.split(",")


class OfPg19:
    """What is so of PG19 in either form."""

    name: ClassVar[str] = "pg19"
    contiguous: ClassVar[bool] = False
    published: ClassVar[dict[str, dict[str, int]]] = PG19_PUBLISHED


@dataclass(frozen=True)
class Pg19(OfPg19):
    """PG19 as its bucket holds it: train, validation and test with a file ID.txt for each book, and metadata.csv."""

    input: str

    def units(self) -> list[Unit]:
        books = {split: self._books(split) for split in SPLITS}
        missing = [f"{split}/*.txt" for split in SPLITS if not books[split]]
        if missing:
            raise UserError(
                f"{self.input} has no {', no '.join(missing)}: give a folder with PG19's train, validation and test, "
                f"such as gs://deepmind-gutenberg"
            )
        titles = stamp_of(self._metadata) if is_file(self._metadata) else ""
        return with_links([unit for split in SPLITS for unit in units_of(books[split], split, titles)], self.input)

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        known = titles_and_years(read_bytes(self._metadata)) if is_file(self._metadata) else {}
        for place in unit.places:
            content, identity = read_bytes(place), PurePosixPath(place).stem
            reason = flaw(content)
            if reason:
                dropped.add(reason, f"{unit.split}/{identity}.txt")
                continue
            yield Document(
                book_name(identity, *known.get(identity, ())), content.replace(b"\r\n", b"\n"), split=unit.split
            )

    def _books(self, split: str) -> list[File]:
        folder = join(self.input, split)
        files = listing(folder) if is_folder(folder) else []
        return [file for file in files if file.relative.endswith(".txt") and "/" not in file.relative]

    @property
    def _metadata(self) -> str:
        return join(self.input, "metadata.csv")


@dataclass(frozen=True)
class Pg19Tfds(OfPg19):
    """PG19 as TensorFlow Datasets prepares it; `input` is the folder of that version or one above."""

    input: str

    def units(self) -> list[Unit]:
        _, splits = self._prepared()
        missing = [split for split in SPLITS if split not in splits]
        if missing:
            raise UserError(
                f"{self.input} lacks the split {', '.join(missing)}: prepare it with tfds build pg19, or give it whole"
            )
        return [
            Unit((path,), stamp_of(path), split) for split in SPLITS for path, length in shards(splits[split]) if length
        ]

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        builder, splits = self._prepared()
        shard = [path for path, _ in shards(splits[unit.split])].index(unit.places[0])
        import tensorflow_datasets as tfds

        with quiet_stderr():
            books = builder.as_dataset(
                split=f"{unit.split}[{shard}shard:{shard + 1}shard]",
                shuffle_files=False,
                # Books are large: neither keep what was read nor read ahead.
                read_config=tfds.ReadConfig(try_autocache=False, interleave_cycle_length=1),
            )
        for book in tfds.as_numpy(books):
            # The preparation cuts titles at their commas, and then this is no date: `book_name` leaves it out.
            title, date = (book[key].decode(errors="replace") for key in ("book_title", "publication_date"))
            name, content = book_name(str(book["book_id"]), title, date), book["book_text"]
            reason = flaw(content)
            if reason:
                dropped.add(reason, name)
            else:
                yield Document(name, content.replace(b"\r\n", b"\n"), split=unit.split)

    def _prepared(self):
        """The builder and its splits."""
        folder = tfds_folder(self.input)
        if folder is None:
            raise UserError(
                f"{self.input} holds no dataset_info.json: give the folder .../pg19/0.1.1 of a TFDS dataset"
            )
        import_tensorflow()
        import tensorflow_datasets as tfds

        builder = tfds.builder_from_directory(folder)
        return builder, builder.info.splits


def shards(split) -> Iterator[tuple[str, int]]:
    """Path and number of books of each shard of a TFDS split."""
    return zip((str(path) for path in split.filepaths), split.shard_lengths, strict=True)


def tfds_folder(place: str) -> str | None:
    """Where at or below a folder TFDS has put PG19."""
    folders = (place, join(place, "0.1.1"), join(place, "pg19", "0.1.1"))
    return next((folder for folder in folders if is_file(join(folder, "dataset_info.json"))), None)


def pg19(input: str) -> Pg19 | Pg19Tfds:
    """PG19 in whichever of its two forms is there."""
    return Pg19Tfds(input) if tfds_folder(input) else Pg19(input)


# The same book comes as 11224-0.txt (UTF-8), 11224-8.txt (Latin-1) and 11224.txt (ASCII), or as pg11224.txt.
GUTENBERG_FILE = re.compile(r"(?:pg)?(\d+)(-0|-8)?\.txt(\.utf-?8)?")
TEXT_FILE = re.compile(r"\.txt(\.utf-?8)?$")

# The marks around a book: of today, then of the files before about 2003, which put "the small print" before the book,
# and now and then after it. A long title runs into the next line.
OF_GUTENBERG = r"OF (?:THE |THIS )?PROJECT GUTENBERG"
START = re.compile(rf"^[ \t]*\*\*\* ?START {OF_GUTENBERG}(?:[^*]{{0,300}}?\*\*\*|.*$)", re.I | re.M)
END = re.compile(rf"^[ \t]*\*\*\* ?END {OF_GUTENBERG}", re.I | re.M)
END_LINE = re.compile(rf"^[ \t*]*(?:This is the )?End {OF_GUTENBERG}", re.I | re.M)
SMALL_PRINT = re.compile(r"^[ \t]*\*+ ?START[ *]*THE SMALL PRINT", re.I | re.M)
SMALL_PRINT_END = re.compile(r"^[ \t]*\*+ ?END[ *]*THE SMALL PRINT.*$", re.I | re.M)
HEADER = 30_000  # characters; what Project Gutenberg writes before a book is never longer
FOOTER = 1_000  # nor is what stands between the line that ends a book and the mark that does

TITLE = re.compile(r"^Title:[ \t]*(\S.*)$", re.M)
CREDITS = re.compile(
    r"\W*(?:(?:e-?text |e-?book )?(?:produced|prepared|transcribed|scanned|digiti[sz]ed|proofread) (?:by|from|and)\b"
    r"|this (?:project gutenberg )?e-?(?:text|book) (?:was|has been) |html version by|credits:"
    r"|note:\s+(?:project gutenberg also has|images of the original)|see \d+-h\.|\(https?://www\.gutenberg)",
    re.I,
)
PARAGRAPH_END = re.compile(r"\n\s*\n|\Z")
TRANSCRIBER = re.compile(r"^\W*transcriber['’]?s?['’]? notes?\W*$", re.I | re.M)


@dataclass(frozen=True)
class Gutenberg:
    """A folder of files as Project Gutenberg hands them out, licence and all; of one book's encodings the best is read.

    What surrounds a book is taken off. A file without any of the marks that tell where a book begins or ends is
    dropped: an index, a licence, or text that somebody has cleaned already, which is a corpus of plain text files.
    """

    input: str
    name: ClassVar[str] = "gutenberg"
    contiguous: ClassVar[bool] = False
    published: ClassVar[dict[str, dict[str, int]]] = {}

    def units(self) -> list[Unit]:
        files = listing(self.input) if is_folder(self.input) else []
        best: dict[str, File] = {}
        for file in sorted(files, key=preference):
            if TEXT_FILE.search(file.relative):
                best.setdefault(book_of_file(file.relative), file)
        if not best:
            raise UserError(f"{self.input} has no .txt files: give a folder of Project Gutenberg's plain text files")
        return with_links(list(units_of(sorted(best.values(), key=lambda file: file.relative))), self.input)

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        for place in unit.places:
            name, content = relative(place, self.input), read_bytes(place)
            if b"\0" in content:
                dropped.add("NUL bytes", name)
                continue
            text = decoded(content)
            book = without_boilerplate(text)
            if book is None:
                dropped.add("no mark of Project Gutenberg" if text.strip() else "empty", name)
            elif not book:
                dropped.add("nothing between the marks", name)
            else:
                title = TITLE.search(text, 0, HEADER)
                yield Document(book_name(book_of_file(name), title[1] if title else ""), book.encode())


def book_of_file(relative: str) -> str:
    """What the files of one book have in common: its number; for a file named otherwise, its path."""
    named = GUTENBERG_FILE.fullmatch(PurePosixPath(relative).name)
    return named[1] if named else TEXT_FILE.sub("", relative)


def preference(file: File) -> tuple:
    """Sorts the files of one book, the best first: not superseded, and in the richest encoding."""
    named = GUTENBERG_FILE.fullmatch(PurePosixPath(file.relative).name)
    encoding = ("-0" if named[3] else named[2]) if named else None
    return ("old" in PurePosixPath(file.relative).parts, ("-0", "-8", None).index(encoding), file.relative)


def decoded(content: bytes) -> str:
    """The text of a file in UTF-8, with or without a byte order mark, or else Latin-1; lines end in LF."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def without_boilerplate(text: str) -> str | None:
    """A book without what Project Gutenberg and its volunteers put around it; None where no mark tells what that is."""
    start = START.search(text)
    begin = start.end() if start else 0
    before, after = small_prints(text, begin)
    if before:
        begin = before
    end = END.search(text, begin)
    stop = min(end.start() if end else len(text), after)
    lines = list(END_LINE.finditer(text, begin, stop))
    # Collections hold such lines inside, after each of their volumes: only the last may be the end.
    if lines and (stop == len(text) or stop - lines[-1].start() < FOOTER):
        stop = lines[-1].start()
    if not (start or before or stop < len(text)):
        return None
    return trimmed(text[begin:stop])


def small_prints(text: str, begin: int) -> tuple[int, int]:
    """Where the small print before a book ends, 0 without one, and where that after it starts, or the text's end."""
    ends = [mark.end() for mark in SMALL_PRINT_END.finditer(text, begin)]
    after = len(text)
    if ends and len(text[ends[-1] :].strip()) < FOOTER:
        ends.pop()
        after = max((mark.start() for mark in SMALL_PRINT.finditer(text, begin)), default=after)
    return (ends[0] if ends and ends[0] < begin + HEADER else 0), after


def trimmed(book: str) -> str:
    """Without credits at the beginning, transcriber's notes at the end, and blank lines at both."""
    book = from_first_line(book)
    while CREDITS.match(book):
        book = from_first_line(book[PARAGRAPH_END.search(book).end() :])
    notes = TRANSCRIBER.search(book, len(book) * 9 // 10)
    book = (book[: notes.start()] if notes else book).rstrip()
    return book + "\n" if book else ""


def from_first_line(text: str) -> str:
    """Without blank lines before it; its indentation stays."""
    return text[re.match(r"\s*^", text, re.M).end() :]
