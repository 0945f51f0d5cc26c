"""Dynamic evaluation: the model goes on learning from what it has read, after it was scored on it.

From Krause et al. 2018 (arXiv 1709.07432), eq. 5 to 7, as in the dynamic columns of the LRN paper. After each segment
every parameter moves against its gradient, divided by the root mean square that its gradient had in training, and back
towards its trained value in proportion to that root.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.data.rows import FREE, RowStream
from block_recurrent.data.store import Mixture, Split
from block_recurrent.errors import UserError
from block_recurrent.inference.evaluation import Evaluator


@dataclass(frozen=True)
class Learning:
    """How fast a model learns while it is evaluated, and how fast it comes back to what it was."""

    rate: float = 2e-3  # these are the defaults of the authors' code
    decay: float = 0.02
    epsilon: float = 1e-3

    def __post_init__(self):
        if self.rate < 0 or not 0 <= self.decay < 1 or self.epsilon <= 0:
            raise UserError(f"{self}: a rate of 0 or more, a decay from 0 to below 1, an epsilon above 0")


class DynamicEvaluator(Evaluator):
    """An evaluator of one row whose parameters follow the text; each document begins with the trained ones.

    What gradients had in training is taken from the first `batches` segments of `train`.
    """

    def __init__(self, model: nn.Module, segment: int, train: Split | Mixture, learning: Learning, batches: int = 200):
        super().__init__(model, 1, segment, uncut=True)
        self.train, self.batches = train, batches

        def loss(params, batch, memory):
            losses, memory = model.apply(
                {"params": params}, batch["inputs"], batch["targets"], memory, batch["start"], method="losses"
            )
            weighted = losses * batch["weights"]
            return jnp.sum(weighted) / jnp.maximum(jnp.sum(batch["weights"]), 1.0), (losses, memory)

        self._gradient = jax.jit(jax.grad(loss, has_aux=True))

        def read_and_learn(params, trained, scales, batch, memory):
            gradient, (losses, memory) = jax.grad(loss, has_aux=True)(params, batch, memory)

            def moved(param, start, step, scale):
                back = jnp.minimum(learning.decay * scale / mean_scale, 1.0) * (start - param)
                return param - learning.rate * step / (scale + learning.epsilon) + back

            mean_scale = sum(map(jnp.sum, jax.tree.leaves(scales))) / sum(s.size for s in jax.tree.leaves(scales))
            return jax.tree.map(moved, params, trained, gradient, scales), losses, memory

        self._read_and_learn = jax.jit(read_and_learn, donate_argnums=(0, 4))

    def stream(self, split: Split | Mixture) -> RowStream:
        """Documents that begin with a segment: none learns from the one before it."""
        return RowStream(split, 1, self.segment, self.segment, **self.streaming)

    def gradient_scales(self, params):
        """The root mean square of every parameter's gradient over the first batches of the training data."""
        stream, squares, seen = self.stream(self.train), jax.tree.map(jnp.zeros_like, params), 0
        memory, cursor = self._initial(), stream.begin()
        while not stream.finished(cursor) and seen < self.batches:
            batch, cursor = stream.read(cursor)
            gradient, (_, memory) = self._gradient(params, batch, memory)
            squares, seen = jax.tree.map(lambda s, g: s + g * g, squares, gradient), seen + 1
        return jax.tree.map(lambda s: jnp.sqrt(s / seen), squares)

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
