"""Settling: duplicates dropped, near-duplicates on one side, splits by name."""

import numpy as np

from block_recurrent.data import settling


def piece(count, **changes) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 1 << 62, (count, 2)).astype(np.uint64)
    return {
        "split": np.full(count, -1),
        "rank": numbers,
        "content": numbers,
        "lines": np.zeros(0, np.uint64),
        "line_counts": np.zeros(count, np.int64),
        **changes,
    }


def test_documents_of_the_same_text_are_kept_once():
    same = np.asarray([[1, 1], [2, 2], [1, 1], [3, 3]], np.uint64)
    splits, dropped = settling.settle([piece(4, content=same)], drops_duplicates=True)
    assert dropped == 1 and splits[2] == settling.NONE and (splits[[0, 1, 3]] >= 0).all()
    assert settling.settle([piece(4, content=same)], drops_duplicates=False)[1] == 0


def test_near_duplicates_are_never_on_both_sides():
    """Of 200 documents every third has a twin: none of them is held out, and as many others are."""
    lines = np.asarray([i - i % 3 if i % 3 < 2 else 1000 + i for i in range(200)], np.uint64)
    splits, _ = settling.settle([piece(200, lines=lines, line_counts=np.ones(200, int))], drops_duplicates=True)
    held_out = np.flatnonzero(splits > 0)
    assert np.bincount(splits).tolist() == [180, 10, 10]
    assert all(i % 3 == 2 for i in held_out if i < 198)


def test_a_duplicate_that_was_dropped_is_no_twin():
    """All but one of 40 documents are copies of the first, which may then be held out as any other."""
    content = np.asarray([[min(i, 2)] * 2 for i in (0, 1, 2, *[0] * 40)], np.uint64)
    lines = content[:, 0].copy()
    splits, dropped = settling.settle([piece(43, content=content, lines=lines, line_counts=np.ones(43, int))], True)
    assert dropped == 40 and sorted(splits[:3].tolist()) == [0, 1, 2]


def test_documents_keep_the_split_they_came_with():
    splits, _ = settling.settle([piece(3, split=np.asarray([2, 0, 1]))], drops_duplicates=False)
    assert splits.tolist() == [2, 0, 1]
