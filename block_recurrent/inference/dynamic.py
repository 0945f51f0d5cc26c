"""Dynamic evaluation: the model goes on learning from what it has read, after it was scored on it.

From Krause et al. 2018 (arXiv 1709.07432), eq. 5 to 7, as in the dynamic columns of the LRN paper. After each segment
every parameter moves against its gradient, divided by the root mean square that its gradient had in training, and back
towards its trained value in proportion to that root.

Rates and epsilon belong to the scale of those roots. As in the authors' present code (dynamiceval.py without
--oldhyper), they are taken over batches of 500 tokens, by default from all of the training split.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from block_recurrent.data.rows import FREE, RowStream
from block_recurrent.data.store import Mixture, Split
from block_recurrent.inference.evaluation import Evaluator
from block_recurrent.ranges import DROPOUT, POSITIVE, RATE, WHOLE_1

SEGMENT = 5  # tokens between two updates in the authors' code, which `rate` and `decay` are for
STATISTICS_BATCH = 500  # tokens: the authors have 100 rows of five


@dataclass(frozen=True)
class Learning:
    """How fast a model learns while it is evaluated, and how fast it comes back to what it was.

    `rate` and `decay` are for every five tokens; a longer segment, which is one update, has as much as its fives would.
    The root mean squares are of all training tokens, or of at most `statistics` of them.
    """

    rate: float = 5e-5
    decay: float = 2e-3
    epsilon: float = 2e-5
    statistics: int | None = None

    def __post_init__(self):
        ranges = {"rate": RATE, "decay": DROPOUT, "epsilon": POSITIVE, "statistics": WHOLE_1}
        for name, allowed in ranges.items():
            if name != "statistics" or self.statistics is not None:
                allowed.check(name, getattr(self, name))

    def of_segment(self, segment: int) -> tuple[float, float]:
        """Rate and decay of one update after so many tokens."""
        fives = segment / SEGMENT
        return self.rate * fives, 1.0 - (1.0 - self.decay) ** fives

    def reach(self, train: Split | Mixture) -> tuple[int, int]:
        """How many tokens the root mean squares are of, and how many the training split predicts."""
        total = sum(int(np.maximum(part.lengths - 1, 0).sum()) for part, _ in train.parts)
        return min(total, self.statistics or total), total


class DynamicEvaluator(Evaluator):
    """An evaluator of one row whose parameters follow the text; each document begins with the trained ones."""

    def __init__(
        self,
        model: nn.Module,
        segment: int,
        train: Split | Mixture,
        learning: Learning,
        progress: Callable = lambda done, total: None,
    ):
        super().__init__(model, 1, segment, uncut=True)
        self.train, self.learning, self.progress = train, learning, progress
        rate, decay = learning.of_segment(segment)

        def loss(params, batch, memory):
            losses, memory = model.apply(
                {"params": params}, batch["inputs"], batch["targets"], memory, batch["start"], method="losses"
            )
            weighted = losses * batch["weights"]
            return jnp.sum(weighted) / jnp.maximum(jnp.sum(batch["weights"]), 1.0), (losses, memory)

        def add_squares(squares, params, batch, memory):
            gradient, (_, memory) = jax.grad(loss, has_aux=True)(params, batch, memory)
            return jax.tree.map(lambda s, g: s + g * g, squares, gradient), memory

        def read_and_learn(params, trained, scales, batch, memory):
            gradient, (losses, memory) = jax.grad(loss, has_aux=True)(params, batch, memory)
            # A mean of the arrays' means, as in the authors' code: a large, rarely used table does not outweigh others.
            mean_scale = jnp.mean(jnp.stack([jnp.mean(scale) for scale in jax.tree.leaves(scales)]))

            def moved(param, start, step, scale):
                back = jnp.minimum(decay * scale / mean_scale, 1.0) * (start - param)
                return param - rate * step / (scale + learning.epsilon) + back

            return jax.tree.map(moved, params, trained, gradient, scales), losses, memory

        self._add_squares = jax.jit(add_squares, donate_argnums=(0, 3))
        self._read_and_learn = jax.jit(read_and_learn, donate_argnums=(0, 4))

    def stream(self, split: Split | Mixture) -> RowStream:
        """Documents that begin with a segment: none learns from the one before it."""
        return RowStream(split, 1, self.segment, self.segment, **self.streaming)

    def gradient_scales(self, params):
        """The root mean square of every parameter's gradient over training batches, documents in random order."""
        rows = max(STATISTICS_BATCH // self.segment, 1)
        stream = RowStream(self.train, rows, self.segment, self.segment, epochs=1)
        total = min(stream.predictions, self.learning.statistics or stream.predictions)
        squares, memory = jax.tree.map(jnp.zeros_like, params), self.model.initial_state(rows)
        batches = tokens = 0
        for batch in stream:
            squares, memory = self._add_squares(squares, params, batch, memory)
            batches, tokens = batches + 1, tokens + int(batch["weights"].sum())
            self.progress(tokens, total)
            if tokens >= total:
                break
        return jax.tree.map(lambda s: jnp.sqrt(s / batches), squares)

    def _walk(self, params, stream: RowStream):
        scales = self.gradient_scales(params)
        now = jax.tree.map(jnp.copy, params)
        memory, cursor = self._initial(), stream.begin()
        while not stream.finished(cursor):
            batch, after = stream.read(cursor)
            now, losses, memory = self._read_and_learn(now, params, scales, batch, memory)
            if after.part[0] == FREE:
                now = jax.tree.map(jnp.copy, params)
            cursor = after
            sums = jnp.stack([jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"]), jnp.zeros(())])
            yield sums, (losses, jnp.zeros_like(losses)), cursor
