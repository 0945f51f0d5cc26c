"""How sure a figure is: the bootstrap over documents, which asks what other documents of the same kind would give.

Tokens of a document are alike, so whole documents are drawn, with replacement, and the ratio of sums is taken anew.
"""

from collections.abc import Sequence

import numpy as np

DRAWN_AT_ONCE = 1 << 20  # documents in memory, whatever the size of the split


def ratio_interval(
    nats: Sequence[float], tokens: Sequence[float], level: float = 0.95, samples: int = 2000, seed: int = 0
) -> tuple[float, float] | None:
    """Where sum(nats) / sum(tokens) would lie with other documents; None for fewer than two of them."""
    documents = np.stack([nats, tokens], axis=1).astype(np.float64)  # [documents 2]
    count = len(documents)
    if count < 2:
        return None
    rng, at_once = np.random.default_rng(seed), max(DRAWN_AT_ONCE // count, 1)
    ratios = []
    for begin in range(0, samples, at_once):
        drawn = rng.integers(count, size=(min(at_once, samples - begin), count))
        sums = documents[drawn].sum(axis=1)  # [samples 2]
        ratios.append(sums[:, 0] / sums[:, 1])
    low, high = np.quantile(np.concatenate(ratios), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_interval(
    nats_a: Sequence[float], nats_b: Sequence[float], tokens: Sequence[float], **how: float
) -> tuple[float, float] | None:
    """The same of (sum(nats_a) - sum(nats_b)) / sum(tokens): both are read on the same drawn documents.

    What makes a document hard for both cancels, so it is narrower than two intervals apart.
    """
    return ratio_interval(np.subtract(nats_a, nats_b), tokens, **how)
