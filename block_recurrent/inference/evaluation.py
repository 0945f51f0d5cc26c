"""Evaluation: a split's tokens each predicted once, state carried along every document, sums and not means of means."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from block_recurrent.data.rows import Cursor, RowStream, Span
from block_recurrent.data.store import Mixture, Split


@dataclass(frozen=True)
class Score:
    """Totals over what was evaluated, and the split's own ratios to turn them into the usual figures.

    Of labelled sequences `tokens` are the labels, and `hits` those that were guessed right.
    """

    nats: float
    tokens: int
    documents: int
    bytes_per_token: float
    words_per_token: float
    hits: int | None = None
    of_words: bool = True  # whether a figure for each word means anything

    @property
    def loss(self) -> float:
        """Nats per prediction, what training minimises."""
        return self.nats / self.tokens

    @property
    def bits_per_token(self) -> float:
        return self.nats / self.tokens / math.log(2)

    @property
    def bits_per_byte(self) -> float:
        return self.bits_per_token / self.bytes_per_token

    @property
    def word_perplexity(self) -> float | None:
        """exp(nats per word): comparable between vocabularies; None where it means nothing."""
        if not self.of_words:
            return None
        try:
            return math.exp(self.nats / self.tokens / self.words_per_token)
        except (OverflowError, ZeroDivisionError):
            return math.inf

    @property
    def perplexity(self) -> float:
        """exp(nats per token): the figure of corpora of words, ends of lines counted."""
        return 2.0 ** min(self.bits_per_token, 1000.0)

    @property
    def accuracy(self) -> float | None:
        """The share of labels that were guessed right; None where there are none."""
        return None if self.hits is None else self.hits / self.tokens

    def to_json(self) -> dict:
        return {
            "nats_per_token": self.loss,
            **({} if self.hits is None else {"accuracy": self.accuracy, "hits": self.hits}),
            "bits_per_token": self.bits_per_token,
            "bits_per_byte": self.bits_per_byte,
            "perplexity": self.perplexity,
            "word_perplexity": finite_or_none(self.word_perplexity),
            "nats": self.nats,
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": round(self.tokens * self.bytes_per_token),
            "words": round(self.tokens * self.words_per_token),
        }


def finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class Evaluator:
    """Evaluates a model, compiled once: `score = evaluator(params, split)`.

    A running text is cut into a stretch for each row, which costs the first tokens of each their past, unless it is to
    be `uncut`. With `reset_every` the model forgets everything after so many of its blocks.
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
        reset_every: int | None = None,
    ):
        self.model, self.rows, self.segment, self.place = model, rows, segment, place
        self.labelled = hasattr(model.head, "losses_and_hits")
        self.reset_every = reset_every
        self.streaming = {"shuffle": False, "epochs": 1, "local": local, "uncut": uncut}

        def evaluated(params, batch, memory):
            arguments = (batch["inputs"], batch["targets"], memory, batch["start"])
            method = "losses_and_hits" if self.labelled else "losses"
            losses, memory = model.apply({"params": params}, *arguments, method=method)
            losses, hits = losses if self.labelled else (losses, jnp.zeros_like(losses))
            sums = [jnp.sum(part * batch["weights"]) for part in (losses, jnp.ones_like(losses), hits)]
            return jnp.stack(sums), (losses, hits), memory

        self._evaluated = jax.jit(evaluated, donate_argnums=2)
        self._initial = initial or jax.jit(lambda: model.initial_state(rows))

    def stream(self, split: Split | Mixture) -> RowStream:
        """A split's documents, each once, the longest first."""
        return RowStream(split, self.rows, self.segment, self.model.block, **self.streaming)

    def predicts(self, split: Split | Mixture, batches: int) -> bool:
        """Whether there is anything to predict in the first batches: long documents have their labels far behind."""
        stream = RowStream(split, self.rows, self.segment, self.model.block, **{**self.streaming, "local": None})
        cursor = stream.begin()
        for _ in range(batches):
            if stream.finished(cursor):
                break
            batch, cursor = stream.read(cursor)
            if batch["weights"].any():
                return True
        return False

    def __call__(self, params, split: Split | Mixture, batches: int | None = None) -> Score:
        """The whole split, or its first `batches` batches."""
        stream = self.stream(split)
        sums, documents = [], 0
        for found, _, cursor in itertools.islice(self._walk(params, stream), batches):
            sums.append(found)
            documents = sum(cursor.upcoming)
            if len(sums) > 2:  # fetched late, so that the device never waits
                sums[-3] = np.asarray(sums[-3], np.float64)
        nats, tokens, hits = np.sum([np.asarray(found, np.float64) for found in sums], axis=0)
        predictions = stream.predictions
        return Score(
            nats=float(nats),
            tokens=int(tokens),
            documents=documents,
            bytes_per_token=sum(int(np.sum(part.split.bytes[part.whole])) for part in stream.parts) / predictions,
            words_per_token=sum(int(np.sum(part.split.words[part.whole])) for part in stream.parts) / predictions,
            hits=int(hits) if self.labelled else None,
        )

    def losses(self, params, stream: RowStream) -> Iterator[tuple[Span, np.ndarray]]:
        """Every token's loss in nats: spans of documents, and the losses of each [count]."""
        for span, losses, _ in self.losses_and_hits(params, stream):
            yield span, losses

    def losses_and_hits(self, params, stream: RowStream) -> Iterator[tuple[Span, np.ndarray, np.ndarray]]:
        """The same, and whether each token's guess of the label is right, where there is one."""
        waiting, before = deque(), stream.begin()
        for _, of_tokens, after in self._walk(params, stream):
            waiting.append((stream.spans(before), *of_tokens))
            before = after
            if len(waiting) > 2:
                yield from in_spans(*waiting.popleft())
        for found in waiting:
            yield from in_spans(*found)

    def _walk(self, params, stream: RowStream) -> Iterator[tuple[jax.Array, tuple[jax.Array, jax.Array], Cursor]]:
        """Batch after batch: sums of losses, weights and hits, losses and hits [rows segment], and the cursor after."""
        memory, cursor = self._initial(), stream.begin()
        while not stream.finished(cursor):
            batch, after = stream.read(cursor)
            if self.reset_every:
                forget(batch["start"], stream.spans(cursor), self.reset_every * self.model.block)
            *found, memory = self._evaluated(params, self.place(batch), memory)
            cursor = after
            yield *found, cursor


def in_spans(
    spans: Sequence[Span], losses: jax.Array, hits: jax.Array
) -> Iterator[tuple[Span, np.ndarray, np.ndarray]]:
    losses, hits = np.asarray(losses), np.asarray(hits)
    for span in spans:
        here = (span.row, slice(span.at, span.at + span.count))
        yield span, losses[here], hits[here]


def forget(start: np.ndarray, spans: Sequence[Span], every: int) -> None:
    """Makes the model begin anew at each multiple of `every` tokens of a document."""
    for span in spans:
        first = span.at + -span.offset % every
        start[span.row, first : span.at + span.count : every] = True
