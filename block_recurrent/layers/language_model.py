"""The language model: tied embeddings around a stack, and a loss that never holds all logits."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.layers.axes import constrain, partitioned
from block_recurrent.layers.dropout import tied_dropout
from block_recurrent.layers.norms import rms_norm
from block_recurrent.layers.parameters import scale
from block_recurrent.layers.stack import Stack


class LanguageModel(nn.Module):
    """Predicts the next token: logits, state = model(tokens, state, start), tokens [b n], logits [b n v].

    `losses` gives the same model's cross-entropies, `loss_chunk` tokens of each row at a time.
    """

    vocabulary_size: int
    dim: int
    stack: Stack
    dropout: float = 0.0
    loss_chunk: int = 256
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        init = partitioned(nn.initializers.normal(1.0), "vocab", "embed")
        self.embedding = self.param("embedding", init, (self.vocabulary_size, self.dim), jnp.float32)
        self.final_norm = scale(self, "final_norm", self.dim)

    @property
    def block(self) -> int:
        return self.stack.block

    def initial_state(self, batch: int) -> tuple:
        return self.stack.initial_state(batch)

    def features(self, tokens: jax.Array, state: tuple, start: jax.Array) -> tuple[jax.Array, tuple]:
        """What the logits are made of: [b n d]."""
        # Gathered over the width first: the partitioner has no good way from rows of a split table to split rows. In
        # float32: the gradient adds up all uses of a token, and in bfloat16 a sum stops growing at 256 terms.
        table = constrain(self.embedding, "vocab", None)
        x = jnp.take(table, tokens, axis=0).astype(self.dtype)
        x, state = self.stack(constrain(x, "batch", "length", "embed"), state, start)
        return tied_dropout(self, rms_norm(x, self.final_norm), self.dropout), state

    def logits(self, features: jax.Array) -> jax.Array:
        """Scores over the vocabulary [b n v], float32, from the transposed embedding scaled by 1 / sqrt(d)."""
        table = (self.embedding * self.dim**-0.5).astype(self.dtype)
        scores = jnp.einsum("bnd,vd->bnv", features, table, preferred_element_type=jnp.float32)
        return constrain(scores, "batch", "length", "vocab")

    def __call__(self, tokens: jax.Array, state: tuple, start: jax.Array) -> tuple[jax.Array, tuple]:
        features, state = self.features(tokens, state, start)
        return self.logits(features), state

    def losses(self, tokens: jax.Array, targets: jax.Array, state: tuple, start: jax.Array) -> tuple[jax.Array, tuple]:
        """Cross-entropy in nats of each target [b n]."""
        features, state = self.features(tokens, state, start)
        b, n, d = features.shape
        chunk = max(c for c in range(1, min(n, self.loss_chunk) + 1) if n % c == 0)
        if chunk == n:
            return cross_entropy(self.logits(features), targets), state

        @jax.checkpoint  # the backward pass makes each chunk's logits anew
        def chunk_losses(features_and_targets):
            return cross_entropy(self.logits(features_and_targets[0]), features_and_targets[1])

        chunks = (
            features.reshape(b, -1, chunk, d).swapaxes(0, 1),
            targets.reshape(b, -1, chunk).swapaxes(0, 1),
        )
        return jax.lax.map(chunk_losses, chunks).swapaxes(0, 1).reshape(b, n), state


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log softmax(logits)[target], [b n]."""
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - target_logits
