"""Files wherever they are, a local folder or a bucket (gs://, s3://, any address that fsspec opens)."""

import argparse
import contextlib
import functools
import glob
import gzip
import io
import itertools
import os
import stat
import tempfile
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from block_recurrent.errors import UserError
from block_recurrent.ranges import POSITIVE
from block_recurrent.writing import replacing

ANSWER = "BLOCK_RECURRENT_ANSWER_SECONDS"  # how long a bucket may be silent at first


@dataclass(frozen=True)
class File:
    """A file in a listing."""

    path: str  # as `open_file` takes it
    relative: str  # below the folder that was listed, with slashes
    size: int
    stamp: str  # changes when the file is rewritten


def is_remote(place: str | Path) -> bool:
    return "://" in str(place)


def file_system(place: str):
    """fsspec's file system of an address, and the path on it; of a bucket of Google's, once it has answered."""
    if place.startswith(("gs://", "gcs://")):
        require_answer(place.partition("://")[2].partition("/")[0])
    return file_system_of(place)


@functools.cache
def require_answer(bucket: str) -> None:
    """Raises a UserError where a bucket is silent: without a network its client tries again for minutes."""
    seconds = answer_time(os.environ.get(ANSWER, "20"))
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):  # whoever opens a file there tells what is wrong
            file_system_of(f"gs://{bucket}")[0].info(bucket)
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    if not answered.wait(seconds):
        raise UserError(
            f"gs://{bucket} has not answered in {seconds:g} s: see whether there is a network, or wait longer with "
            f"{ANSWER}={3 * seconds:g}"
        )


def answer_time(text: str) -> float:
    try:
        return POSITIVE(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{ANSWER} is in seconds: {error}") from error


def file_system_of(place: str):
    import fsspec

    try:
        return fsspec.core.url_to_fs(place)
    except ImportError as error:  # fsspec says which package a protocol needs
        raise UserError(f"{place}: {error}") from error
    except ValueError as error:
        raise UserError(f"{place} is no address that can be opened: {error}") from error


def is_folder(place: str) -> bool:
    if is_remote(place):
        system, path = file_system(place)
        return system.isdir(path)
    return Path(place).is_dir()


def is_file(place: str) -> bool:
    if is_remote(place):
        system, path = file_system(place)
        return system.isfile(path)
    return Path(place).is_file()


def is_empty(folder: str) -> bool:
    """Whether a folder holds nothing at all, be it a link or another folder."""
    return not (listing(folder, hidden=True) if is_remote(folder) else any(Path(folder).iterdir()))


def join(folder: str, *names: str) -> str:
    """A path below a folder, local or remote."""
    return "/".join([folder.rstrip("/"), *names])


def absolute(place: str) -> str:
    return place if is_remote(place) else str(Path(place).expanduser().absolute())


def relative(place: str, folder: str) -> str:
    """A file's path below a folder, or below the folder of a glob; one name, wherever the folder is moved."""
    parts, root = PurePosixPath(place).parts, PurePosixPath(os.path.expanduser(folder)).parts
    common = next((i for i, (a, b) in enumerate(zip(parts, root, strict=False)) if a != b), min(len(parts), len(root)))
    return "/".join(parts[min(common, len(parts) - 1) :])


def beside(folder: str, name: str) -> str:
    """What `name` means as written in a folder's own files: an address, or a path relative to the folder."""
    return name if is_remote(name) or Path(name).is_absolute() else join(folder, name)


def listing(folder: str, hidden: bool = False, links: bool = False) -> list[File]:
    """All files below a folder, sorted by name; hidden ones, and links to files, only where they are asked for."""
    found = remote_listing(folder, hidden) if is_remote(folder) else local_listing(Path(folder), hidden, links)
    return sorted(found, key=lambda file: file.relative)


def links(folder: str) -> list[str]:
    """The symbolic links below a folder, which a listing leaves out: they may lead anywhere."""
    if is_remote(folder):
        return []
    found = (Path(parent, name) for parent, folders, names in os.walk(folder) for name in [*folders, *names])
    return sorted(path.relative_to(folder).as_posix() for path in found if path.is_symlink())


def require_contained(folder: str | Path) -> None:
    """Refuses a folder, such as a downloaded run, with a symbolic link that leads out of it."""
    root = Path(os.path.realpath(folder))
    for name in links(str(folder)):
        target = Path(os.path.realpath(Path(folder, name)))
        if not target.is_relative_to(root):
            raise UserError(
                f"{Path(folder, name)} is a symbolic link that leads out of {folder}, to {target}: remove it, or put "
                "in its place what it leads to"
            )


def local_listing(folder: Path, hidden: bool, links: bool) -> Iterator[File]:
    for parent, folders, names in os.walk(folder, onerror=unreadable):  # does not follow links
        folders[:] = [name for name in folders if hidden or not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            status = path.stat() if links and path.is_file() else path.lstat()
            if (hidden or not name.startswith(".")) and stat.S_ISREG(status.st_mode):
                relative = path.relative_to(folder).as_posix()
                yield File(str(path), relative, status.st_size, f"{status.st_size} {status.st_mtime_ns}")


def unreadable(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error


def remote_listing(folder: str, hidden: bool) -> Iterator[File]:
    system, root = file_system(folder)
    for path, details in system.find(root, detail=True).items():
        relative = path.removeprefix(root).lstrip("/")
        if hidden or not any(part.startswith(".") for part in PurePosixPath(relative).parts):
            yield File(system.unstrip_protocol(path), relative, details.get("size") or 0, remote_stamp(details))


def matching(pattern: str) -> list[File]:
    """The files that a path or a glob names, sorted.

    A link to a folder counts where it was asked for by name, not where a wildcard finds it: it may lead anywhere.
    """
    if is_remote(pattern):
        system, path = file_system(pattern)
        places = [system.unstrip_protocol(place) for place in system.glob(path) if system.isfile(place)]
    else:
        named = itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts)
        root, found = Path(*named), glob.glob(pattern, recursive=True)
        places = [place for place in found if Path(place).is_file() and not through_links(place, root)]
    return [File(place, place.rpartition("/")[2], size_of(place), stamp_of(place)) for place in sorted(places)]


def through_links(place: str, root: Path) -> bool:
    """Whether a path below a root leads through a symbolic link to a folder."""
    return any(step.is_symlink() for step in Path(place).parents if step != root and step.is_relative_to(root))


def size_of(place: str) -> int:
    if is_remote(place):
        system, path = file_system(place)
        return system.size(path) or 0
    return Path(place).stat().st_size


def remote_stamp(details: dict) -> str:
    """Size and whatever the file system tells of a version."""
    versions = (
        details.get(key) for key in ("etag", "ETag", "md5Hash", "generation", "mtime", "LastModified", "created")
    )
    return f"{details.get('size')} {next((str(version) for version in versions if version), '')}"


def stamp_of(place: str) -> str:
    """The stamp of one file."""
    if is_remote(place):
        system, path = file_system(place)
        return remote_stamp(system.info(path))
    status = Path(place).stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def open_file(place: str) -> BinaryIO:
    """Opens a file for reading bytes."""
    try:
        if is_remote(place):
            system, path = file_system(place)
            return system.open(path, "rb")
        return open(place, "rb")
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # clients of buckets have errors of their own
        if isinstance(error, UserError) or not is_remote(place):
            raise
        raise UserError(f"{place} cannot be read: {error}") from error


def read_bytes(place: str) -> bytes:
    with open_file(place) as file:
        return file.read()


def write_bytes(place: str, content: bytes) -> None:
    """Writes a file that is either whole or not there; a bucket's objects are so by themselves."""
    with writing(place) as file:
        file.write(content)


@contextlib.contextmanager
def writing(place: str) -> Iterator[BinaryIO]:
    """A new file that appears under its name once it is complete."""
    if is_remote(place):
        system, path = file_system(place)
        with system.transaction, system.open(path, "wb") as file:
            yield file
        return
    with replacing(Path(place)) as file:
        yield file


class Mirror:
    """A folder for those who only write to local ones: the place itself, or what `upload` copies to a bucket."""

    def __init__(self, place: str | os.PathLike):
        self.place = str(place)
        self.temporary = tempfile.TemporaryDirectory() if is_remote(self.place) else None
        self.folder = self.temporary.name if self.temporary else self.place

    def upload(self) -> None:
        if self.temporary:
            system, path = file_system(self.place)
            system.put(f"{self.folder}/", path, recursive=True)


PIECE = 1 << 20  # bytes of a stream that are read at a time
EXPANSION, SMALL = 100, 64 << 20  # a compressed file may grow by this factor, and to so many bytes in any case


class TooLarge(Exception):
    """A compressed stream expands to more than it may."""


class Limited:
    """A stream that refuses to give more than `limit` bytes, before they are in memory: a bomb stays small."""

    def __init__(self, stream: BinaryIO, limit: int):
        self.stream, self.left = stream, limit

    def read(self, size: int = -1) -> bytes:
        wanted = self.left + 1 if size < 0 or size > self.left else size
        content = self.stream.read(wanted)
        self.left -= len(content)
        if self.left < 0:
            raise TooLarge
        return content


class Unreadable(Exception):
    """Why a compressed file cannot be read."""


@contextlib.contextmanager
def opened(place: str) -> Iterator[BinaryIO]:
    """A file to read, expanded where its name ends in .gz."""
    with open_file(place) as file:
        if not place.lower().endswith(".gz"):
            yield file
            return
        try:
            limit = max(SMALL, EXPANSION * size_of(place))
            yield Limited(gzip.GzipFile(fileobj=file), limit)
        except TooLarge as error:
            raise Unreadable("expands without end") from error
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise Unreadable("damaged gzip") from error


def everything(stream: BinaryIO) -> bytes:
    """All of a stream, in pieces: asked for all at once, a decompressor takes the memory of all it might give."""
    content = io.BytesIO()
    while piece := stream.read(PIECE):
        content.write(piece)
    return content.getvalue()
