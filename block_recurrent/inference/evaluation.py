"""Evaluation: a split's tokens each predicted once, state carried along every document, sums and not means of means."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from block_recurrent.data.rows import RowStream
from block_recurrent.data.store import Split


@dataclass(frozen=True)
class Score:
    """Totals over what was evaluated, and the split's own ratios to turn them into the usual figures."""

    nats: float
    tokens: int
    documents: int
    bytes_per_token: float
    words_per_token: float

    @property
    def bits_per_token(self) -> float:
        return self.nats / self.tokens / math.log(2)

    @property
    def bits_per_byte(self) -> float:
        return self.bits_per_token / self.bytes_per_token

    @property
    def word_perplexity(self) -> float:
        """exp(nats per word): comparable between vocabularies."""
        try:
            return math.exp(self.nats / self.tokens / self.words_per_token)
        except (OverflowError, ZeroDivisionError):
            return math.inf

    def to_json(self) -> dict:
        return {
            "bits_per_token": self.bits_per_token,
            "bits_per_byte": self.bits_per_byte,
            "word_perplexity": self.word_perplexity if math.isfinite(self.word_perplexity) else None,
            "nats": self.nats,
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": round(self.tokens * self.bytes_per_token),
            "words": round(self.tokens * self.words_per_token),
        }


class Evaluator:
    """Evaluates a model, compiled once: `score = evaluator(params, split)`."""

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        segment: int,
        place: Callable = lambda batch: batch,
        local: tuple[int, ...] | None = None,
    ):
        self.model, self.rows, self.segment, self.place, self.local = model, rows, segment, place, local

        def total(params, batch, memory):
            losses, memory = model.apply(
                {"params": params}, batch["inputs"], batch["targets"], memory, batch["start"], method="losses"
            )
            return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"]), memory

        self._total = jax.jit(total, donate_argnums=2)
        self._initial = jax.jit(lambda: model.initial_state(rows))

    def __call__(
        self, params, split: Split, batches: int | None = None, progress: Callable = lambda done, total: None
    ) -> Score:
        """The whole split, or its first `batches` batches."""
        stream = RowStream(split, self.rows, self.segment, self.model.block, shuffle=False, epochs=1, local=self.local)
        lengths = split.lengths[stream.documents]
        predictions = int(np.sum(lengths - 1))
        memory, cursor, sums = self._initial(), stream.begin(), []
        while not stream.finished(cursor) and (batches is None or len(sums) < batches):
            batch, cursor = stream.read(cursor)
            nats, tokens, memory = self._total(params, self.place(batch), memory)
            sums.append((nats, tokens))
            if len(sums) > 2:  # fetched late, so that the device never waits
                sums[-3] = tuple(map(float, sums[-3]))
                progress(sum(tokens for _, tokens in sums[:-2]), predictions)
        nats, tokens = np.sum([tuple(map(float, pair)) for pair in sums], axis=0)
        return Score(
            nats=float(nats),
            tokens=int(tokens),
            documents=cursor.upcoming,
            bytes_per_token=float(np.sum(split.bytes[stream.documents]) / predictions),
            words_per_token=float(np.sum(split.words[stream.documents]) / predictions),
        )
