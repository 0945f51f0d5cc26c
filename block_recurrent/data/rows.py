"""The row stream: each row of the batch reads its own documents in order, segment after segment.

The documents of all epochs form one endless sequence, shuffled per epoch from (seed, epoch). A row that has finished
its document takes the next of the sequence, rows in order. A mixture has one such sequence for each of its parts, and
the part that has had the fewest tokens for its rate gives the next document. So where the stream stands is a few
integers, the same on every host: which document each row is in, how far, and which comes next. A host advances all rows
and reads the tokens of its own.

A running text (enwik8, the Penn Treebank), and in training also a corpus with fewer documents than rows, is cut into
about as many stretches as there are rows, as in the papers that use them: to the rows these are documents. The token at
a cut is the last target of one stretch and the first input of the next.

Documents with labels are to be classified: all their tokens are inputs, and the one target is the label, at the last.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from block_recurrent.data.store import Mixture, Split
from block_recurrent.errors import UserError

FREE = -1
LARGEST = 2**62  # of a cursor's numbers: what NumPy counts with
AHEAD = 2  # batches that are read and on their way to the device while it computes


@dataclass
class Cursor:
    """Where a stream stands before its next batch."""

    upcoming: list[int]  # per part of a mixture: the next document of its sequence that no row has taken
    dealt: list[int]  # per part: how many tokens rows have taken
    part: list[int]  # per row: the part that its document is of, or FREE
    document: list[int]  # per row: its document's place in the part's sequence
    offset: list[int]  # per row: how many tokens of it have been inputs

    def copy(self) -> "Cursor":
        return Cursor(*map(list, (self.upcoming, self.dealt, self.part, self.document, self.offset)))


class Span(NamedTuple):
    """Tokens of a batch that are of one document: `count` of `row` from `at` on, and where their document has them."""

    row: int
    at: int
    part: int  # of a mixture
    document: int  # its place in the part's sequence
    offset: int
    count: int


class Documents:
    """The documents of one part: where each begins and ends, and the order of every epoch."""

    def __init__(self, split: Split, rows: int, seed: list[int], shuffle: bool, uncut: bool):
        self.split, self.seed, self.shuffle = split, seed, shuffle
        self.read, self.labelled = split.tokens, split.labels is not None
        untold = 0 if self.labelled else 1  # the last token is no input where it is there to be predicted
        self.whole = np.flatnonzero(split.lengths > untold)  # those that have something to predict
        self.begin, self.end = split.offsets[self.whole], split.offsets[self.whole + 1] - untold  # of the inputs
        self.inputs = int(np.sum(self.end - self.begin))
        self.predictions = len(self.whole) if self.labelled else self.inputs
        few = split.contiguous or (shuffle and len(self.whole) < rows)
        if few and self.inputs > 0 and not uncut and not self.labelled:
            self.begin, self.end = cut(self.begin, self.end, -(-self.inputs // rows))
        self.order = functools.lru_cache(maxsize=4)(self._order)  # rows may still be in the epoch before
        self.bounds = functools.lru_cache(maxsize=4 * rows)(self._bounds)

    def __len__(self) -> int:
        return len(self.begin)

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.argsort(self.begin - self.end, kind="stable")  # longest first, so that rows finish together
        return np.random.default_rng([*self.seed, epoch]).permutation(len(self))

    def _bounds(self, place: int) -> tuple[int, int]:
        """Begin and end of the inputs of a document of the sequence; its last target is the token at the end."""
        document = self._number(place)
        return int(self.begin[document]), int(self.end[document])

    def _number(self, place: int) -> int:
        epoch, index = divmod(place, len(self))
        return int(self.order(epoch)[index])

    def label(self, place: int) -> int:
        """The label of a document of the sequence."""
        return int(self.split.labels[self.whole[self._number(place)]])


def cut(begin: np.ndarray, end: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Stretches of at most `longest`, those of one document of equal length but for one token."""
    begins, ends = [], []
    for first, last in zip(begin.tolist(), end.tolist(), strict=True):
        pieces = -(-(last - first) // longest)
        edges = [first + (last - first) * piece // pieces for piece in range(pieces + 1)]
        begins += edges[:-1]
        ends += edges[1:]
    return np.asarray(begins, np.int64), np.asarray(ends, np.int64)


@dataclass(frozen=True)
class RowStream:
    """Batches of `inputs, targets, weights, start`, each [rows segment].

    Where positions are records, inputs and targets are [rows segment record] uint8. Where documents have labels, the
    only target of a document is its label, at its last token: `weights` are 0 everywhere else.

    Inside a segment documents are padded to `block`. The token after each input is its target; no target crosses a
    document, and every token but a document's first is a target exactly once per epoch. With `epochs` the stream
    ends, and rows with nothing left are padding; without, it never does. `local` are the rows that this host reads,
    all by default. With `uncut` a running text is one document, too.
    """

    split: Split | Mixture
    rows: int
    segment: int
    block: int
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None
    local: tuple[int, ...] | None = None
    uncut: bool = False

    def __post_init__(self):
        if self.segment % self.block:
            raise UserError(
                f"segment {self.segment} is not a multiple of the model's block (its window) {self.block}: "
                f"try {max(self.segment // self.block, 1) * self.block}"
            )
        if len({part.labelled for part in self.parts}) > 1:
            raise UserError("a mixture of documents with labels and documents without: train on one kind")
        if len({part.read.shape[1:] for part in self.parts}) > 1:
            raise UserError("a mixture of corpora whose positions are not alike: train on one kind")
        if not all(map(len, self.parts)):
            least = "a token" if self.labelled else "two tokens or more"
            raise UserError(f"the corpus is empty: no document has {least}")

    @functools.cached_property
    def parts(self) -> list[Documents]:
        # A corpus alone and the same corpus first in a mixture are read in the same order.
        return [
            Documents(split, self.rows, [self.seed, part] if part else [self.seed], self.shuffle, self.uncut)
            for part, (split, _) in enumerate(self.split.parts)
        ]

    @functools.cached_property
    def labelled(self) -> bool:
        """Whether documents are to be classified."""
        return self.parts[0].labelled

    @property
    def predictions(self) -> int:
        """Targets in an epoch."""
        return sum(part.predictions for part in self.parts)

    @property
    def inputs(self) -> int:
        """Positions in an epoch, without padding: as many as targets, but where only labels are predicted."""
        return sum(part.inputs for part in self.parts)

    def begin(self) -> Cursor:
        parts, rows = len(self.parts), self.rows
        return Cursor([0] * parts, [0] * parts, [FREE] * rows, [0] * rows, [0] * rows)

    def cursor(self, saved: Any) -> Cursor:
        """The cursor that is saved in a checkpoint; a ValueError where it is none of this stream."""
        names = [field.name for field in fields(Cursor)]
        if not isinstance(saved, dict) or set(saved) != set(names):
            raise ValueError("its cursor has other parts")
        for name in names:
            count = len(self.parts) if name in ("upcoming", "dealt") else self.rows
            least, most = (FREE, len(self.parts) - 1) if name == "part" else (0, LARGEST)
            if not isinstance(saved[name], list) or len(saved[name]) != count:
                raise ValueError(f"its cursor has no {count} numbers as {name}")
            if not all(type(value) is int and least <= value <= most for value in saved[name]):
                raise ValueError(f"its cursor has {name} out of range")
        cursor = Cursor(**saved)
        for part, document, offset in zip(cursor.part, cursor.document, cursor.offset, strict=True):
            if part != FREE:
                begin, end = self.parts[part].bounds(document)
                if offset >= end - begin:
                    raise ValueError("its cursor is beyond the end of a document")
        return cursor

    def finished(self, cursor: Cursor) -> bool:
        return set(cursor.part) == {FREE} and not self._open_parts(cursor)

    def _open_parts(self, cursor: Cursor) -> list[int]:
        """The parts that still have documents to give."""
        if self.epochs is None:
            return list(range(len(self.parts)))
        return [i for i, part in enumerate(self.parts) if cursor.upcoming[i] < self.epochs * len(part)]

    def _take(self, row: int, cursor: Cursor) -> bool:
        """Gives a free row its next document; False where there is none left."""
        choices = self._open_parts(cursor)
        if not choices:
            return False
        part = min(choices, key=lambda i: cursor.dealt[i] / self.split.parts[i][1])
        begin, end = self.parts[part].bounds(cursor.upcoming[part])
        cursor.part[row], cursor.document[row], cursor.offset[row] = part, cursor.upcoming[part], 0
        cursor.upcoming[part] += 1
        cursor.dealt[part] += end - begin
        return True

    def read(self, cursor: Cursor) -> tuple[dict[str, np.ndarray], Cursor]:
        """The batch at a cursor, and the cursor after it."""
        local = range(self.rows) if self.local is None else self.local
        places = {row: place for place, row in enumerate(local)}
        shape = (len(local), self.segment)
        record = self.parts[0].read.shape[1:]
        inputs = np.zeros((*shape, *record), np.uint8 if record else np.int32)
        batch = {
            "inputs": inputs,
            "targets": np.zeros(shape, np.int32) if self.labelled else np.zeros_like(inputs),
            "weights": np.zeros(shape, np.float32),
            "start": np.zeros(shape, bool),
        }
        after = cursor.copy()
        for row in range(self.rows):
            place = places.get(row)
            for span in self._spans(row, after):
                if place is not None:
                    fill = self._fill_classified if self.labelled else self._fill
                    fill(batch, place, span)
        for tokens in [batch["inputs"], *([] if self.labelled else [batch["targets"]])]:
            check_ids(tokens, self.parts[0].split.ids)
        return batch, after

    def _fill(self, batch: dict[str, np.ndarray], place: int, span: Span) -> None:
        """Reads what a span says into a row of the batch."""
        documents = self.parts[span.part]
        begin = documents.bounds(span.document)[0] + span.offset
        tokens = documents.read[begin : begin + span.count + 1]
        filled = slice(span.at, span.at + span.count)
        batch["inputs"][place, filled] = tokens[:-1]
        batch["targets"][place, filled] = tokens[1:]
        batch["weights"][place, filled] = 1.0
        batch["start"][place, span.at] = span.offset == 0

    def _fill_classified(self, batch: dict[str, np.ndarray], place: int, span: Span) -> None:
        """The same for a document with a label, which is told where the document ends."""
        documents = self.parts[span.part]
        first, end = documents.bounds(span.document)
        begin, after = first + span.offset, first + span.offset + span.count
        batch["inputs"][place, span.at : span.at + span.count] = documents.read[begin:after]
        batch["start"][place, span.at] = span.offset == 0
        if after == end:
            last = span.at + span.count - 1
            batch["targets"][place, last] = documents.label(span.document)
            batch["weights"][place, last] = 1.0

    def spans(self, cursor: Cursor) -> list[Span]:
        """Which tokens of which documents the batch at a cursor holds."""
        cursor = cursor.copy()
        return [span for row in range(self.rows) for span in self._spans(row, cursor)]

    def _spans(self, row: int, cursor: Cursor) -> Iterator[Span]:
        """What fills a row's segment, one document after another; the row's place in `cursor` goes on with it."""
        at = 0
        while at < self.segment and (cursor.part[row] != FREE or self._take(row, cursor)):
            part, document, offset = cursor.part[row], cursor.document[row], cursor.offset[row]
            begin, end = self.parts[part].bounds(document)
            count = min(self.segment - at, end - begin - offset)
            yield Span(row, at, part, document, offset, count)
            at, cursor.offset[row] = at + count, offset + count
            if begin + offset + count == end:
                cursor.part[row] = FREE
                at += -at % self.block

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        cursor = self.begin()
        while not self.finished(cursor):
            batch, cursor = self.read(cursor)
            yield batch

    def ahead(self, cursor: Cursor, place: Callable[[dict[str, np.ndarray]], Any]) -> Iterator[tuple[Any, Cursor]]:
        """Batches, put where `place` puts them, and the cursors after them, read by a thread that keeps ahead."""

        def read_next():
            nonlocal cursor
            if self.finished(cursor):
                return None
            batch, cursor = self.read(cursor)
            return place(batch), cursor

        with ThreadPoolExecutor(1, "row stream") as reader:
            coming = deque(reader.submit(read_next) for _ in range(AHEAD))
            while (batch_and_cursor := coming.popleft().result()) is not None:
                coming.append(reader.submit(read_next))
                yield batch_and_cursor


def check_ids(tokens: np.ndarray, size: int | None) -> None:
    """Refuses ids that a vocabulary of this size does not have: embedded, they would be NaN."""
    if size is not None and tokens.size and (largest := tokens.max()) >= size:
        raise UserError(
            f"the data has the token id {largest}, and its vocabulary {size:,}: the store is damaged; "
            "prepare it again with --overwrite"
        )
