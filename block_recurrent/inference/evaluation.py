"""Evaluation: a split's tokens each predicted once, state carried along every document, sums and not means of means."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from block_recurrent.data.rows import RowStream
from block_recurrent.data.store import Mixture, Split


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

    @property
    def perplexity(self) -> float:
        """exp(nats per token): the figure of corpora of words, ends of lines counted."""
        return 2.0 ** min(self.bits_per_token, 1000.0)

    def to_json(self) -> dict:
        return {
            "bits_per_token": self.bits_per_token,
            "bits_per_byte": self.bits_per_byte,
            "perplexity": self.perplexity,
            "word_perplexity": self.word_perplexity if math.isfinite(self.word_perplexity) else None,
            "nats": self.nats,
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": round(self.tokens * self.bytes_per_token),
            "words": round(self.tokens * self.words_per_token),
        }


class Evaluator:
    """Evaluates a model, compiled once: `score = evaluator(params, split)`.

    A running text is cut into a stretch for each row, which costs the first tokens of each their past, unless it is to
    be `uncut`.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        segment: int,
        place: Callable = lambda batch: batch,
        local: tuple[int, ...] | None = None,
        initial: Callable | None = None,
        uncut: bool = False,
    ):
        self.model, self.rows, self.segment, self.place = model, rows, segment, place
        self.streaming = {"shuffle": False, "epochs": 1, "local": local, "uncut": uncut}

        def total(params, batch, memory):
            losses, memory = model.apply(
                {"params": params}, batch["inputs"], batch["targets"], memory, batch["start"], method="losses"
            )
            return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"]), memory

        self._total = jax.jit(total, donate_argnums=2)
        self._initial = initial or jax.jit(lambda: model.initial_state(rows))

    def __call__(
        self, params, split: Split | Mixture, batches: int | None = None, progress: Callable = lambda done, total: None
    ) -> Score:
        """The whole split, or its first `batches` batches."""
        stream = RowStream(split, self.rows, self.segment, self.model.block, **self.streaming)
        predictions = stream.predictions
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
            documents=sum(cursor.upcoming),
            bytes_per_token=sum(int(np.sum(part.split.bytes[part.whole])) for part in stream.parts) / predictions,
            words_per_token=sum(int(np.sum(part.split.words[part.whole])) for part in stream.parts) / predictions,
        )
