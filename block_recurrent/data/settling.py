"""With all documents known: which are duplicates, which are near-duplicates, and which split each goes to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from block_recurrent.data.documents import SPLITS
from block_recurrent.data.near_duplicates import related

SHARE = 0.05  # of the documents that validation and test get each
NONE = -1


@dataclass(frozen=True)
class Settling:
    """Where documents go, by their numbers; pairs are a document and the first one of the same text."""

    splits: np.ndarray  # [documents] the index of each one's split, or NONE where it is a duplicate of another
    duplicates: np.ndarray  # [dropped 2]
    identical: dict[tuple[str, str], np.ndarray]  # (split, an earlier one): those in the first that are in both, [n 2]


def settle(pieces: Sequence[dict[str, np.ndarray]]) -> Settling:
    """The split of every document, and which have the same text.

    Documents that came with a split keep it, whatever their text. Of the others every text is kept once, and not at all
    if one that came with a split has it. Of those kept, validation and test get SHARE each, by a hash of the name, and
    at least one where there are three, or none if there are documents that came with that split; near-duplicates of any
    other document stay in train.
    """
    whole = {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}
    splits = whole["split"].copy()
    open_ = splits == NONE
    first = first_of_same(whole["content"], open_)
    kept = ~open_ | (first == np.arange(len(splits)))
    counts = np.where(kept, whole["line_counts"], 0)
    twins = related(whole["lines"][np.repeat(kept, whole["line_counts"])], counts)
    open_ &= kept
    ranked = np.flatnonzero(open_)[np.lexsort(whole["rank"][open_].T[::-1])]
    alone = ranked[~twins[ranked]]
    held_out = max(round(SHARE * len(ranked)), 1)
    splits[open_] = SPLITS.index("train")
    for left_over, split in enumerate(("validation", "test"), 1):
        if not np.any(whole["split"] == SPLITS.index(split)):
            count = min(held_out, max(len(ranked) - left_over, 0))
            splits[alone[:count]], alone = SPLITS.index(split), alone[count:]
    splits[~kept] = NONE
    duplicates = np.flatnonzero(~kept)
    return Settling(splits, np.stack([duplicates, first[duplicates]], axis=1), across_splits(splits, first))


def first_of_same(digests: np.ndarray, last: np.ndarray) -> np.ndarray:
    """For every row the first one of the same value; those that are marked as `last` come after the others."""
    order = np.argsort(last, kind="stable")
    _, first, group = np.unique(digests[order], axis=0, return_index=True, return_inverse=True)
    found = np.empty(len(digests), np.int64)
    found[order] = order[first][group.reshape(-1)]
    return found


def across_splits(splits: np.ndarray, first: np.ndarray) -> dict[tuple[str, str], np.ndarray]:
    """The documents of a split whose text is in an earlier split too, each with one of that."""
    found = {}
    for later, split in enumerate(SPLITS):
        for earlier, other in enumerate(SPLITS[:later]):
            there, one = np.unique(first[splits == earlier], return_index=True)
            mine = np.flatnonzero(splits == later)
            mine = mine[np.isin(first[mine], there)]
            if len(mine):
                theirs = np.flatnonzero(splits == earlier)[one[np.searchsorted(there, first[mine])]]
                found[split, other] = np.stack([mine, theirs], axis=1)
    return found
