"""Where documents come from: plain Python iterators of named texts, split by document, never by position."""

import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from block_recurrent.errors import UserError

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Document:
    """One document: its name, and the files whose contents, in order, are its text."""

    name: str
    files: tuple[Path, ...]

    def text(self) -> bytes:
        return b"".join(read_utf8(file) for file in self.files)


@dataclass(frozen=True)
class Source:
    """A corpus: the documents of each split."""

    name: str
    splits: dict[str, tuple[Document, ...]] = field(repr=False)

    def fingerprint(self) -> str:
        """Changes when a file is added, removed, renamed or rewritten."""
        digest = hashlib.sha256(self.name.encode())
        for split, documents in self.splits.items():
            for document in documents:
                digest.update(f"\n{split} {document.name}".encode())
                for file in document.files:
                    status = file.stat()
                    digest.update(f"\n{file.name} {status.st_size} {status.st_mtime_ns}".encode())
        return digest.hexdigest()


def read_utf8(file: Path) -> bytes:
    """A file's bytes, refused with the place of the first one that is not UTF-8."""
    try:
        content = file.read_bytes()
        content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}; "
            f"convert it (iconv -f latin1 -t utf8) or leave it out"
        ) from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    return content


def python_stdlib() -> Source:
    """The standard library of this interpreter: one document per top-level package or module, as one per repository."""
    library = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for name in sorted(sys.stdlib_module_names):
        if (library / name).is_dir():
            files = sorted(file for file in (library / name).rglob("*.py") if is_utf8(file))
        else:
            files = [file for file in [library / f"{name}.py"] if file.is_file()]
        if files:
            documents.append(Document(name, tuple(files)))
    if not documents:
        raise UserError(
            f"no Python sources in {library}: this interpreter ships none; use --task=text_files --files=..."
        )
    return Source("python_stdlib", split_by_document(documents, "python_stdlib:"))


def is_utf8(file: Path) -> bool:
    """A few of the library's own test files are in other encodings on purpose."""
    try:
        file.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def text_files(files: str) -> Source:
    """A folder (all files below it), a glob or a single file; one document per file.

    A folder with subfolders train, validation and test brings its own splits.
    """
    place = Path(files).expanduser()
    if place.is_dir():
        own_splits = {split: place / split for split in SPLITS if (place / split).is_dir()}
        if "train" in own_splits:
            return Source(
                "text_files",
                {split: tuple(documents_below(own_splits[split])) if split in own_splits else () for split in SPLITS},
            )
        documents = list(documents_below(place))
    elif place.is_file():
        documents = [Document(place.name, (place,))]
    else:
        documents = sorted(glob_documents(place), key=lambda document: document.name)
    if not documents:
        raise UserError(f"no files in {files}: give a folder, a file or a quoted glob of text files")
    return Source("text_files", split_by_document(documents, "text_files:"))


def documents_below(folder: Path) -> Iterator[Document]:
    for file in sorted(folder.rglob("*")):
        relative = file.relative_to(folder)
        if file.is_file() and not any(part.startswith(".") for part in relative.parts):
            yield Document(str(relative), (file,))


def glob_documents(pattern: Path) -> Iterator[Document]:
    anchor = Path(pattern.anchor) if pattern.is_absolute() else Path()
    parts = pattern.parts[1:] if pattern.is_absolute() else pattern.parts
    if not parts:
        return
    for file in anchor.glob(str(Path(*parts))):
        if file.is_file():
            yield Document(str(file), (file,))


def split_by_document(documents: Sequence[Document], salt: str, share: float = 0.05) -> dict[str, tuple[Document, ...]]:
    """Validation and test get `share` of the documents each, by hash, and at least one where there are three."""
    ranked = sorted(documents, key=lambda document: hashlib.sha256((salt + document.name).encode()).digest())
    held_out = max(round(share * len(ranked)), 1)
    sizes = (min(held_out, max(len(ranked) - 1, 0)), min(held_out, max(len(ranked) - 2, 0)))
    validation, test, train = ranked[: sizes[0]], ranked[sizes[0] : sum(sizes)], ranked[sum(sizes) :]
    parts = {"train": train, "validation": validation, "test": test}
    return {split: tuple(sorted(part, key=lambda document: document.name)) for split, part in parts.items()}
