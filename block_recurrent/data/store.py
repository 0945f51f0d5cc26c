"""A prepared corpus: shards of tokens, an index of documents, and a manifest of what it is; on disk or in a bucket.

Documents never cross shards. Local shards are memory-mapped; those of a bucket are read in large blocks that are
fetched ahead of the rows that need them. A mixture is a store that names others and their rates.

A position of a document is a token or, where the vocabulary says so, a record: a few bytes, such as a frame of music.
Documents that are to be classified have a label each.
"""

import bisect
import functools
import hashlib
import io
import itertools
import json
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from block_recurrent.data import files
from block_recurrent.data.documents import SPLITS
from block_recurrent.data.registry import TASKS, Task, default_folder
from block_recurrent.data.vocabulary import Vocabulary, record_of, saved_vocabulary
from block_recurrent.errors import UserError

FORMAT = 2
MANIFEST = "manifest.json"
REMOTE_BLOCK = 4 << 20  # bytes that one request to a bucket asks for
REMOTE_BLOCKS = 64  # of them that are kept, for each shard
TOKEN_TYPES = ("<u2", "<u4")
RECORD_TYPE = "|u1"  # of each number of a record
COUNTS = ("documents", "tokens", "predictions", "words", "unknown")  # of a split, in the manifest
DAMAGE = (  # what reading a store that is not as `prepare` left it may raise
    *(OSError, EOFError, ValueError, TypeError, LookupError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)


class Shards:
    """The tokens of a split as one long array, of which `tokens[begin:end]` reads what it says.

    [total], or [total record] where positions are records.
    """

    def __init__(self, places: Sequence[str], lengths: Sequence[int], dtype: str, record: int | None = None):
        self.places, self.dtype = places, np.dtype(dtype)
        self.bounds = [0, *itertools.accumulate(lengths)]
        self.shape = (self.bounds[-1], record) if record else (self.bounds[-1],)
        self.width = record or 1  # numbers of a position
        self.opened = functools.lru_cache(maxsize=None)(self._open)

    def __len__(self) -> int:
        return self.bounds[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        begin, end, _ = part.indices(self.bounds[-1])
        shard = bisect.bisect_right(self.bounds, begin) - 1
        if begin < end <= self.bounds[shard + 1]:  # as documents do not cross shards, this is the rule
            return self._read(shard, begin - self.bounds[shard], end - self.bounds[shard])
        pieces = [np.zeros((0, *self.shape[1:]), self.dtype)]
        while begin < end:
            start, stop = self.bounds[shard], min(self.bounds[shard + 1], end)
            pieces.append(self._read(shard, begin - start, stop - start))
            begin, shard = max(stop, begin), shard + 1
        return np.concatenate(pieces)

    def _read(self, shard: int, begin: int, end: int) -> np.ndarray:
        content = self.opened(shard)
        if isinstance(content, np.ndarray):
            return content[begin:end]
        size = self.width * self.dtype.itemsize
        content.seek(begin * size)
        return np.frombuffer(content.read((end - begin) * size), self.dtype).reshape(-1, *self.shape[1:])

    def _open(self, shard: int):
        place, expected = self.places[shard], (self.bounds[shard + 1] - self.bounds[shard]) * self.width
        if not files.is_remote(place):
            tokens = np.memmap(place, self.dtype, mode="r") if expected else np.zeros(0, self.dtype)
            if len(tokens) != expected:
                raise ValueError(f"{Path(place).name} has {len(tokens)} tokens instead of {expected}")
            return np.asarray(tokens).reshape(
                -1, *self.shape[1:]
            )  # a plain view: slices of a memmap are much slower to make
        system, path = files.file_system(place)
        if system.size(path) != expected * self.dtype.itemsize:
            raise ValueError(f"{place} has {system.size(path)} bytes instead of {expected * self.dtype.itemsize}")
        options = {"maxblocks": REMOTE_BLOCKS}
        return system.open(path, "rb", block_size=REMOTE_BLOCK, cache_type="background", cache_options=options)

    def check(self) -> None:
        """Opens every shard, so that a damaged one is found now and not in the middle of a run."""
        for shard in range(len(self.places)):
            self.opened(shard)


@dataclass(frozen=True)
class Split:
    """Documents one after another: document i is tokens[offsets[i]:offsets[i + 1]]."""

    tokens: np.ndarray | Shards  # [total], or [total record]
    offsets: np.ndarray  # [documents + 1] int64
    bytes: np.ndarray  # [documents] bytes of UTF-8 text after the first token, which nothing predicts
    words: np.ndarray  # [documents] whitespace-separated words
    contiguous: bool = False  # one running text rather than documents
    labels: np.ndarray | None = None  # [documents] int64, where they are to be classified
    ids: int | None = None  # how many token ids the vocabulary has, where positions are tokens

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def parts(self) -> tuple[tuple["Split", float], ...]:
        return ((self, 1.0),)


@dataclass(frozen=True)
class Mixture:
    """Splits that are read side by side, each at its rate of the tokens."""

    parts: tuple[tuple[Split, float], ...]


@dataclass(frozen=True)
class Store:
    """An opened store: `store.split("train")`."""

    folder: str
    manifest: dict

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        return saved_vocabulary(self.manifest["vocabulary"], self.folder)

    @property
    def vocabulary_size(self) -> int:
        return self.manifest["vocabulary"]["size"]

    @functools.cached_property
    def members(self) -> tuple[tuple["Store", float], ...]:
        """The stores of a mixture and their rates."""
        folders = [(files.beside(self.folder, str(member["store"])), member) for member in self.manifest["mixture"]]
        members = tuple((open_store(folder), float(member["rate"])) for folder, member in folders)
        for (store, _), (_, member) in zip(members, folders, strict=True):
            if "mixture" in store.manifest:
                raise UserError(f"{store.folder}, of which {self.folder} is made, is a mixture itself")
            if form(store.manifest) != form(self.manifest):
                raise UserError(f"{store.folder}, of which {self.folder} is made, has other labels or positions")
            if contents(store) != member["splits"]:
                raise UserError(
                    f"{store.folder} has changed since {self.folder} was made of it: make the mixture again"
                )
        return members

    def fingerprint(self) -> str:
        """What a run depends on, as one short hash: the tokens, their order and their vocabulary."""
        about = [contents(self), self.manifest["vocabulary"], *filter(None, [self.manifest.get("labels")])]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]

    def has(self, name: str) -> bool:
        """Whether there is anything to predict in a split."""
        return self.manifest["splits"][name]["predictions"] > 0

    def split(self, name: str) -> Split | Mixture:
        if name not in self.manifest["splits"]:
            raise UserError(f"{self.folder} has no split {name!r}: it has {', '.join(self.manifest['splits'])}")
        if not self.has(name):
            raise UserError(f"split {name!r} of {self.folder} is empty: prepare it from more documents")
        if "mixture" in self.manifest:
            return Mixture(tuple((store.split(name), rate) for store, rate in self.members if store.has(name)))
        try:
            return self._read(name)
        except DAMAGE as error:
            raise UserError(f"{self.folder} is damaged ({error}): prepare it again with --overwrite") from error

    def _read(self, name: str) -> Split:
        entry = self.manifest["splits"][name]
        places = [files.join(self.folder, shard) for shard in shard_names(name, len(entry["shards"]))]
        tokens = Shards(places, entry["shards"], self.manifest["dtype"], self.manifest.get("record"))
        tokens.check()
        with np.load(io.BytesIO(files.read_bytes(files.join(self.folder, f"{name}.index.npz")))) as index:
            labels = index["labels"] if "labels" in self.manifest else None
            arrays = (index["offsets"], index["bytes"], index["words"])
            ids = None if tokens.shape[1:] else self.manifest["vocabulary"]["size"]
            split = Split(tokens, *arrays, self.manifest["contiguous"], labels, ids)
        offsets, count = split.offsets, entry["documents"]
        shapes = [array.shape for array in (offsets, split.bytes, split.words)]
        if offsets.dtype != np.int64 or shapes != [(count + 1,), (count,), (count,)]:
            raise ValueError(f"{name} does not match its manifest")
        if offsets[0] != 0 or offsets[-1] != len(tokens) or np.any(offsets[1:] < offsets[:-1]):
            raise ValueError(f"the documents of {name} do not follow one another")
        if labels is not None:
            if labels.dtype != np.int64 or labels.shape != (count,):
                raise ValueError(f"the labels of {name} do not match its manifest")
            if np.any(labels < 0) or np.any(labels >= len(self.manifest["labels"])):
                raise ValueError(f"{name} has labels of no class")
        return split

    def names(self, name: str) -> Iterator[str]:
        """The names of a split's documents."""
        with files.open_file(files.join(self.folder, f"{name}.names.jsonl")) as lines:
            for line in lines:
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise UserError(f"{self.folder} is damaged ({name}.names.jsonl: {error})") from error

    def document_names(self, name: str) -> list[str]:
        """The names of a split's documents, those of a mixture one store after another."""
        if "mixture" in self.manifest:
            return [each for store, _ in self.members if store.has(name) for each in store.document_names(name)]
        return list(self.names(name))


def form(manifest: dict) -> tuple:
    """What the stores of a mixture must agree in beside their vocabulary: classes, and numbers of a position."""
    return manifest.get("labels"), manifest.get("record")


def contents(store: Store) -> dict[str, str]:
    """A hash of each split's tokens, and of its labels where it has any."""
    return {name: entry["sha256"] for name, entry in store.manifest["splits"].items()}


def shard_names(split: str, count: int) -> list[str]:
    return [f"{split}-{i:05d}-of-{count:05d}.tokens" for i in range(count)]


def is_store(folder: str | Path) -> bool:
    return files.is_file(files.join(str(folder), MANIFEST))


def task_store(name: str, within: str = "data") -> str:
    """Where a task's store is opened: the folder that it makes, else `data/NAME`, which earlier versions made."""
    made = default_folder(name, within)
    return made if is_store(made) else f"{within}/{name}"


def task_of(folder: str) -> Task | None:
    """The task whose store is meant by `data/TASK`, as configs name it."""
    within, _, name = folder.removeprefix("./").rstrip("/").rpartition("/")
    return TASKS.get(name) if within == "data" else None


def place_of(folder: str) -> str:
    """The folder itself, but for `data/TASK` that of the store which the task has made."""
    named = task_of(folder)
    return task_store(named.name) if named else folder


def open_store(folder: str | Path) -> Store:
    """Opens what `prepare` wrote; `data/TASK` is the store that the task has made."""
    return store_in(place_of(str(folder)))


def store_in(folder: str) -> Store:
    """Opens the store in this very folder."""
    if not is_store(folder):
        raise UserError(
            f"no prepared data in {folder}: make it with python -m block_recurrent.prepare {how_to_make(folder)}"
        )
    try:
        manifest = json.loads(files.read_bytes(files.join(folder, MANIFEST)))
        if manifest["format"] != FORMAT:
            raise UserError(
                f"{folder} has store format {manifest['format']}, this version reads {FORMAT}: "
                "prepare it again with --overwrite"
            )
        check(manifest)
    except DAMAGE as error:
        raise UserError(f"{folder}/{MANIFEST} cannot be read ({error}): prepare it again with --overwrite") from error
    return Store(folder, manifest)


def how_to_make(folder: str) -> str:
    """The options of `prepare` that make a store there."""
    task = task_of(folder)
    return f"--task={task.name}" if task else f"--task=text_files --input=YOUR_TEXTS --output={folder}"


def check(manifest: dict) -> None:
    """Raises over what `prepare` never writes, above all tokens of a type that is no number.

    Stores are handed around: numpy would take a stranger's bytes for the addresses of objects.
    """
    mixture, vocabulary = manifest.get("mixture"), manifest["vocabulary"]
    for name, entry in dict(manifest["splits"]).items():
        shards = entry["shards"] if mixture is None else []
        if name not in SPLITS or not all(map(is_count, [*(entry[key] for key in COUNTS), *shards])):
            raise ValueError(f"the split {name!r} is none that prepare makes")
    if not is_count(vocabulary["size"]) or not isinstance(vocabulary["kind"], str):
        raise ValueError("no vocabulary")
    labels, record = form(manifest)
    if "labels" in manifest:
        counts = [entry["labels"] for entry in manifest["splits"].values()]
        if not are_labels(labels) or not all(len(each) == len(labels) and all(map(is_count, each)) for each in counts):
            raise ValueError("labels that are no names of classes, or no counts of them")
    if record != record_of(vocabulary["kind"]) or isinstance(record, float):
        raise ValueError(f"{record!r} numbers in a position of {vocabulary['kind']}")
    if mixture is None:
        types = TOKEN_TYPES if record is None else (RECORD_TYPE,)
        if manifest["dtype"] not in types or not isinstance(manifest["contiguous"], bool):
            raise ValueError(f"tokens of type {manifest['dtype']!r}")
    elif not mixture or not all(0 < float(part["rate"]) < math.inf and str(part["store"]) for part in mixture):
        raise ValueError("a mixture of nothing")


def is_count(number: object) -> bool:
    return type(number) is int and number >= 0


def are_labels(labels: object) -> bool:
    """Whether these are different names, at least one, that can be printed."""
    named = isinstance(labels, list) and all(
        isinstance(label, str) and label and label.isprintable() for label in labels
    )
    return named and 0 < len(labels) == len(set(labels))


def predictions_of(lengths: np.ndarray, labelled: bool) -> int:
    """How many targets documents have: a label each, or every position but the first."""
    return int(np.sum(lengths > 0)) if labelled else int(np.sum(np.maximum(lengths - 1, 0)))


def token_type(vocabulary: Vocabulary) -> np.dtype:
    if vocabulary.record:
        return np.dtype(RECORD_TYPE)
    return np.dtype(TOKEN_TYPES[vocabulary.size > 1 << 16])


LONGEST_WORD = 1 << 12
WHITESPACE = np.isin(np.arange(256), list(b" \t\n\r\x0b\f"))


def count_words(text: bytes, stretch: int = 1 << 20) -> int:
    """len(text.split()) in flat memory: words are counted where they begin."""
    content, before, count = np.frombuffer(text, np.uint8), True, 0
    for at in range(0, len(content), stretch):
        blank = WHITESPACE[content[at : at + stretch]]
        count += int(np.count_nonzero(~blank[1:] & blank[:-1])) + int(before and not blank[0])
        before = bool(blank[-1])
    return count


def bytes_after_first(text: bytes, tokens: np.ndarray, vocabulary: Vocabulary) -> int:
    """Bytes of a text that are predicted: all but those of its first token."""
    first = vocabulary.token_bytes(int(tokens[0])) if len(tokens) else b""
    if not text.startswith(first):  # SentencePiece puts a space before the first word
        first = first.lstrip(b" ")
    if not text.startswith(first):  # a word that is not in the vocabulary, or a mark that is not in the text
        first = b"" if tokens[0] == vocabulary.separator else text[:LONGEST_WORD].split(maxsplit=1)[0]
    return len(text) - len(first)


def measured(text: bytes, tokens: np.ndarray, vocabulary: Vocabulary) -> tuple[int, int]:
    """Bytes that are predicted and words; where there is no text, a position stands for a byte."""
    if vocabulary.is_text:
        return bytes_after_first(text, tokens, vocabulary), count_words(text)
    return max(len(tokens) - 1, 0), 0


def split_in_memory(texts: Iterable[bytes], vocabulary: Vocabulary) -> Split:
    """A split of texts at hand, without a store."""
    if not vocabulary.is_text:
        raise UserError(f"{vocabulary.kind} are not text")
    tokens, counts = [np.zeros(0, np.int32)], []
    for text in texts:
        tokens.append(vocabulary.encode(text))
        counts.append((len(tokens[-1]), bytes_after_first(text, tokens[-1], vocabulary), count_words(text)))
    lengths, sizes, words = np.asarray(counts, np.int64).reshape(-1, 3).T
    return Split(np.concatenate(tokens), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), sizes, words)
