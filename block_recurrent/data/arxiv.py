"""The mathematics of arXiv from its bulk source archives: one LaTeX document per paper.

A bulk archive is a tar of papers, `YYMM/ID.gz` (a tar or a single file, compressed) or `YYMM/ID.pdf`. It is read where
it is, one paper in memory at a time. Which papers are mathematics is in the metadata snapshot, one JSON record a line;
of its gigabytes a process keeps eight bytes a paper. Archives come from strangers: whatever is wrong with a paper costs
that paper, and what is wrong with an archive costs the papers after it.
"""

import functools
import gzip
import hashlib
import io
import json
import posixpath
import re
import tarfile
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, ClassVar

import numpy as np

from block_recurrent.data import files, latex
from block_recurrent.data.documents import Document, Dropped, Unit
from block_recurrent.data.latex import Unusable
from block_recurrent.data.near_duplicates import sample
from block_recurrent.data.sources import with_links
from block_recurrent.errors import UserError

PAPER_LIMIT = 200_000_000  # bytes of one paper, decompressed
FILES_LIMIT = 20_000  # files of one paper
HEADER_LIMIT = 1_000_000  # bytes; a header of a tar says itself how long it is
LINE_LIMIT = 10_000_000  # bytes of one metadata record

ARCHIVE = re.compile(r"arXiv_src_\d{4}_\d+\.tar")
OLD_ID = re.compile(r"([a-z]+(?:-[a-z]+)*)(?:\.[A-Z]{2})?([0-9]{7})(?:v[0-9]+)?")
NEW_ID = re.compile(r"([0-9]{4}\.[0-9]{4,5})(?:v[0-9]+)?")
POSTSCRIPT = re.compile(rb"[\s\x04]*%!(PS|[\r\n])")  # but `%!TEX root = ...` is a comment for an editor
HTML = re.compile(rb"\s*<(!doctype html|html)", re.IGNORECASE)
END = bytes(tarfile.BLOCKSIZE)

BAD_GZIP = (gzip.BadGzipFile, zlib.error, EOFError)  # any other OSError is the storage's


@dataclass(frozen=True)
class ArxivMath:
    """Papers with a category of the archive of mathematics (math.*), cross-lists included."""

    input: str  # a folder with arXiv_src_YYMM_NNN.tar, at any depth, or one such archive
    metadata: str  # arxiv-metadata-oai-snapshot.json, as it is or compressed with gzip

    name: ClassVar[str] = "arxiv_math"
    contiguous: ClassVar[bool] = False

    def units(self) -> list[Unit]:
        """One unit per archive; the first also stands for the metadata and reports what is wrong with them."""
        if not files.is_file(self.metadata):
            raise UserError(
                f"there is no metadata file {self.metadata}: download arxiv-metadata-oai-snapshot.json "
                "(kaggle.com/datasets/Cornell-University/arxiv) and say where it is"
            )
        if files.is_file(self.input):
            archives = [(self.input, files.stamp_of(self.input))]
        else:
            archives = [
                (file.path, file.stamp)
                for file in files.listing(self.input)
                if ARCHIVE.fullmatch(posixpath.basename(file.relative))
            ]
        if not archives:
            raise UserError(
                f"no arXiv_src_YYMM_NNN.tar in {self.input}: give the folder that arXiv's bulk source archives "
                "are in (info.arxiv.org/help/bulk_data_s3.html)"
            )
        metadata_stamp = files.stamp_of(self.metadata)
        units = [
            Unit((path,) if place else (path, self.metadata), f"{stamp}, metadata {metadata_stamp}")
            for place, (path, stamp) in enumerate(archives)
        ]
        return with_links(units, self.input)

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        snapshot = read_snapshot(self.metadata, files.stamp_of(self.metadata))
        archive, *also = unit.places
        if also:
            dropped.counts.update(snapshot.dropped.counts)
            for reason, names in snapshot.dropped.examples.items():
                dropped.examples.setdefault(reason, []).extend(names)
        kept = set()
        with files.open_file(archive) as file:
            try:
                for member in members(file):
                    try:
                        if (document := read_paper(file, member, snapshot, kept, dropped)) is not None:
                            kept.add(document.name)
                            yield document
                    except Unusable as reason:
                        dropped.add(str(reason), printable(member.name))
            except tarfile.TarError:
                dropped.add("truncated archive", archive)


def read_paper(
    file: BinaryIO, member: tarfile.TarInfo, snapshot: "Snapshot", kept: set[str], dropped: Dropped
) -> Document | None:
    """The document of a member of a bulk archive; None for a folder."""
    if member.isdir():
        return None
    if not member.isreg() or member.issparse():
        raise Unusable("not a regular file")
    stem, ending = posixpath.splitext(posixpath.basename(member.name))
    paper = paper_id(stem)
    if paper is None or ending not in (".gz", ".pdf"):
        raise Unusable("not named as a paper")
    mathematics = snapshot.is_mathematics(paper)
    if mathematics is None:
        raise Unusable("no metadata")
    if not mathematics:
        raise Unusable("not mathematics")
    if paper in kept:
        raise Unusable("duplicate id")
    if ending == ".pdf":
        raise Unusable("PDF only")
    content = decompress(read_member(file, member))
    text = latex.assemble(paper_files(content, stem, dropped), stem).encode()
    return Document(paper, text, lines=sample(text))


def paper_id(stem: str) -> str | None:
    """math9912001 is math/9912001, 1001.0001v2 is 1001.0001."""
    if match := NEW_ID.fullmatch(stem):
        return match[1]
    if match := OLD_ID.fullmatch(stem):
        return f"{match[1]}/{match[2]}"
    return None


class Guarded:
    """What tarfile reads headers from: it believes any length that an archive claims, so this does not."""

    def __init__(self, file: BinaryIO):
        self.file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= HEADER_LIMIT:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self.file.read(size)


def members(file: BinaryIO, may_just_stop: bool = False) -> Iterator[tarfile.TarInfo]:
    """The members of a tar; a TarError, after those that are whole, where it is damaged or lacks its end.

    One that was compressed `may_just_stop` after a member: that it is whole, its checksum tells.
    """
    tar = sound(tarfile.open, fileobj=Guarded(file), mode="r:")
    before = -1
    while (member := sound(tar.next)) is not None:
        if member.size < 0 or tar.offset <= before:  # tarfile would go round in circles
            raise tarfile.ReadError("a size below zero")
        before = tar.offset
        tar.members.clear()  # else they stay in memory
        yield member
    file.seek(tar.offset)
    end = file.read(len(END))
    if end != END and not (may_just_stop and end == b""):  # tarfile takes what is no header for the end
        raise tarfile.ReadError("no end")


def sound(read: Callable, **arguments):
    """What `read` of tarfile gives. Over some damage it raises other errors than its own."""
    try:
        return read(**arguments)
    except (ValueError, LookupError, OverflowError, RecursionError) as error:
        raise tarfile.ReadError(str(error)) from error


def read_member(file: BinaryIO, member: tarfile.TarInfo) -> bytes:
    if member.size > PAPER_LIMIT:
        raise Unusable(too_large())
    file.seek(member.offset_data)
    content = file.read(member.size)
    if len(content) < member.size:
        raise tarfile.ReadError("unexpected end of data")
    return content


def too_large() -> str:
    return f"expands to more than {PAPER_LIMIT / 1e6:g} MB"


def decompress(compressed: bytes) -> bytes:
    try:
        return files.Limited(gzip.GzipFile(fileobj=io.BytesIO(compressed)), PAPER_LIMIT).read()
    except files.TooLarge:
        raise Unusable(too_large()) from None
    except BAD_GZIP:
        raise Unusable("damaged source") from None


def paper_files(content: bytes, stem: str, dropped: Dropped) -> dict[str, bytes]:
    """The files of a decompressed paper by path: those of a tar, or the only one."""
    if is_tar(content):
        try:
            return tar_files(content, stem, dropped)
        except tarfile.TarError:
            raise Unusable("damaged source") from None
    if content.startswith(b"%PDF"):
        raise Unusable("PDF only")
    if POSTSCRIPT.match(content):
        raise Unusable("PostScript only")
    if HTML.match(content):
        raise Unusable("HTML only")
    return {f"{stem}.tex": content}


def is_tar(content: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(content[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True


def tar_files(content: bytes, stem: str, dropped: Dropped) -> dict[str, bytes]:
    """The regular files of a paper's tar, which are views: most are figures that nobody reads."""
    view, found = memoryview(content), {}
    for count, member in enumerate(members(io.BytesIO(content), may_just_stop=True)):
        if count >= FILES_LIMIT:
            raise Unusable(f"more than {FILES_LIMIT} files")
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            dropped.add("file of a paper: a link or special", f"{stem}: {printable(member.name)}")
        elif member.name.startswith("/") or ".." in member.name.split("/"):
            dropped.add("file of a paper: a path that leads outside", f"{stem}: {printable(member.name)}")
        else:
            found[posixpath.normpath(member.name)] = view[member.offset_data : member.offset_data + member.size]
    return found


def printable(name: str) -> str:
    """A name from an archive, which may be any bytes of any length, for a report."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name[:200])


@dataclass(frozen=True)
class Snapshot:
    """What is kept of the metadata: sorted hashes of the ids, whose last bit tells mathematics."""

    marks: np.ndarray
    dropped: Dropped = field(default_factory=Dropped)

    def is_mathematics(self, paper: str) -> bool | None:
        """None for a paper without a record."""
        mark = mark_of(paper, True)
        for candidate in (mark, mark - 1):
            at = np.searchsorted(self.marks, np.uint64(candidate))
            if at < len(self.marks) and int(self.marks[at]) == candidate:
                return candidate == mark
        return None


def mark_of(paper: str, mathematics: bool) -> int:
    digest = hashlib.blake2b(paper.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ~1 | mathematics


@functools.lru_cache(maxsize=2)
def read_snapshot(path: str, stamp: str) -> Snapshot:
    """Reads the metadata, once per process and `stamp`."""
    marks, dropped = array("Q"), Dropped()
    try:
        with files.open_file(path) as file:
            for number, line in enumerate(lines_of(file), start=1):
                record = parse(line)
                if record is not None:
                    marks.append(mark_of(*record))
                elif line.strip():
                    dropped.add("metadata line that is not a record", f"{path}:{number}")
    except BAD_GZIP as error:
        raise UserError(f"{path} is damaged or cut short: download it again ({error})") from error
    if not marks:
        raise UserError(
            f"{path} has no line that is a JSON record with id and categories: is it arxiv-metadata-oai-snapshot.json?"
        )
    return Snapshot(np.sort(np.frombuffer(marks, np.uint64)), dropped)


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Lines, without the rest of one that is too long to be a record."""
    compressed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    reader = io.BufferedReader(gzip.GzipFile(fileobj=file) if compressed else file, 1 << 20)
    while line := reader.readline(LINE_LIMIT):
        yield line
        while line and not line.endswith(b"\n"):
            line = reader.readline(LINE_LIMIT)


def parse(line: bytes) -> tuple[str, bool] | None:
    """A record's id and whether it is mathematics; math-ph is physics', but arXiv lists it as math.MP as well."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    paper, categories = record.get("id"), record.get("categories")
    if not isinstance(paper, str) or not isinstance(categories, str):
        return None
    return paper, any(category.startswith("math.") for category in categories.split())
