"""A prepared corpus on disk: tokens to memory-map, an index of documents, and a manifest of what it is."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from block_recurrent.data.vocabulary import Vocabulary, saved_vocabulary
from block_recurrent.errors import UserError

FORMAT = 1


@dataclass(frozen=True)
class Split:
    """Documents one after another: document i is tokens[offsets[i]:offsets[i + 1]]."""

    tokens: np.ndarray  # [total]
    offsets: np.ndarray  # [documents + 1] int64
    bytes: np.ndarray  # [documents] bytes of UTF-8 text after the first token, which nothing predicts
    words: np.ndarray  # [documents] whitespace-separated words

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Store:
    """An opened store: `store.split("train")`."""

    folder: Path
    manifest: dict

    @property
    def vocabulary(self) -> Vocabulary:
        return saved_vocabulary(self.manifest["vocabulary"]["kind"], self.folder)

    def has(self, name: str) -> bool:
        """Whether there is anything to predict in a split."""
        return self.manifest["splits"][name]["predictions"] > 0

    def split(self, name: str) -> Split:
        if name not in self.manifest["splits"]:
            raise UserError(f"{self.folder} has no split {name!r}: it has {', '.join(self.manifest['splits'])}")
        entry = self.manifest["splits"][name]
        if not self.has(name):
            raise UserError(f"split {name!r} of {self.folder} is empty: prepare it from more documents")
        try:
            tokens = np.memmap(self.folder / f"{name}.tokens", self.manifest["dtype"], mode="r")
            with np.load(self.folder / f"{name}.index.npz", allow_pickle=False) as index:
                split = Split(tokens, index["offsets"], index["bytes"], index["words"])
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{self.folder} is damaged ({error}): prepare it again with --overwrite") from error
        if (
            len(tokens) != entry["tokens"]
            or len(split.offsets) != entry["documents"] + 1
            or split.offsets[-1] != len(tokens)
        ):
            raise UserError(
                f"{self.folder} is damaged: {name} does not match its manifest; prepare it again with --overwrite"
            )
        return split


def open_store(folder: str | Path) -> Store:
    """Opens what `prepare` wrote."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            raise UserError(
                f"{folder} has store format {manifest['format']}, this version reads {FORMAT}: prepare it again"
            )
    except FileNotFoundError:
        raise UserError(
            f"no prepared data in {folder}: make it with python -m block_recurrent.prepare --output={folder}"
        ) from None
    except (ValueError, KeyError, OSError) as error:
        raise UserError(
            f"{folder}/manifest.json cannot be read ({error}): prepare it again with --overwrite"
        ) from error
    return Store(folder, manifest)


class Index:
    """What a split knows of its documents, gathered one by one."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.lengths, self.bytes, self.words = [], [], []

    def add(self, text: bytes, tokens: np.ndarray) -> None:
        first = self.vocabulary.token_bytes(int(tokens[0])) if len(tokens) else b""
        if not text.startswith(first):  # SentencePiece puts a space before the first word
            first = first.lstrip(b" ")
        self.lengths.append(len(tokens))
        self.bytes.append(len(text) - len(first))
        self.words.append(len(text.split()))

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            "offsets": np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]).astype(np.int64),
            "bytes": np.asarray(self.bytes, np.int64),
            "words": np.asarray(self.words, np.int64),
        }


def split_in_memory(texts: Iterable[bytes], vocabulary: Vocabulary) -> Split:
    """A split of texts at hand, without a store."""
    index, tokens = Index(vocabulary), [np.zeros(0, np.int32)]
    for text in texts:
        tokens.append(vocabulary.encode(text.decode()))
        index.add(text, tokens[-1])
    return Split(tokens=np.concatenate(tokens), **index.arrays())


def write_store(
    folder: Path, splits: dict[str, Iterable[tuple[bytes, np.ndarray]]], vocabulary: Vocabulary, about: dict
) -> Store:
    """Writes (text, tokens) of every split under a temporary name, then renames: a killed prepare leaves no store."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.{os.getpid()}.", suffix=".partial", dir=folder.parent))
    partial.chmod(0o755)
    try:
        manifest = write_splits(partial, splits, vocabulary, about)
        if folder.exists():
            folder.rename(partial / "replaced")
        partial.rename(folder)
        shutil.rmtree(folder / "replaced", ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Store(folder, manifest)


def remove_leftovers(folder: Path) -> None:
    """Removes what killed prepares of this store left, by the process in its name; those still running keep theirs."""
    for leftover in folder.parent.glob(f".{folder.name}.*.*.partial"):
        try:
            os.kill(int(leftover.name.removeprefix(f".{folder.name}.").partition(".")[0]), 0)
        except ProcessLookupError:
            shutil.rmtree(leftover, ignore_errors=True)
        except (ValueError, PermissionError):
            continue


def write_splits(partial: Path, splits: dict, vocabulary: Vocabulary, about: dict) -> dict:
    """Writes the files of a store into a folder and returns its manifest, which is written last."""
    dtype = np.dtype("<u2" if vocabulary.size <= 1 << 16 else "<u4")
    manifest = {"format": FORMAT, **about, "dtype": dtype.str, "splits": {}}
    manifest["vocabulary"] = {"kind": vocabulary.kind, "size": vocabulary.size, "sha256": vocabulary.identity}
    for name, documents in splits.items():
        index, digest = Index(vocabulary), hashlib.sha256()
        with open(partial / f"{name}.tokens", "wb") as file:
            for text, tokens in documents:
                content = tokens.astype(dtype).tobytes()
                file.write(content)
                digest.update(len(content).to_bytes(8, "little") + content)
                index.add(text, tokens)
        np.savez(partial / f"{name}.index.npz", **index.arrays())
        manifest["splits"][name] = {
            "documents": len(index.lengths),
            "tokens": sum(index.lengths),
            "predictions": sum(max(length - 1, 0) for length in index.lengths),
            "bytes": sum(index.bytes),
            "words": sum(index.words),
            "sha256": digest.hexdigest(),
        }
    if not manifest["splits"]["train"]["predictions"]:
        raise UserError("the corpus is empty: there is no text in its training documents")
    vocabulary.save(partial)
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=2))
    return manifest
