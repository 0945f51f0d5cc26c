"""The language model: a stack between the two ends of a head, and a loss that never holds all logits."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer

from block_recurrent.errors import UserError
from block_recurrent.layers.axes import constrain, devices_along
from block_recurrent.layers.dropout import dropout, tied_dropout
from block_recurrent.layers.fields import check_fields
from block_recurrent.layers.heads import Tied
from block_recurrent.layers.norms import rms_norm
from block_recurrent.layers.parameters import scale
from block_recurrent.layers.stack import Stack

SCORES = 2**26  # made at once on a device


class LanguageModel(nn.Module):
    """Predicts the next token: logits, state = model(tokens, state, start), tokens [b n], logits [b n v].

    `losses` gives the same model's cross-entropies, `loss_chunk` tokens of each row at a time: by default as many as
    make 256 MiB of scores on a device. `dim` is the width that the stack is given; vectors of tokens may have another,
    `embedding_dim`. With a head of signal_heads.py it is a model of music, or one that tells the label of a sequence.
    Rows share the masks of dropout unless, with `single_dropout`, every number is dropped by itself, as by PyTorch.
    """

    vocabulary_size: int
    dim: int
    stack: Stack
    dropout: float = 0.0
    loss_chunk: int | None = None
    dtype: jnp.dtype = jnp.float32
    head: nn.Module = Tied()  # block_recurrent/layers/heads.py says what a head is
    embedding_dim: int | None = None
    embedding_init: Initializer = nn.initializers.normal(1.0)
    embedding_dropout: float = 0.0
    final_norm: bool = True
    single_dropout: bool = False

    def __post_init__(self):
        check_fields(self)
        for name, example in (("stack", "@stack.stack()"), ("head", "@heads.Tied()")):
            if not isinstance(getattr(self, name), nn.Module):
                raise UserError(
                    f"LanguageModel.{name} is {getattr(self, name)!r}: give a flax module, such as {example}"
                )
        check_fields(self.head)
        super().__post_init__()

    def setup(self):
        self.tables = self.head.tables(self)

    @property
    def block(self) -> int:
        return self.stack.block

    def initial_state(self, batch: int) -> tuple:
        return self.stack.initial_state(batch)

    def for_decoding(self, state: tuple) -> tuple:
        """The state as one token at a time is fastest; calls take and return either form."""
        return self.stack.for_decoding(state)

    def from_decoding(self, state: tuple) -> tuple:
        """The state as training and saved streams have it."""
        return self.stack.from_decoding(state)

    def blank(self, rows: int, n: int) -> jax.Array:
        """Inputs of zeros, of the shape and type that the model takes."""
        record = self.head.record(self.vocabulary_size)
        return jnp.zeros((rows, n), jnp.int32) if record is None else jnp.zeros((rows, n, record), jnp.uint8)

    @nn.compact
    def features(self, tokens: jax.Array, state: tuple, start: jax.Array) -> tuple[jax.Array, tuple]:
        """What the logits are made of: [b n d]."""
        x = self.head.embed(self.tables, tokens, self.dtype)
        drop = dropout if self.single_dropout else tied_dropout
        x = drop(self, x, self.embedding_dropout)
        x, state = self.stack(constrain(x, "batch", "length", "embed"), state, start)
        if self.final_norm:
            x = rms_norm(x, scale(self, "final_norm", x.shape[-1]))
        return drop(self, x, self.dropout), state

    def logits(self, features: jax.Array) -> jax.Array:
        """Scores over the vocabulary [b n v], float32."""
        return self.head.logits(*self.head(self.tables, features))

    def __call__(self, tokens: jax.Array, state: tuple, start: jax.Array) -> tuple[jax.Array, tuple]:
        features, state = self.features(tokens, state, start)
        return self.logits(features), state

    def losses(self, tokens: jax.Array, targets: jax.Array, state: tuple, start: jax.Array) -> tuple[jax.Array, tuple]:
        """Cross-entropy in nats of each target [b n]."""
        features, state = self.features(tokens, state, start)
        latents, weights = self.head(self.tables, features)
        b, n = targets.shape[:2]
        most = self.loss_chunk or tokens_at_once(b, self.head.scores_of_a_token(self.vocabulary_size))
        chunk = max(c for c in range(1, min(n, most) + 1) if n % c == 0)
        if chunk == n:
            return self.head.losses(latents, weights, targets), state

        @jax.checkpoint  # the backward pass makes each chunk's logits anew
        def chunk_losses(latents_and_targets):
            return self.head.losses(latents_and_targets[0], weights, latents_and_targets[1])

        def in_chunks(x):
            return x.reshape(b, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

        chunks = jax.tree.map(in_chunks, (latents, targets))
        return jax.lax.map(chunk_losses, chunks).swapaxes(0, 1).reshape(b, n), state

    def losses_and_hits(
        self, tokens: jax.Array, targets: jax.Array, state: tuple, start: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], tuple]:
        """Of a classifier: cross-entropies and whether the likeliest label is the target, [b n] each."""
        features, state = self.features(tokens, state, start)
        return self.head.losses_and_hits(*self.head(self.tables, features), targets), state


def tokens_at_once(rows: int, scores: int) -> int:
    """How many tokens of each row a device may score at once, at so many scores a token.

    Every chunk ends with an exchange of the table's gradient, so a device with few rows takes long chunks.
    """
    here = (rows / devices_along("batch")) * (scores / devices_along("vocab"))
    return max(int(SCORES / here), 1)
