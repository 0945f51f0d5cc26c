"""Repositories as they lie in a folder: working trees, git directories and archives, and the files in them.

All of it is untrusted: nothing is run, unpacked to disk or followed out of the repository, and nothing is held in
memory but the file at hand.
"""

import bz2
import functools
import gzip
import hashlib
import lzma
import os
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from block_recurrent.data import git_directories, source_files
from block_recurrent.data.files import Limited, TooLarge, is_file, is_folder, is_remote, listing, open_file, stamp_of
from block_recurrent.data.source_files import Refused, Unusable
from block_recurrent.errors import UserError

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".zip")
LARGEST_REPOSITORY = 2 * 2**30  # bytes that an archive may expand to, and of source code in any repository
LARGEST_HEADER = 2**20  # bytes of a long name in a tar archive

DAMAGED_ARCHIVE = "repository: damaged or unusual archive"
TOO_LARGE = "repository: too large"
LINKED = "repository: symbolic link"
LINK_IN_GIT = "repository: symbolic link in its git directory"


@dataclass(frozen=True)
class Repository:
    """A repository in a listing."""

    path: str  # of the folder or archive
    relative: str  # "name" or "owner/name", as written in the folder
    size: int
    stamp: str


@dataclass(frozen=True)
class Member:
    """A file of a repository, whose content is read, if at all, before the next one is asked for."""

    path: str
    size: int
    read: Callable[[], bytes]
    refused: str | None = None  # why it is none that can be read


def unreadable(path: str, reason: str) -> Member:
    return Member(path, 0, bytes, reason)


def is_archive(name: str) -> bool:
    return name.lower().endswith(ARCHIVES)


def is_wrapped(place: str) -> bool:
    """Whether the files of a repository may all be in one folder named after it."""
    return is_remote(place) or not Path(place).is_dir()


def plain_name(relative: str) -> str:
    """A repository's name without how it is stored."""
    suffixes = sorted((*ARCHIVES, ".git"), key=len, reverse=True)
    suffix = next((suffix for suffix in suffixes if relative.lower().endswith(suffix)), "")
    return relative[: len(relative) - len(suffix)]


def find_repositories(folder: str) -> list[Repository]:
    """The repositories directly in a folder and in its owner folders, sorted by name."""
    if is_archive(folder) and is_file(folder):
        return [Repository(folder, folder.rpartition("/")[2], 0, stamp_of(folder))]
    if not is_folder(folder):
        raise UserError(f"{folder} is no folder of repositories: it does not exist or is something else")
    if is_remote(folder):
        found = [file for file in listing(folder) if is_archive(file.relative) and file.relative.count("/") < 2]
        return [Repository(file.path, file.relative, file.size, file.stamp) for file in found]
    return sorted(local_repositories(Path(folder)), key=lambda repository: repository.relative)


def local_repositories(root: Path) -> Iterator[Repository]:
    if git_directories.is_git_directory(root) or (root / ".git").exists():
        raise UserError(f"{root} is itself a repository: give the folder that it is in")
    for child in visible(root):
        owned = visible(child) if is_owner(child) else [child]
        for path in owned:
            if is_archive(path.name) or path.is_dir():
                size, stamp = size_and_stamp(path)
                yield Repository(str(path), path.relative_to(root).as_posix(), size, stamp)


def visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def is_owner(folder: Path) -> bool:
    """A folder of nothing but folders and archives holds an owner's repositories; a repository has files of its own."""
    if folder.is_symlink() or not folder.is_dir() or git_directories.is_git_directory(folder):
        return False
    children = [path for path in folder.iterdir() if path.name != ".DS_Store"]
    return bool(children) and all(path.name != ".git" and (path.is_dir() or is_archive(path.name)) for path in children)


def size_and_stamp(path: Path) -> tuple[int, str]:
    """Of an archive, or of all that is in a folder; of a working tree, without its history."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return status.st_size, f"{status.st_size} {status.st_mtime_ns}"
    digest, total, only_history = hashlib.sha256(), 0, is_unchecked(path)
    for _, folders, others in walk(path):
        if folders is not None:
            folders[:] = [folder for folder in folders if folder.name != ".git" or only_history]
        for entry in others:
            status = entry.stat(follow_symlinks=False)
            digest.update(os.fsencode(f"{os.path.relpath(entry.path, path)}\0{status.st_size}\0{status.st_mtime_ns}\0"))
            total += status.st_size
    return total, digest.hexdigest()


def walk(root: Path) -> Iterator[tuple[str, list[os.DirEntry] | None, list[os.DirEntry]]]:
    """As os.walk, sorted, links among the files; and without recursion, which a deep folder would break."""
    waiting = [str(root)]
    while waiting:
        parent = waiting.pop()
        try:
            entries = sorted(os.scandir(parent), key=lambda entry: entry.name)
        except OSError:
            yield parent, None, []
            continue
        folders = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        yield parent, folders, [entry for entry in entries if not entry.is_dir(follow_symlinks=False)]
        waiting += [entry.path for entry in reversed(folders)]


def is_unchecked(folder: Path) -> bool:
    """A clone without a checkout."""
    return os.listdir(folder) == [".git"] and git_directories.is_git_directory(folder / ".git")


def members(place: str) -> Iterator[Member]:
    """The files of a repository; raises Unusable where it cannot be read as a whole, TooLarge where it has no end."""
    path = Path(place)
    if is_remote(place):
        yield from archive_members(place)
    elif path.is_symlink():
        raise Unusable(LINKED)
    elif not path.is_dir():
        yield from archive_members(place)
    elif git_directories.is_git_directory(path):
        yield from git_members(path)
    elif is_unchecked(path):
        yield from git_members(path / ".git")
    else:
        yield from tree_members(path)


def tree_members(root: Path) -> Iterator[Member]:
    for parent, folders, others in walk(root):
        if folders is None:
            yield unreadable(os.path.relpath(parent, root), source_files.UNREADABLE)
            continue
        # A folder with a .git of its own is a submodule's.
        folders[:] = [
            entry for entry in folders if entry.name != ".git" and not os.path.lexists(os.path.join(entry.path, ".git"))
        ]
        for entry in others:
            if entry.name != ".git":
                yield tree_member(root, entry)


def tree_member(root: Path, entry: os.DirEntry) -> Member:
    relative = os.path.relpath(entry.path, root)
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return unreadable(relative, source_files.UNREADABLE)
    if stat.S_ISLNK(status.st_mode):
        return unreadable(relative, source_files.LINK)
    if not stat.S_ISREG(status.st_mode):
        return unreadable(relative, source_files.IRREGULAR)
    return Member(relative, status.st_size, functools.partial(file_content, entry.path, status.st_size))


def file_content(path: str, size: int) -> bytes:
    """What was a file a moment ago may be a link or a pipe now: neither is opened."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read(size)
    except OSError:
        raise Refused(source_files.UNREADABLE) from None


@contextmanager
def guarded(reason: str) -> Iterator[None]:
    """Whatever a parser raises over untrusted bytes means one thing: they are not what they say they are."""
    try:
        yield
    except (Unusable, TooLarge, UserError):
        raise
    except Exception as error:
        raise Unusable(reason) from error


def read_guarded(reason: str, read: Callable[..., bytes], *arguments) -> Callable[[], bytes]:
    return guarded(reason)(functools.partial(read, *arguments))


def git_members(folder: Path) -> Iterator[Member]:
    if any(entry.is_symlink() for _, _, others in walk(folder) for entry in others):
        raise Unusable(LINK_IN_GIT)
    with guarded(git_directories.DAMAGED):
        tree = git_directories.GitTree(folder)
        try:
            for path, mode, name in tree.entries():
                if stat.S_ISLNK(mode):
                    yield unreadable(path, source_files.LINK)
                elif stat.S_ISREG(mode):  # others are submodules
                    yield Member(path, tree.size(name), read_guarded(git_directories.DAMAGED, tree.content, name))
        finally:
            tree.close()


class Reported:
    """A file whose own failures, of a disk or a network, are told to the person instead of taken for damage."""

    def __init__(self, place: str):
        self.place, self.stream = place, open_file(place)

    def read(self, size: int = -1) -> bytes:
        try:
            return self.stream.read(size)
        except Exception as error:
            raise UserError(f"{self.place} cannot be read: {error}") from error

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.stream.seek(offset, whence)

    def tell(self) -> int:
        return self.stream.tell()

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.stream.close()


def archive_members(place: str) -> Iterator[Member]:
    """By what an archive's first bytes say it is."""
    file = Reported(place)
    try:
        start = file.read(6)
        file.seek(0)
        with guarded(DAMAGED_ARCHIVE):
            if start.startswith(b"PK"):
                yield from zip_members(file)
            else:
                yield from tar_members(Limited(expanded(file, start), LARGEST_REPOSITORY))
    finally:
        file.close()


def expanded(file: Reported, start: bytes) -> BinaryIO:
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file)
    if start.startswith(b"BZh"):
        return bz2.BZ2File(file)
    if start.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMAFile(file)
    return file


class Header(tarfile.TarInfo):
    """A tar header. The library takes a damaged one for the end, and reads headers of any length into memory."""

    @classmethod
    def frombuf(cls, buf, encoding, errors):
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error
        extends = header.type not in tarfile.REGULAR_TYPES and header.size > LARGEST_HEADER
        if header.size < 0 or extends or header.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("a header that no repository has")
        return header

    def _proc_gnusparse_10(self, *_):
        raise tarfile.ReadError("a sparse file, whose map may have any length")


def tar_members(stream: Limited) -> Iterator[Member]:
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=Header) as archive:
        while (header := archive.next()) is not None:
            archive.members.clear()  # it would keep all headers
            if header.issym():
                yield unreadable(header.name, source_files.LINK)
            elif header.isreg():
                yield Member(header.name, header.size, read_guarded(DAMAGED_ARCHIVE, tar_content, archive, header))
            elif not header.isdir():
                yield unreadable(header.name, source_files.IRREGULAR)
    while stream.read(2**16):  # to the end, where a compressed file has its checksum
        pass


def tar_content(archive: tarfile.TarFile, header: tarfile.TarInfo) -> bytes:
    return archive.extractfile(header).read()


def zip_members(file: Reported) -> Iterator[Member]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if stat.S_ISLNK(info.external_attr >> 16):
                yield unreadable(info.filename, source_files.LINK)
            elif not info.is_dir():
                yield Member(info.filename, info.file_size, read_guarded(DAMAGED_ARCHIVE, archive.read, info))
