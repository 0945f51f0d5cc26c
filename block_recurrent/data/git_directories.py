"""Files of a git directory's HEAD, read without running git: a repository's own settings can name programs to run.

Only objects and references are opened, never the settings. An object's size is known before it is unpacked, from the
header of the loose object or of its place in a pack, so that a bomb stays packed.
"""

import contextlib
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from block_recurrent.data.files import TooLarge
from block_recurrent.data.source_files import Unusable

ALTERNATES = "repository: borrows objects from outside"
NO_COMMIT = "repository: no commit"
DAMAGED = "repository: damaged git directory"
LARGEST_OBJECT = 64 * 2**20  # bytes of a commit, a tree or what a delta is based on
MOST_ENTRIES = 2_000_000  # a few objects, each naming the next many times over, make a tree without end
DEEPEST_DELTA = 10_000
OFFSET_DELTA, NAME_DELTA = 6, 7  # kinds of objects in a pack


def is_git_directory(folder: Path) -> bool:
    return (folder / "HEAD").is_file() and (folder / "objects").is_dir() and (folder / "refs").is_dir()


def borrows(folder: Path) -> bool:
    """Whether objects of other git directories, anywhere on this machine, are to be taken for its own."""
    files = (folder / "objects/info/alternates", folder / "objects/info/http-alternates")
    lines = [line for file in files if file.is_file() for line in file.read_bytes().splitlines()]
    return any(line.strip() and not line.startswith(b"#") for line in lines)


class GitTree:
    """The files of HEAD: `entries` names them, `size` and `content` look at one. Links in it would be followed."""

    def __init__(self, folder: Path):
        from dulwich.object_format import DEFAULT_OBJECT_FORMAT
        from dulwich.object_store import DiskObjectStore
        from dulwich.pack import load_pack_index
        from dulwich.refs import DiskRefsContainer

        if borrows(folder):
            raise Unusable(ALTERNATES)
        self.store = DiskObjectStore(str(folder / "objects"), loose_object_size_limit=LARGEST_OBJECT)
        self.refs = DiskRefsContainer(str(folder))
        indices = sorted((folder / "objects/pack").glob("*.idx"))
        self.packs = [(load_pack_index(str(index), DEFAULT_OBJECT_FORMAT), index) for index in indices]

    def close(self) -> None:
        for opened in (self.store, *(index for index, _ in self.packs)):
            with contextlib.suppress(Exception):  # a damaged pack cannot even be closed
                opened.close()

    def root(self) -> bytes:
        """The name of HEAD's tree."""
        try:
            name = self.refs[b"HEAD"]
        except (KeyError, ValueError):
            raise Unusable(NO_COMMIT) from None
        found = self.object(name)
        while found.type_name == b"tag":
            found = self.object(found.object[1])
        return found.tree

    def entries(self) -> Iterator[tuple[str, int, bytes]]:
        """(path, mode, object's name) of all but folders."""
        folders, count = [(b"", self.root())], 0
        while folders:
            parent, name = folders.pop()
            for entry in self.object(name).items():
                count += 1
                if count > MOST_ENTRIES:
                    raise TooLarge
                path = parent + entry.path
                if stat.S_ISDIR(entry.mode):
                    folders.append((path + b"/", entry.sha))
                else:
                    yield path.decode(errors="surrogateescape"), entry.mode, entry.sha

    def object(self, name: bytes):
        if self.size(name) > LARGEST_OBJECT:
            raise Unusable(DAMAGED)
        return self.store[name]

    def content(self, name: bytes) -> bytes:
        return self.object(name).as_raw_string()

    def size(self, name: bytes) -> int:
        """An object's length, unpacking no more than its first bytes."""
        loose = Path(self.store.path, name[:2].decode(), name[2:].decode())
        if loose.is_file():
            with loose.open("rb") as file:
                start = zlib.decompressobj().decompress(file.read(4096), 64)
            return int(start.split(b"\0")[0].split(b" ")[1])
        for index, path in self.packs:
            try:
                offset = index.object_offset(name)
            except KeyError:
                continue
            with path.with_suffix(".pack").open("rb") as file:
                return packed_size(file, offset, index.object_offset)
        raise KeyError(name)


def packed_size(file: BinaryIO, offset: int, offset_of: Callable[[bytes], int]) -> int:
    """The length of an object in a pack; refused where what its deltas are based on is too large to unpack."""
    length = None
    for _ in range(DEEPEST_DELTA):
        file.seek(offset)
        start = file.read(4096)
        kind, size, at = object_header(start)
        if size > LARGEST_OBJECT:
            return size
        if kind == OFFSET_DELTA:
            back, at = delta_offset(start, at)
            base = offset - back
        elif kind == NAME_DELTA:
            base, at = offset_of(start[at : at + 20]), at + 20
        else:
            return size if length is None else length
        delta = zlib.decompressobj().decompress(start[at:], 64)
        _, at = varint(delta, 0)
        result, _ = varint(delta, at)
        if result > LARGEST_OBJECT:
            return result
        length = result if length is None else length
        offset = base
    raise Unusable(DAMAGED)


def object_header(start: bytes) -> tuple[int, int, int]:
    """(kind, size as stored, where what follows begins) of an object in a pack."""
    first, rest, at = start[0], 0, 1
    if first & 0x80:
        rest, at = varint(start, 1)
    return (first >> 4) & 7, (first & 15) | (rest << 4), at


def varint(content: bytes, at: int) -> tuple[int, int]:
    """A number, seven bits a byte with the lowest first, and where it ends."""
    value = shift = 0
    while content[at] & 0x80:
        value |= (content[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return value | (content[at] << shift), at + 1


def delta_offset(content: bytes, at: int) -> tuple[int, int]:
    """How far before a delta its base begins: seven bits a byte with the highest first, each but the last plus one."""
    value = content[at] & 0x7F
    while content[at] & 0x80:
        at += 1
        value = ((value + 1) << 7) | (content[at] & 0x7F)
    return value, at + 1
