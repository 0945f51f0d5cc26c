"""Building a store, in three steps that any number of workers can share and that a kill cannot spoil.

1. read:   every unit of the source by itself, its documents tokenised into a file of the work folder
2. settle: with all documents known, which are duplicates and which split each goes to (small, in one process)
3. write:  every shard of the store by itself, copied from the units' files

Each unit and each shard is a file that is complete or absent, so what is there is not done again. What comes out does
not depend on who did what: units and documents keep their order. `pool.py` runs the steps on this machine's processes,
`beam.py` on Apache Beam's.
"""

import hashlib
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from block_recurrent.data import files, settling
from block_recurrent.data.documents import SPLITS, Document, Dropped, Source, Unit, labels_of, total
from block_recurrent.data.same_text import content_hash
from block_recurrent.data.store import (
    FORMAT,
    MANIFEST,
    Store,
    measured,
    predictions_of,
    shard_names,
    store_in,
    token_type,
)
from block_recurrent.data.vocabulary import Vocabulary
from block_recurrent.errors import UserError

PIECES = 3  # the version of what is in a work folder
SHARD_TOKENS = 1 << 28
NAMED_COPIES = 100  # of a text that two splits have, or that is left out as a duplicate
BUCKET_BYTES = 256 << 20  # of scattered fragments that are joined at a time, in memory
NUMBERS = ("lengths", "bytes", "words", "unknown", "split")  # of every document
PLACES = ("input", "metadata")  # fields of sources that say where, not what


@dataclass(frozen=True)
class Recipe:
    """All that decides the bytes of a store, and where they come together."""

    task: str
    source: Source
    units: tuple[Unit, ...]
    vocabulary: Vocabulary
    work: str  # a folder that all workers see
    target: str  # where the store's files are written
    separator: bool = False  # every document ends with the vocabulary's separator
    shard_tokens: int = SHARD_TOKENS

    @property
    def scattered(self) -> bool:
        return hasattr(self.source, "fragments")

    @property
    def labels(self) -> tuple[str, ...]:
        return labels_of(self.source)

    @property
    def numbers(self) -> tuple[str, ...]:
        """What is noted of every document."""
        return (*NUMBERS, "labels") if self.labels else NUMBERS

    @property
    def pieces(self) -> int:
        """How many files of documents step 1 makes: one per unit, or per bucket of scattered documents."""
        return buckets(self.units) if self.scattered else len(self.units)


def fingerprint(task: str, source: Source, units: Sequence[Unit], vocabulary: str, **options: Any) -> str:
    """Changes with any file of the input, the filters or the vocabulary, but not when the input is moved."""
    filters = {field.name: getattr(source, field.name) for field in fields(source) if field.name not in PLACES}
    stamps = [[unit.split, [place.rpartition("/")[2] for place in unit.places], unit.stamp] for unit in units]
    about = [FORMAT, task, filters, stamps, vocabulary, options]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def buckets(units: Sequence[Unit]) -> int:
    """Enough buckets for one to fit in memory; only the input decides."""
    return max(1, sum(unit.size for unit in units) // BUCKET_BYTES)


# Step 0, for scattered documents only: every unit's fragments, sorted by the bucket of their document.


def scatter_unit(recipe: Recipe, number: int) -> None:
    place = files.join(recipe.work, "fragments", f"{number:06d}")
    if files.is_file(f"{place}.json"):
        return
    dropped, found = Dropped(), []
    for name, fragment in recipe.source.fragments(recipe.units[number], dropped):
        found.append((bucket_of(name, recipe.pieces), name.encode(), fragment))
    found.sort(key=lambda item: item[0])  # stable: fragments of one document keep their order
    starts = np.searchsorted([bucket for bucket, _, _ in found], range(recipe.pieces + 1))
    with files.writing(f"{place}.fragments") as file:
        sizes = [file.write(content) for _, *contents in found for content in contents]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    write_arrays(f"{place}.npz", starts=starts, offsets=offsets)
    files.write_bytes(f"{place}.json", json.dumps(dropped.tally()).encode())


def bucket_of(name: str, count: int) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % count


def gathered(recipe: Recipe, bucket: int, dropped: Dropped) -> Iterator[Document]:
    """The documents of a bucket, by name, each joined from its fragments in the order of the units."""
    documents: dict[str, list[bytes]] = {}
    for number in range(len(recipe.units)):
        place = files.join(recipe.work, "fragments", f"{number:06d}")
        index = read_arrays(f"{place}.npz")
        first, last = (2 * int(index["starts"][bucket + side]) for side in (0, 1))
        edges = index["offsets"][first : last + 1]
        if len(edges) < 2:
            continue
        with files.open_file(f"{place}.fragments") as file:
            file.seek(int(edges[0]))
            contents = [file.read(int(size)) for size in np.diff(edges)]
        for name, fragment in zip(contents[::2], contents[1::2], strict=True):
            documents.setdefault(name.decode(), []).append(fragment)
    for name in sorted(documents):
        document = recipe.source.join(name, documents.pop(name), dropped)
        if document is not None:
            yield document


# Step 1: the documents of a unit, tokenised.


def read_unit(recipe: Recipe, number: int) -> int:
    """Tokenises a unit (or a bucket of scattered documents) into the work folder; returns its tokens."""
    place = piece_place(recipe, number)
    if files.is_file(f"{place}.json"):
        return json.loads(files.read_bytes(f"{place}.json"))["tokens"]
    dropped, rows = Dropped(), []
    with files.writing(f"{place}.tokens") as file:
        for document in documents_of(recipe, number, dropped):
            tokens = tokens_of(recipe, document)
            if not len(tokens):
                dropped.add("empty", document.name)
                continue
            file.write(tokens)
            rows.append(index_row(recipe, document, tokens))
    write_arrays(f"{place}.npz", **index_of(rows, recipe.numbers))
    names = "".join(json.dumps(row["name"]) + "\n" for row in rows)
    files.write_bytes(f"{place}.names.jsonl", names.encode())
    total = sum(row["lengths"] for row in rows)
    files.write_bytes(f"{place}.json", json.dumps({**dropped.tally(), "tokens": total}).encode())
    return total


def documents_of(recipe: Recipe, number: int, dropped: Dropped) -> Iterator[Document]:
    if recipe.scattered:
        return gathered(recipe, number, dropped)
    for reason, name in recipe.units[number].dropped:
        dropped.add(reason, name)
    return recipe.source.read(recipe.units[number], dropped)


def piece_place(recipe: Recipe, number: int) -> str:
    return files.join(recipe.work, "units", f"{number:06d}")


def tokens_of(recipe: Recipe, document: Document) -> np.ndarray:
    tokens = recipe.vocabulary.encode(document.text).astype(token_type(recipe.vocabulary))
    return np.append(tokens, tokens.dtype.type(recipe.vocabulary.separator)) if recipe.separator else tokens


def index_row(recipe: Recipe, document: Document, tokens: np.ndarray) -> dict[str, Any]:
    """What step 2 must know of a document, and what the store keeps of it."""
    size, words = measured(document.text, tokens, recipe.vocabulary)
    return {
        "name": document.name,
        "lengths": len(tokens),
        "bytes": size,
        "words": words,
        "unknown": 0 if recipe.vocabulary.unknown is None else int(np.sum(tokens == recipe.vocabulary.unknown)),
        "split": -1 if document.split is None else SPLITS.index(document.split),
        "rank": hashlib.sha256(f"{recipe.source.name}:{document.name}".encode()).digest()[:16],
        "content": content_hash(document.text, recipe.vocabulary.is_text),
        "lines": document.lines,
        **({"labels": label_of(recipe, document)} if recipe.labels else {}),
    }


def label_of(recipe: Recipe, document: Document) -> int:
    if document.label not in range(len(recipe.labels)):
        raise UserError(f"{document.name} has the label {document.label!r}, which is of no class of {recipe.task}")
    return document.label


def index_of(rows: list[dict[str, Any]], keys: Sequence[str]) -> dict[str, np.ndarray]:
    lines = [np.asarray(row["lines"], np.uint64) for row in rows]
    numbers = {key: np.asarray([row[key] for row in rows], np.int64) for key in keys}
    digests = {
        key: np.frombuffer(b"".join(row[key] for row in rows), ">u8").reshape(-1, 2) for key in ("rank", "content")
    }
    return {
        **numbers,
        **digests,
        "lines": np.concatenate([np.zeros(0, np.uint64), *lines]),
        "line_counts": np.asarray([len(sample) for sample in lines], np.int64),
    }


# Step 2 is settling.py: given the indices of all units, the split of every document, or -1 for one that is dropped.


@dataclass(frozen=True)
class Shard:
    """A shard to write: stretches of units' tokens, one after another."""

    name: str
    stretches: tuple[tuple[int, int, int], ...]  # unit, first token, end

    @property
    def tokens(self) -> int:
        return sum(end - begin for _, begin, end in self.stretches)


def plan_shards(split: str, lengths: Sequence[np.ndarray], chosen: Sequence[np.ndarray], limit: int) -> list[Shard]:
    """Cuts a split's documents, in order, into shards of about `limit` tokens; `chosen` says which are in it."""
    shards: list[list[tuple[int, int, int]]] = [[]]
    filled = 0
    for unit, (sizes, mine) in enumerate(zip(lengths, chosen, strict=True)):
        ends = np.cumsum(sizes)
        for document in np.flatnonzero(mine):
            begin, end = int(ends[document] - sizes[document]), int(ends[document])
            if filled and filled + end - begin > limit:
                shards.append([])
                filled = 0
            if shards[-1] and shards[-1][-1][0] == unit and shards[-1][-1][2] == begin:
                begin = shards[-1].pop()[1]  # goes on where the last document ended
                filled -= int(ends[document] - sizes[document]) - begin
            shards[-1].append((unit, begin, end))
            filled += end - begin
    names = shard_names(split, len(shards))
    return [Shard(name, tuple(stretches)) for name, stretches in zip(names, shards, strict=True)]


# Step 3: a shard, copied from the units' files.


def write_shard(recipe: Recipe, shard: Shard) -> int:
    """Writes a shard and, beside the units, its hash; returns its tokens."""
    place, done = files.join(recipe.target, shard.name), files.join(recipe.work, "shards", f"{shard.name}.sha256")
    if files.is_file(done) and files.is_file(place):  # a process killed after all was done has moved the store away
        return shard.tokens
    size, digest = token_type(recipe.vocabulary).itemsize * (recipe.vocabulary.record or 1), hashlib.sha256()
    with files.writing(place) as into:
        for unit, begin, end in shard.stretches:
            with files.open_file(f"{piece_place(recipe, unit)}.tokens") as file:
                file.seek(begin * size)
                left = (end - begin) * size
                while left:
                    content = file.read(min(left, 1 << 24))
                    if not content:
                        raise UserError(f"{recipe.work} is damaged: remove it and give the same command again")
                    left -= len(content)
                    digest.update(content)
                    into.write(content)
    files.write_bytes(done, digest.hexdigest().encode())
    return shard.tokens


# What stands around the steps.


@dataclass(frozen=True)
class Settled:
    """What step 2 found: where every document of every unit goes, and the shards that follow from it."""

    lengths: tuple[np.ndarray, ...]
    places: tuple[np.ndarray, ...]  # per unit: the index of each document's split, or -1
    dropped: dict[str, dict[str, Any]]
    identical: dict[str, dict[str, Any]]  # "test in train": texts that splits which are not ours share
    shards: dict[str, tuple[Shard, ...]]


def settle(recipe: Recipe) -> Settled:
    """Step 2 from the files of step 1."""
    pieces = [read_arrays(f"{piece_place(recipe, number)}.npz") for number in range(recipe.pieces)]
    tallies = [json.loads(files.read_bytes(f"{piece_place(recipe, number)}.json")) for number in range(recipe.pieces)]
    if recipe.scattered:
        numbers = range(len(recipe.units))
        places = [files.join(recipe.work, "fragments", f"{number:06d}.json") for number in numbers]
        tallies = [json.loads(files.read_bytes(place)) for place in places] + tallies
    settled = settling.settle(pieces)
    edges = np.cumsum([len(piece["lengths"]) for piece in pieces])[:-1]
    lengths, places = tuple(piece["lengths"] for piece in pieces), tuple(np.split(settled.splits, edges))
    shards = {
        split: tuple(plan_shards(split, lengths, [place == i for place in places], recipe.shard_tokens))
        for i, split in enumerate(SPLITS)
    }
    dropped = total(tallies)
    if len(settled.duplicates):
        dropped["duplicate"] = same_texts(recipe, settled.duplicates, edges)
    identical = {
        f"{split} in {other}": same_texts(recipe, pairs, edges) for (split, other), pairs in settled.identical.items()
    }
    return Settled(lengths, places, dropped, identical, shards)


def same_texts(recipe: Recipe, pairs: np.ndarray, edges: np.ndarray) -> dict[str, Any]:
    """How many documents there are of a text that another has, and the names of the first and of those others."""
    shown = pairs[:NAMED_COPIES]
    names = names_of(recipe, sorted(set(shown.flat)), edges)
    return {"count": len(pairs), "examples": [" = ".join(names[number] for number in pair) for pair in shown]}


def names_of(recipe: Recipe, numbers: Sequence[int], edges: np.ndarray) -> dict[int, str]:
    """The names of some documents, by number; `edges` are the numbers that the pieces but the first begin with."""
    found, starts = {}, [0, *edges]
    for piece, group in itertools.groupby(numbers, lambda number: int(np.searchsorted(edges, number, side="right"))):
        lines = files.read_bytes(f"{piece_place(recipe, piece)}.names.jsonl").splitlines()
        found |= {number: json.loads(lines[number - starts[piece]]) for number in group}
    return found


def finish(recipe: Recipe, settled: Settled, about: dict[str, Any]) -> Store:
    """Indices, names, vocabulary and, last of all, the manifest."""
    entries = {}
    for i, split in enumerate(SPLITS):
        index = {key: [np.zeros(0, np.int64)] for key in recipe.numbers if key != "split"}
        with files.writing(files.join(recipe.target, f"{split}.names.jsonl")) as names:
            for number, place in enumerate(settled.places):
                piece, chosen = read_arrays(f"{piece_place(recipe, number)}.npz"), place == i
                for key, parts in index.items():
                    parts.append(piece[key][chosen])
                lines = files.read_bytes(f"{piece_place(recipe, number)}.names.jsonl").splitlines(keepends=True)
                names.writelines(line for line, mine in zip(lines, chosen, strict=True) if mine)
        index = {key: np.concatenate(parts) for key, parts in index.items()}
        entries[split] = write_index(recipe, split, index) | hashes(recipe, settled.shards[split], index.get("labels"))
    if not entries["train"]["predictions"]:
        why = ", ".join(f"{entry['count']} {reason}" for reason, entry in settled.dropped.items())
        raise UserError(f"the corpus is empty: nothing in its training documents{f' (dropped: {why})' if why else ''}")
    vocabulary = recipe.vocabulary
    manifest = {
        "format": FORMAT,
        "task": recipe.task,
        **about,
        "dtype": token_type(vocabulary).str,
        **({"record": vocabulary.record} if vocabulary.record else {}),
        **({"labels": list(recipe.labels)} if recipe.labels else {}),
        "contiguous": recipe.source.contiguous,
        "separator": recipe.separator,
        "vocabulary": {"kind": vocabulary.kind, "size": vocabulary.size, "sha256": vocabulary.identity},
        "dropped": settled.dropped,
        "identical": settled.identical,
        "splits": entries,
    }
    vocabulary.save(recipe.target)
    files.write_bytes(files.join(recipe.target, MANIFEST), json.dumps(manifest, indent=2).encode())
    return store_in(recipe.target)


def write_index(recipe: Recipe, split: str, index: dict[str, np.ndarray]) -> dict[str, Any]:
    lengths, labels = index["lengths"], index.get("labels")
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    kept = {key: values for key, values in index.items() if key != "lengths"}
    write_arrays(files.join(recipe.target, f"{split}.index.npz"), offsets=offsets, **kept)
    return {
        "documents": len(lengths),
        "tokens": int(offsets[-1]),
        "predictions": predictions_of(lengths, labels is not None),
        **{key: int(np.sum(values)) for key, values in kept.items() if key != "labels"},
        **({} if labels is None else {"labels": np.bincount(labels, minlength=len(recipe.labels)).tolist()}),
    }


def hashes(recipe: Recipe, shards: Sequence[Shard], labels: np.ndarray | None) -> dict[str, Any]:
    """The shards' lengths and one hash over theirs, and over the labels where there are any."""
    each = [files.read_bytes(files.join(recipe.work, "shards", f"{shard.name}.sha256")) for shard in shards]
    if labels is not None:
        each.append(hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest().encode())
    return {"shards": [shard.tokens for shard in shards], "sha256": hashlib.sha256(b"\n".join(each)).hexdigest()}


def write_arrays(place: str, **arrays: np.ndarray) -> None:
    content = io.BytesIO()
    np.savez(content, **arrays)
    files.write_bytes(place, content.getvalue())


def read_arrays(place: str) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(files.read_bytes(place)), allow_pickle=False) as arrays:
        return dict(arrays)
