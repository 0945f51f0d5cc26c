"""Settling: duplicates dropped, near-duplicates on one side, splits by name."""

import numpy as np
import pytest

from block_recurrent.data import same_text, settling


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


SAME = np.asarray([[1, 1], [2, 2], [1, 1], [3, 3], [1, 1]], np.uint64)


def test_documents_of_the_same_text_are_kept_once():
    settled = settling.settle([piece(5, content=SAME)])
    assert settled.duplicates.tolist() == [[2, 0], [4, 0]] and not settled.identical
    assert (settled.splits[[2, 4]] == settling.NONE).all() and (settled.splits[[0, 1, 3]] >= 0).all()


def test_a_split_that_was_given_keeps_its_text_and_training_loses_it():
    settled = settling.settle([piece(5, content=SAME, split=np.asarray([-1, -1, -1, -1, 2]))])
    assert settled.duplicates.tolist() == [[0, 4], [2, 4]]
    assert settled.splits[4] == 2 and np.sum(settled.splits == 2) == 1, "nothing is added to a split that is there"
    assert sorted(settled.splits[[1, 3]]) == [0, 1]


def test_the_same_text_in_splits_that_were_given_is_found_and_left():
    given = np.asarray([0, 1, 2, 0, 2])
    settled = settling.settle(
        [piece(2, content=SAME[:2], split=given[:2]), piece(3, content=SAME[2:], split=given[2:])]
    )
    assert settled.splits.tolist() == given.tolist() and not len(settled.duplicates)
    assert {key: pairs.tolist() for key, pairs in settled.identical.items()} == {("test", "train"): [[2, 0], [4, 0]]}


def test_near_duplicates_are_never_on_both_sides():
    """Of 200 documents every third has a twin: none of them is held out, and as many others are."""
    lines = np.asarray([i - i % 3 if i % 3 < 2 else 1000 + i for i in range(200)], np.uint64)
    splits = settling.settle([piece(200, lines=lines, line_counts=np.ones(200, int))]).splits
    held_out = np.flatnonzero(splits > 0)
    assert np.bincount(splits).tolist() == [180, 10, 10]
    assert all(i % 3 == 2 for i in held_out if i < 198)


def test_a_duplicate_that_was_dropped_is_no_twin():
    """All but one of 40 documents are copies of the first, which may then be held out as any other."""
    content = np.asarray([[min(i, 2)] * 2 for i in (0, 1, 2, *[0] * 40)], np.uint64)
    lines = content[:, 0].copy()
    settled = settling.settle([piece(43, content=content, lines=lines, line_counts=np.ones(43, int))])
    assert len(settled.duplicates) == 40 and sorted(settled.splits[:3].tolist()) == [0, 1, 2]


@pytest.mark.parametrize("stretch", [1, 2, 1 << 20])
def test_a_text_is_the_same_however_its_white_space_is(monkeypatch, stretch):
    monkeypatch.setattr(same_text, "STRETCH", stretch)
    wide = "\ufeffa\u00a0\u3000bc\u2028".encode()
    texts = [b"a bc\n", b"\n a\t bc", b"a\r\n\x0b bc  ", wide, b"ab c", b"abc", b"", b" \n", "a\u00e0bc".encode()]
    hashes = [same_text.content_hash(text) for text in texts]
    assert [hashes.index(each) for each in hashes] == [0, 0, 0, 0, 4, 5, 6, 6, 8]
    assert same_text.content_hash(b"a b", is_text=False) != same_text.content_hash(b"a\tb", is_text=False)
