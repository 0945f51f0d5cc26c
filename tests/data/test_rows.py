"""The row stream: every token predicted once an epoch, in order, resumable, and the same on any number of hosts."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from block_recurrent.data.rows import Cursor, RowStream
from block_recurrent.data.store import Mixture, Split
from block_recurrent.errors import UserError

BLOCK = 4


def split_of(lengths) -> Split:
    """Documents of the given lengths whose tokens are all different, so that each can be recognised."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    counts = np.zeros(len(lengths), np.int64)
    return Split(np.arange(1, offsets[-1] + 1, dtype=np.uint16), offsets, counts, counts)


SPLIT = split_of([9, 1, 30, 2, 17, 4, 5, 13, 25, 0, 8])


def stream(**changes) -> RowStream:
    return RowStream(**{"split": SPLIT, "rows": 3, "segment": 12, "block": BLOCK, "seed": 7, **changes})


def targets_of(batches) -> list[int]:
    return [int(token) for batch in batches for token in batch["targets"][batch["weights"] > 0]]


def predictable() -> set[int]:
    firsts = set(SPLIT.tokens[SPLIT.offsets[:-1][SPLIT.lengths > 0]])
    return set(map(int, SPLIT.tokens)) - set(map(int, firsts))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("segment", [4, 12, 40])
def test_every_token_but_a_documents_first_is_predicted_once(shuffle, segment):
    seen = targets_of(stream(shuffle=shuffle, segment=segment, epochs=1))
    assert sorted(seen) == sorted(predictable())


def test_epochs_each_hold_every_token_and_differ_in_order():
    seen = targets_of(stream(epochs=2, rows=1))
    half = len(seen) // 2
    assert sorted(seen[:half]) == sorted(seen[half:]) == sorted(predictable())
    assert seen[:half] != seen[half:]


def test_documents_begin_on_blocks_and_continue_in_their_row():
    """Each input is followed by its target in the same row, unless a document ends there."""
    before = [None] * 3
    for batch in stream(epochs=1):
        for row in range(3):
            for at in range(12):
                token, target = int(batch["inputs"][row, at]), int(batch["targets"][row, at])
                if not batch["weights"][row, at]:
                    assert token == 0 and not batch["start"][row, at]
                    continue
                assert target == token + 1
                begins = token - 1 in SPLIT.offsets[:-1]
                assert batch["start"][row, at] == begins
                if begins:
                    assert at % BLOCK == 0
                else:
                    assert before[row] == token
                before[row] = target


def test_no_padding_beyond_the_block():
    """A short document does not cost a segment: only the rest of its last block is padding."""
    batches = list(stream(rows=1, segment=40, epochs=1))
    padding = sum(float(np.sum(batch["weights"] == 0)) for batch in batches[:-1])
    assert padding <= len(SPLIT.lengths) * (BLOCK - 1)


def test_resumes_from_the_cursor_alone():
    whole = list(stream(epochs=2))
    fresh, cursor, resumed = stream(epochs=2), stream().begin(), []
    while not fresh.finished(cursor):
        # A new stream for every batch, and the cursor through JSON as a checkpoint does.
        batch, cursor = stream(epochs=2).read(Cursor(**json.loads(json.dumps(asdict(cursor)))))
        resumed.append(batch)
    assert len(whole) == len(resumed)
    for a, b in zip(whole, resumed, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_read_what_one_reads(hosts):
    """Also when the number of hosts changes half-way: the cursor is the same on all of them."""
    rows = 4
    one, cursor = stream(rows=rows), stream(rows=rows).begin()
    for _ in range(20):
        whole, after = one.read(cursor)
        shares = [
            stream(rows=rows, local=tuple(range(host * rows // hosts, (host + 1) * rows // hosts))).read(cursor)
            for host in range(hosts)
        ]
        for name in whole:
            np.testing.assert_array_equal(np.concatenate([batch[name] for batch, _ in shares]), whole[name])
        assert all(their == after for _, their in shares)
        cursor = after


def test_reading_does_not_move_the_cursor_it_was_given():
    cursor = stream().begin()
    stream().read(cursor)
    assert cursor == stream().begin()


def test_seed_decides_the_order():
    first = [next(iter(stream(seed=seed)))["inputs"].tolist() for seed in (1, 1, 2)]
    assert first[0] == first[1] != first[2]


def test_segment_must_be_a_multiple_of_the_block():
    with pytest.raises(UserError, match=r"segment 10 is not a multiple .* 4: try 8"):
        stream(segment=10)


def test_nothing_to_predict_is_an_empty_corpus():
    with pytest.raises(UserError, match="corpus is empty"):
        stream(split=split_of([1, 0, 1]))


def running_text(length=101) -> Split:
    return replace(split_of([length]), contiguous=True)


def test_a_running_text_gives_every_row_its_own_stretch_and_loses_no_token():
    whole = stream(split=running_text(), rows=4, segment=8, block=1, epochs=1)
    batches = list(whole)
    assert sorted(targets_of(batches)) == list(range(2, 102))
    firsts = sorted(int(token) for token in batches[0]["inputs"][:, 0])
    assert firsts == [1, 26, 51, 76]
    assert batches[0]["start"][:, 0].all() and not batches[0]["start"][:, 1:].any()


def test_a_running_text_can_be_read_in_one_piece():
    batches = list(stream(split=running_text(), rows=4, segment=8, block=1, epochs=1, shuffle=False, uncut=True))
    assert targets_of(batches) == list(range(2, 102))
    assert sum(int(batch["start"].sum()) for batch in batches) == 1


def test_rows_do_not_all_read_the_same_when_there_are_fewer_documents():
    """One long file and three rows: a stretch each, rather than three times the same."""
    batches = list(stream(split=split_of([90]), rows=3, segment=12, epochs=1))
    assert sorted(targets_of(batches)) == list(range(2, 91))
    assert len(batches) < 5


def mixture(rates=(3.0, 1.0)) -> Mixture:
    """Two corpora whose tokens can be told apart."""
    other = replace(SPLIT, tokens=SPLIT.tokens + 1000)
    return Mixture(((SPLIT, rates[0]), (other, rates[1])))


def test_a_mixture_gives_each_part_its_share_of_the_tokens():
    mixed, cursor, seen = stream(split=mixture(), block=1), stream(split=mixture()).begin(), []
    for _ in range(200):
        batch, cursor = mixed.read(cursor)
        seen += targets_of([batch])
    share = sum(token < 1000 for token in seen) / len(seen)
    assert abs(share - 0.75) < 0.02


def test_a_mixture_resumes_and_is_the_same_on_two_hosts():
    whole, cursor = stream(split=mixture(), rows=4), stream(split=mixture(), rows=4).begin()
    for _ in range(30):
        restored = Cursor(**json.loads(json.dumps(asdict(cursor))))
        batch, cursor = whole.read(cursor)
        halves = [stream(split=mixture(), rows=4, local=rows).read(restored) for rows in ((0, 1), (2, 3))]
        for name in batch:
            np.testing.assert_array_equal(np.concatenate([half[name] for half, _ in halves]), batch[name])
        assert all(after == cursor for _, after in halves)


def test_an_epoch_of_a_mixture_holds_every_token_once():
    expected = predictable() | {token + 1000 for token in predictable()}
    assert sorted(targets_of(stream(split=mixture(), epochs=1))) == sorted(expected)


def test_reading_ahead_gives_the_same_batches_and_cursors():
    plain, cursor = stream(epochs=2), stream().begin()
    for batch, after in stream(epochs=2).ahead(stream().begin(), lambda batch: batch):
        expected, cursor = plain.read(cursor)
        assert after == cursor
        for name in batch:
            np.testing.assert_array_equal(batch[name], expected[name])
    assert plain.finished(cursor)


def test_an_error_while_reading_ahead_reaches_the_reader():
    def broken(batch):
        raise UserError("the disk is gone")

    with pytest.raises(UserError, match="the disk is gone"):
        next(stream().ahead(stream().begin(), broken))


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_every_token_once_an_epoch_on_any_number_of_hosts_with_kills_between(hosts):
    """Every host is killed before every batch and begins anew from the cursor, once on another number of hosts."""
    rows, seen, cursor = 4, [], stream(rows=4).begin()
    batches = 0
    while not stream(rows=rows, epochs=1).finished(cursor):
        now = hosts if batches % 3 else 1
        shares = [
            stream(rows=rows, epochs=1, local=tuple(range(host * rows // now, (host + 1) * rows // now))).read(
                Cursor(**json.loads(json.dumps(asdict(cursor))))
            )
            for host in range(now)
        ]
        seen += targets_of([batch for batch, _ in shares])
        cursor = shares[0][1]
        batches += 1
    assert sorted(seen) == sorted(predictable())
    documents = np.searchsorted(SPLIT.offsets, np.asarray(seen) - 1, side="right")
    for document in set(documents.tolist()):
        tokens = [token for token, where in zip(seen, documents, strict=True) if where == document]
        assert tokens == sorted(tokens), "in order within a document"


def test_ids_that_the_vocabulary_does_not_have_are_refused():
    largest = int(SPLIT.tokens.max())
    assert targets_of(stream(split=replace(SPLIT, ids=largest + 1), epochs=1))
    with pytest.raises(UserError, match=rf"the token id {largest}, and its vocabulary {largest}: the store is damaged"):
        targets_of(stream(split=replace(SPLIT, ids=largest), epochs=1))


WRONG = {
    "not a dictionary": lambda cursor: [1, 2],
    "other names": lambda cursor: {"position": 3},
    "a name more": lambda cursor: {**cursor, "epoch": 1},
    "other rows": lambda cursor: {**cursor, "part": [0]},
    "no list": lambda cursor: {**cursor, "offset": 3},
    "text": lambda cursor: {**cursor, "document": ["a", "b", "c"]},
    "fractions": lambda cursor: {**cursor, "upcoming": [1.5]},
    "another part": lambda cursor: {**cursor, "part": [7, 0, 0]},
    "below zero": lambda cursor: {**cursor, "upcoming": [-1]},
    "too large": lambda cursor: {**cursor, "document": [10**30, 0, 0]},
    "beyond a document": lambda cursor: {**cursor, "offset": [10**6, 0, 0]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_cursor_of_something_else_is_refused(wrong):
    reading = stream()
    saved = json.loads(json.dumps(asdict(reading.read(reading.begin())[1])))
    assert reading.cursor(saved) == Cursor(**saved)
    with pytest.raises(ValueError, match="cursor"):
        reading.cursor(WRONG[wrong](saved))
