"""The row stream: each row of the batch reads its own documents in order, segment after segment.

All documents of all epochs form one endless sequence, shuffled per epoch from (seed, epoch). A row that has
finished its document takes the next of the sequence, rows in order. So where the stream stands is a few integers,
the same on every host: which document of the sequence each row is in, how far, and which comes next. A host
advances all rows and reads the tokens of its own.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from block_recurrent.data.store import Split
from block_recurrent.errors import UserError

FREE = -1


@dataclass
class Cursor:
    """Where a stream stands before its next batch."""

    upcoming: int  # the next document of the sequence that no row has taken
    document: list[int]  # per row: its document's place in the sequence, or FREE
    offset: list[int]  # per row: how many tokens of it have been inputs


@dataclass(frozen=True)
class RowStream:
    """Batches of `inputs, targets, weights, start`, each [rows segment].

    Inside a segment documents are padded to `block`. The token after each input is its target; no target crosses a
    document, and every token but a document's first is a target exactly once per epoch. With `epochs` the stream
    ends, and rows with nothing left are padding; without, it never does. `local` are the rows that this host reads,
    all by default.
    """

    split: Split
    rows: int
    segment: int
    block: int
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None
    local: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.segment % self.block:
            raise UserError(
                f"segment {self.segment} is not a multiple of the model's block (its window) {self.block}: "
                f"try {max(self.segment // self.block, 1) * self.block}"
            )
        if not len(self.documents):
            raise UserError("the corpus is empty: no document has two tokens or more")

    @functools.cached_property
    def documents(self) -> np.ndarray:
        """The documents that have something to predict."""
        return np.flatnonzero(self.split.lengths >= 2)

    @functools.cached_property
    def _order(self):
        @functools.lru_cache(maxsize=4)  # rows may still be in the epoch before
        def order(epoch: int) -> np.ndarray:
            if not self.shuffle:
                # Longest first, so that rows finish together.
                return self.documents[np.argsort(-self.split.lengths[self.documents], kind="stable")]
            return np.random.default_rng([self.seed, epoch]).permutation(self.documents)

        return order

    def begin(self) -> Cursor:
        return Cursor(0, [FREE] * self.rows, [0] * self.rows)

    def finished(self, cursor: Cursor) -> bool:
        return self.epochs is not None and cursor.upcoming >= self._end and set(cursor.document) == {FREE}

    @property
    def _end(self) -> float:
        return float("inf") if self.epochs is None else self.epochs * len(self.documents)

    def read(self, cursor: Cursor) -> tuple[dict[str, np.ndarray], Cursor]:
        """The batch at a cursor, and the cursor after it."""
        local = range(self.rows) if self.local is None else self.local
        places = {row: place for place, row in enumerate(local)}
        shape = (len(local), self.segment)
        batch = {
            "inputs": np.zeros(shape, np.int32),
            "targets": np.zeros(shape, np.int32),
            "weights": np.zeros(shape, np.float32),
            "start": np.zeros(shape, bool),
        }
        after = Cursor(cursor.upcoming, list(cursor.document), list(cursor.offset))
        for row in range(self.rows):
            self._fill(row, after, batch, places.get(row))
        return batch, after

    def _fill(self, row: int, cursor: Cursor, batch: dict[str, np.ndarray], at_row: int | None) -> None:
        """Fills one row's segment and advances its place in `cursor`; `at_row` is None for another host's row."""
        at = 0
        while at < self.segment:
            if cursor.document[row] == FREE:
                if cursor.upcoming >= self._end:
                    return
                cursor.document[row], cursor.offset[row] = cursor.upcoming, 0
                cursor.upcoming += 1
            epoch, place = divmod(cursor.document[row], len(self.documents))
            document = self._order(epoch)[place]
            begin, end = self.split.offsets[document], self.split.offsets[document + 1]
            offset = cursor.offset[row]
            count = int(min(self.segment - at, end - begin - 1 - offset))
            if at_row is not None:
                tokens = self.split.tokens[begin + offset : begin + offset + count + 1]
                into = slice(at, at + count)
                batch["inputs"][at_row, into] = tokens[:-1]
                batch["targets"][at_row, into] = tokens[1:]
                batch["weights"][at_row, into] = 1.0
                batch["start"][at_row, at] = offset == 0
            cursor.offset[row] += count
            at += count
            if begin + cursor.offset[row] == end - 1:
                cursor.document[row] = FREE
                at += -at % self.block

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        cursor = self.begin()
        while not self.finished(cursor):
            batch, cursor = self.read(cursor)
            yield batch
