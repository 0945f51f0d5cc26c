"""Intervals over documents: equal to an obvious loop, as wide as they should be, and small in memory."""

import tracemalloc

import numpy as np
import pytest

from block_recurrent.inference import statistics
from block_recurrent.inference.statistics import paired_interval, ratio_interval


def documents(rng, count):
    """Documents of many lengths, some harder than others: nats and tokens."""
    tokens = rng.integers(10, 1000, count)
    return tokens * rng.normal(2.0, 0.5, count), tokens


def test_an_interval_is_that_of_an_obvious_loop():
    nats, tokens = documents(np.random.default_rng(0), 7)
    rng, ratios = np.random.default_rng(3), []
    for _ in range(500):
        drawn = rng.integers(7, size=7)
        ratios.append(sum(nats[i] for i in drawn) / sum(tokens[i] for i in drawn))
    expected = np.quantile(ratios, [0.05, 0.95])
    np.testing.assert_allclose(ratio_interval(nats, tokens, level=0.9, samples=500, seed=3), expected)


def test_drawing_in_parts_is_drawing_at_once(monkeypatch):
    nats, tokens = documents(np.random.default_rng(0), 50)
    whole = ratio_interval(nats, tokens, samples=300)
    monkeypatch.setattr(statistics, "DRAWN_AT_ONCE", 120)
    assert ratio_interval(nats, tokens, samples=300) == whole


def test_the_truth_is_covered_as_often_as_is_said():
    rng = np.random.default_rng(0)
    intervals = [ratio_interval(*documents(rng, 60), level=0.9, samples=300) for _ in range(400)]
    assert 0.85 < np.mean([low < 2.0 < high for low, high in intervals]) < 0.94


def test_a_paired_interval_covers_the_difference_and_is_narrower():
    rng = np.random.default_rng(1)
    covered, narrower = [], []
    for _ in range(300):
        nats, tokens = documents(rng, 60)
        better = nats - tokens * rng.normal(0.02, 0.01, 60)
        low, high = paired_interval(nats, better, tokens, level=0.9, samples=300)
        alone = ratio_interval(nats, tokens, level=0.9, samples=300)
        covered.append(low < 0.02 < high)
        narrower.append(high - low < 0.2 * (alone[1] - alone[0]))
    assert 0.85 < np.mean(covered) < 0.94 and all(narrower)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_documents_have_no_interval(count):
    assert ratio_interval([3.0] * count, [2] * count) is None
    assert paired_interval([3.0] * count, [2.0] * count, [2] * count) is None


def test_memory_does_not_grow_with_the_split():
    nats, tokens = documents(np.random.default_rng(0), 100_000)
    tracemalloc.start()
    ratio_interval(nats, tokens, samples=40)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
