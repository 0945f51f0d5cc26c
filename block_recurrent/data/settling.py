"""With all documents known: which are duplicates, which are near-duplicates, and which split each goes to."""

from collections.abc import Sequence

import numpy as np

from block_recurrent.data.documents import SPLITS
from block_recurrent.data.near_duplicates import related

SHARE = 0.05  # of the documents that validation and test get each
NONE = -1


def settle(pieces: Sequence[dict[str, np.ndarray]], drops_duplicates: bool) -> tuple[np.ndarray, int]:
    """The index of every document's split, or NONE where it is a duplicate of an earlier one, and how many those are.

    Documents that came with a split keep it. Of the others validation and test get SHARE each, by a hash of the name,
    and at least one where there are three; near-duplicates of any other document stay in train.
    """
    whole = {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}
    splits = whole["split"].copy()
    kept = first_of_each(whole["content"]) if drops_duplicates else np.ones(len(splits), bool)
    open_ = kept & (splits == NONE)
    counts = np.where(kept, whole["line_counts"], 0)
    twins = related(whole["lines"][np.repeat(kept, whole["line_counts"])], counts)
    ranked = np.flatnonzero(open_)[np.lexsort(whole["rank"][open_].T[::-1])]
    alone = ranked[~twins[ranked]]
    held_out = max(round(SHARE * len(ranked)), 1)
    validation = min(held_out, max(len(ranked) - 1, 0))
    test = min(held_out, max(len(ranked) - 2, 0))
    splits[open_] = SPLITS.index("train")
    splits[alone[:validation]] = SPLITS.index("validation")
    splits[alone[validation : validation + test]] = SPLITS.index("test")
    splits[~kept] = NONE
    return splits, int(np.sum(~kept))


def first_of_each(digests: np.ndarray) -> np.ndarray:
    """Which rows are the first of their value."""
    first = np.zeros(len(digests), bool)
    first[np.unique(digests, axis=0, return_index=True)[1]] = True
    return first
