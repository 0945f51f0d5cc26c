"""Near-duplicates among documents: texts of which one has many of the other's lines.

What is compared is the set of a text's distinct lines, without indentation, of 8 bytes or more and not punctuation
alone: moving, repeating and re-indenting code changes nothing. Of two texts it is the share of the smaller one's lines
that counts, so that a project is found again inside a later version of itself that has grown tenfold.

Every text keeps a sample of its lines: those of the smallest hashes, some hundred to a few hundred of them. Two samples
together reach as deep as the shallower of the two, and down to there they say, without error, which lines the texts
share. Seen in 300 made-up pairs each, by the share of the smaller one's lines:

    lines of the two   0.2    0.3    0.5    0.6    0.8
    300 and 300        0      0.01   1      1      1
    300 and 3,000      0.02   0.17   0.78   0.97   1
"""

import hashlib
import io
import string
from collections.abc import Iterator

import numpy as np

SHORTEST_LINE = 8  # bytes
FEWEST_LINES = 5
SAMPLE, SHARE = 128, 16  # the sample: as many lines, or one in so many where that is more
ALIKE = 0.4  # of the smaller text's lines
FEWEST_SHARED = 3
NEIGHBOURS = 8  # a line that is in many texts joins each to so many of the next, not to all
PUNCTUATION = string.punctuation.encode()


def sample(text: bytes) -> tuple[int, ...]:
    """The smallest hashes of a text's lines, sorted; that of the exact content, if there are too few to compare."""
    lines = distinct_lines(text)
    if len(lines) < FEWEST_LINES:
        return (line_hash(b"\0" + text),)
    kept = max(SAMPLE, len(lines) // SHARE)
    return tuple(sorted(map(line_hash, lines))[:kept])


def distinct_lines(text: bytes) -> set[bytes]:
    lines = {line.strip() for line in io.BytesIO(text)}
    return {line for line in lines if len(line) >= SHORTEST_LINE and line.strip(PUNCTUATION + b" \t")}


def line_hash(line: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(line, digest_size=8).digest(), "little")


def related(samples: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Which of the documents is a near-duplicate of another: samples one after another, so many hashes each."""
    edges = np.concatenate([[0], np.cumsum(counts)])
    found = np.zeros(len(counts), bool)
    for a, b, shared in pairs_that_share(samples, np.repeat(np.arange(len(counts)), counts)):
        one, other = samples[edges[a] : edges[a + 1]], samples[edges[b] : edges[b + 1]]
        depth = min(one[-1], other[-1])
        fewer = min(np.searchsorted(each, depth, side="right") for each in (one, other))
        if shared >= max(ALIKE * fewer, min(FEWEST_SHARED, fewer)):
            found[a] = found[b] = True
    return found


def pairs_that_share(hashes: np.ndarray, owners: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(a document, another, how many hashes they share) for all that share any."""
    order = np.lexsort((owners, hashes))
    hashes, owners = hashes[order], owners[order].astype(np.int64)
    pairs = [np.zeros((0, 2), np.int64)]
    for step in range(1, NEIGHBOURS + 1):
        same = hashes[step:] == hashes[:-step]
        pairs.append(np.stack([owners[:-step][same], owners[step:][same]], axis=1))
    found, counts = np.unique(np.concatenate(pairs), axis=0, return_counts=True)
    yield from ((int(a), int(b), int(count)) for (a, b), count in zip(found, counts, strict=True))
