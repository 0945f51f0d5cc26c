"""The two sources that every machine has: a folder of text files, and the Python standard library."""

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from block_recurrent.data import files
from block_recurrent.data.documents import SPLITS, Document, Dropped, Unit
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
    left_out = tuple(("symbolic link", name) for name in files.links(folder))
    return [replace(units[0], dropped=left_out), *units[1:]]


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
class TextFiles:
    """A folder (all files below it), a glob or a single file, local or in a bucket; one document per file.

    A folder with subfolders train, validation and test brings its own splits.
    """

    input: str
    name = "text_files"
    contiguous = False
    drops_duplicates = False

    def units(self) -> list[Unit]:
        place = self.input if files.is_remote(self.input) else os.path.expanduser(self.input)
        if files.is_folder(place):
            own = [split for split in SPLITS if files.is_folder(files.join(place, split))]
            if "train" in own:
                found = {split: files.listing(files.join(place, split)) for split in own}
                if not found["train"]:
                    raise UserError(f"no files in {files.join(place, 'train')}: put the texts to train on there")
                return with_links([unit for split in own for unit in units_of(found[split], split)], place)
            found = files.listing(place)
        else:
            found = files.matching(place)
        if not found:
            raise UserError(f"no files in {self.input}: give a folder, a file or a quoted glob of text files")
        return with_links(list(units_of(found)), place)

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        for place in unit.places:
            content = files.read_bytes(place)
            reason = flaw(content)
            if reason is None:
                yield Document(files.relative(place, self.input), content, unit.split)
            else:
                dropped.add(reason, files.relative(place, self.input))


@dataclass(frozen=True)
class PythonStdlib:
    """The standard library of this interpreter: one document per top-level package or module, as one per repository."""

    name = "python_stdlib"
    contiguous = False
    drops_duplicates = False

    def units(self) -> list[Unit]:
        library = Path(sysconfig.get_paths()["stdlib"])
        found = [
            files.File(name, name, sum(size for size, _ in stamps), repr(stamps))
            for name in sorted(sys.stdlib_module_names)
            if (stamps := [(file.stat().st_size, file.stat().st_mtime_ns) for file in module_files(library, name)])
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


def texts_in(place: str) -> dict[str, bytes]:
    """The texts of a folder, glob or file, by their places; one that is not UTF-8 is refused by name."""
    return {str(file): read_utf8(file) for unit in TextFiles(place).units() for file in unit.places}


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


def read_utf8(file: str | Path) -> bytes:
    """A file's bytes, refused with the place of the first one that is not UTF-8."""
    content = files.read_bytes(str(file))
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}; "
            f"convert it (iconv -f latin1 -t utf8) or leave it out"
        ) from error
    return content
