"""How much of its past a model uses: the same blocks of tokens, predicted with more and more history before them.

    curve = history_curve(model, params, split, longest=64)
    curve.blocks             # 0, 1, 2, 4 ... 64 blocks of history before each block that is scored
    curve.bits_per_token     # falls as long as the model makes use of what lies further back

The tokens that are scored are the same for every length of history, so that neighbouring figures are paired.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from block_recurrent.data.store import Mixture, Split
from block_recurrent.errors import UserError
from block_recurrent.inference.measuring import Interval, bits, interval_of


@dataclass(frozen=True)
class HistoryCurve:
    """Nats [scored blocks, lengths of history]; each scored block is of a document."""

    block: int  # tokens
    blocks: tuple[int, ...]
    nats: np.ndarray
    documents: np.ndarray  # [scored blocks]

    @property
    def bits_per_token(self) -> np.ndarray:
        return bits(self.nats.mean(axis=0)) / self.block

    def gains(self, since: int = 0) -> list[tuple[float, Interval]]:
        """How many bits per token each length saves against `since` blocks, and the interval of that over documents."""
        _, document = np.unique(self.documents, return_inverse=True)
        first = self.blocks.index(since)
        saved = self.nats[:, first, None] - self.nats
        tokens = np.bincount(document) * self.block
        by_document = [np.bincount(document, saved[:, i]) for i in range(len(self.blocks))]
        return [(float(bits(nats.sum()) / tokens.sum()), interval_of(nats, tokens)) for nats in by_document]

    def to_json(self) -> list[dict]:
        figures = zip(self.blocks, self.bits_per_token, self.gains(), self.gains(since=1), strict=True)
        return [
            {
                "blocks": blocks,
                "tokens": blocks * self.block,
                "bits_per_token": float(bits_per_token),
                "gain": gain,
                "gain_interval": interval,
                "gain_beyond_one": beyond if blocks else None,
                "gain_beyond_one_interval": beyond_interval if blocks else None,
            }
            for blocks, bits_per_token, (gain, interval), (beyond, beyond_interval) in figures
        ]


def history_curve(
    model: nn.Module,
    params,
    split: Split | Mixture,
    longest: int = 64,
    scored: int = 256,
    rows: int = 16,
    block: int | None = None,
    progress: Callable = lambda done, total: None,
) -> HistoryCurve:
    """Scores about `scored` blocks, spread evenly over the documents that are long enough, with histories of 0 to
    `longest` blocks; a power of two, and all of them. A `block` is the model's own unless another is given.
    """
    block = block or model.block
    if block % model.block:
        raise UserError(f"a history in blocks of {block} tokens: give a multiple of the model's {model.block}")
    places = places_to_score(split, block, longest, scored)
    lengths = (0, *(1 << i for i in range(longest.bit_length()) if 1 << i < longest), longest)

    @jax.jit
    def losses(params, tokens, state, start):
        losses, state = model.apply({"params": params}, tokens[:, :-1], tokens[:, 1:], state, start, method="losses")
        return jnp.sum(losses, axis=1), state

    nats = np.zeros((len(places), len(lengths)))
    done, total = 0, -(-len(places) // rows) * sum(length + 1 for length in lengths)
    for first in range(0, len(places), rows):
        batch = places[first : first + rows]
        padded = [batch[i % len(batch)] for i in range(rows)]
        tokens = np.stack([part.tokens[begin - longest * block : begin + block + 1] for part, begin, _ in padded])
        for column, length in enumerate(lengths):
            state = model.initial_state(rows)
            for at in range(longest - length, longest + 1):
                start = np.zeros((rows, block), bool)
                start[:, 0] = at == longest - length
                piece = tokens[:, at * block : (at + 1) * block + 1].astype(np.int32)
                found, state = losses(params, piece, state, start)
                done += 1
                progress(done, total)
            nats[first : first + rows, column] = np.asarray(found)[: len(batch)]
    return HistoryCurve(block, lengths, nats, np.array([document for *_, document in places]))


def places_to_score(split: Split | Mixture, block: int, longest: int, scored: int) -> list[tuple[Split, int, int]]:
    """Where blocks begin that have the longest history before them in their document: split, token, document."""
    found, number = [], 0
    for part, _ in split.parts:
        for begin, length in zip(part.offsets[:-1].tolist(), part.lengths.tolist(), strict=True):
            # Every longest + 1 blocks, so that no two share what they score or most of their history.
            blocks = range(longest, (length - 1) // block, longest + 1)
            found += [(part, begin + i * block, number) for i in blocks]
            number += 1
    if not found:
        raise UserError(
            f"no document has {(longest + 1) * block + 1:,} tokens, which {longest} blocks of history and one to score "
            "take: give a shorter history"
        )
    return [found[i * len(found) // scored] for i in range(min(scored, len(found)))] if len(found) > scored else found
