"""What sources share, and the one that every machine has: the Python standard library."""

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from block_recurrent.data import files
from block_recurrent.data.documents import Document, Dropped, Unit
from block_recurrent.errors import UserError

UNIT_BYTES = 32 << 20  # large enough to be worth a worker's while, small enough to lose little when killed
UNIT_FILES = 500


def units_of(found: Iterable[files.File], split: str | None = None, salt: str = "") -> Iterator[Unit]:
    """Files in order, gathered into units of about one size; `salt` stamps what else their documents depend on."""
    group, size = [], 0
    for file in found:
        if group and (size + file.size > UNIT_BYTES or len(group) == UNIT_FILES):
            yield unit_of(group, split, salt)
            group, size = [], 0
        group.append(file)
        size += file.size
    if group:
        yield unit_of(group, split, salt)


def unit_of(group: list[files.File], split: str | None, salt: str) -> Unit:
    stamp = "\n".join([salt, *(f"{file.relative} {file.stamp}" for file in group)])
    return Unit(tuple(file.path for file in group), stamp, split)


def with_links(units: list[Unit], folder: str) -> list[Unit]:
    """Units whose first one tells of the symbolic links that the folder's listing left out."""
    return leaving_out(units, [("symbolic link", name) for name in files.links(folder)])


def leaving_out(units: list[Unit], left_out: Iterable[tuple[str, str]]) -> list[Unit]:
    """Units whose first one tells of what a listing left out, and why."""
    return [replace(units[0], dropped=tuple(left_out)), *units[1:]]


def flaw(content: bytes) -> str | None:
    """Why some bytes are no text; None where they are."""
    if not content.strip():
        return "empty"
    if b"\0" in content:
        return "NUL bytes"
    try:
        content.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    return None


@dataclass(frozen=True)
class PythonStdlib:
    """The standard library of this interpreter: one document per top-level package or module, as one per repository."""

    name = "python_stdlib"
    contiguous = False

    def units(self) -> list[Unit]:
        library = Path(sysconfig.get_paths()["stdlib"])
        found = [
            files.File(name, name, sum(sizes), repr(sizes))  # not the time: that of the same version installed anew
            for name in sorted(sys.stdlib_module_names)
            if (sizes := [file.stat().st_size for file in module_files(library, name)])
        ]
        if not found:
            raise UserError(
                f"no Python sources in {library}: this interpreter ships none; use --task=text_files --input=..."
            )
        return list(units_of(found))

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        library = Path(sysconfig.get_paths()["stdlib"])
        for name in unit.places:
            contents = [file.read_bytes() for file in module_files(library, name)]
            # A few of the library's own test files are in other encodings on purpose.
            text = b"".join(content for content in contents if is_utf8(content))
            if text:
                yield Document(name, text)


def module_files(library: Path, name: str) -> list[Path]:
    if (library / name).is_dir():
        return sorted((library / name).rglob("*.py"))
    return [file for file in [library / f"{name}.py"] if file.is_file()]


def is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def listed(input: str) -> tuple[str, list[files.File], list[tuple[str, str]]]:
    """The place of some texts, their files, and the links that do not lead to a file as (reason, name)."""
    place = input if files.is_remote(input) else os.path.expanduser(input)
    if not files.is_folder(place):
        found, links = files.matching(place), []
    else:
        found, links = files.listing(place, links=True), files.links(place)
    if not found:
        raise UserError(f"no texts in {input}: give a folder, a file or a quoted glob of files that are not empty")
    return place, found, [("symbolic link", name) for name in links if not files.is_file(files.join(place, name))]


def texts_in(place: str) -> dict[str, bytes]:
    """The texts of a folder, glob or file, by their places; one that is not UTF-8 is refused by name."""
    _, found, _ = listed(place)
    return {file.path: read_utf8(file.path) for file in found}


def read_utf8(place: str | Path) -> bytes:
    """A file's text, refused with the place of the first byte that is not UTF-8."""
    try:
        with files.opened(str(place)) as stream:
            content = files.everything(stream)
        content.decode()
    except files.Unreadable as error:
        raise UserError(f"{place} cannot be read ({error}): fetch it again or leave it out") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}; "
            f"convert it (iconv -f latin1 -t utf8) or leave it out"
        ) from error
    return content
