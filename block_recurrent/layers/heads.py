"""Heads of a language model: how tokens become vectors, and features the probabilities of the next token.

Those of music and of labels are in signal_heads.py.

    tables = head.tables(model)                 # declared in the model, for both of its ends
    x = head.embed(tables, tokens, dtype)       # [b n] to [b n d]
    latents, weights = head(tables, features)   # what there is per token, [b n ...], and for all tokens
    losses = head.losses(latents, weights, targets)   # of any part of the tokens, [b n]
    logits = head.logits(latents, weights)            # [b n v]

A head takes the width of the features as it comes. Scores and whatever is made of them are float32.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer

from block_recurrent.layers.axes import constrain, partitioned
from block_recurrent.layers.dropout import row_dropout
from block_recurrent.layers.parameters import kernel, kernel_init, offset
from block_recurrent.layers.products import product


class Head(nn.Module):
    """One table of token vectors, projected where the model is of another width; scores of a softmax."""

    def tables(self, model: nn.Module) -> tuple[jax.Array, jax.Array | None]:
        width = model.embedding_dim or model.dim
        init = partitioned(model.embedding_init, "vocab", "embed")
        embedding = model.param("embedding", init, (model.vocabulary_size, width), jnp.float32)
        if width == model.dim:
            return embedding, None
        return embedding, kernel(model, "embedding_projection", (width, model.dim), "embed", None)

    def embed(self, tables: tuple, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
        embedding, projection = tables
        vectors = look_up(embedding, tokens).astype(dtype)
        return vectors if projection is None else product(vectors, projection.astype(dtype))

    def record(self, vocabulary_size: int) -> int | None:
        """How many numbers make a position of the input, [b n record] then; None for tokens, [b n]."""
        return None

    def scores_of_a_token(self, vocabulary_size: int) -> int:
        """How many numbers a token's loss is made of, at most."""
        return vocabulary_size

    def logits(self, latents: jax.Array, weights: tuple) -> jax.Array:
        return scores(latents, *weights)

    def losses(self, latents: jax.Array, weights: tuple, targets: jax.Array) -> jax.Array:
        return cross_entropy(self.logits(latents, weights), targets)


class Tied(Head):
    """The embedding transposed gives the scores, divided by the root of its width if `scaled`."""

    scaled: bool = True
    bias: bool = False

    @nn.compact
    def __call__(self, tables: tuple, features: jax.Array) -> tuple[jax.Array, tuple]:
        embedding, _ = tables
        vocabulary_size, width = embedding.shape
        if features.shape[-1] != width:
            projection = kernel(self, "projection", (features.shape[-1], width), "embed", None)
            features = product(features, projection.astype(features.dtype))
        return features, (embedding, offset(self, "bias", vocabulary_size, "vocab") if self.bias else None)

    def logits(self, latents: jax.Array, weights: tuple) -> jax.Array:
        embedding, bias = weights
        # The latents are scaled, not the table: there are fewer of them, and no copy of the table is made.
        return scores(latents * embedding.shape[1] ** -0.5 if self.scaled else latents, embedding, bias)


class Untied(Head):
    """A kernel and a bias of its own give the scores."""

    kernel_init: Initializer = kernel_init

    @nn.compact
    def __call__(self, tables: tuple, features: jax.Array) -> tuple[jax.Array, tuple]:
        vocabulary_size, width = tables[0].shape[0], features.shape[-1]
        init = partitioned(self.kernel_init, "embed", "vocab")
        output = self.param("kernel", init, (width, vocabulary_size), jnp.float32)
        return features, (output.T, offset(self, "bias", vocabulary_size, "vocab"))


class MixtureOfSoftmaxes(Head):
    """Several softmaxes over the embedding, each of its own latent, mixed by a prior (Yang et al. 2018, eq. 2).

    `dropout` drops features of the latents, the same for all tokens of a row.
    """

    experts: int = 15
    dropout: float = 0.0

    @nn.compact
    def __call__(self, tables: tuple, features: jax.Array) -> tuple[tuple, tuple]:
        embedding, _ = tables
        (vocabulary_size, width), dtype = embedding.shape, features.dtype
        into = kernel(self, "latents", (features.shape[-1], self.experts * width), "embed", "mlp").astype(dtype)
        latents = jnp.tanh(product(features, into) + offset(self, "latents_bias", into.shape[1], "mlp").astype(dtype))
        latents = row_dropout(self, latents, self.dropout).reshape(*features.shape[:-1], self.experts, width)
        prior = kernel(self, "prior", (features.shape[-1], self.experts), "embed", None).astype(dtype)
        prior = jnp.einsum("bnd,de->bne", features, prior, preferred_element_type=jnp.float32)
        bias = offset(self, "bias", vocabulary_size, "vocab")
        return (latents, jax.nn.log_softmax(prior)), (embedding, bias)

    def scores_of_a_token(self, vocabulary_size: int) -> int:
        return self.experts * vocabulary_size

    def logits(self, latents: tuple, weights: tuple) -> jax.Array:
        """The logarithm of the mixture."""
        latents, prior = latents
        each = jax.nn.log_softmax(scores(latents, *weights))  # [b n experts v]
        return jax.nn.logsumexp(prior[..., None] + each, axis=-2)

    def losses(self, latents: tuple, weights: tuple, targets: jax.Array) -> jax.Array:
        latents, prior = latents
        each = cross_entropy(scores(latents, *weights), targets[..., None])  # [b n experts]
        return -jax.nn.logsumexp(prior - each, axis=-1)


def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of the table [v d] for tokens [b n], float32."""
    # Gathered over the width first: the partitioner has no good way from rows of a split table to split rows. In
    # float32: the gradient adds up all uses of a token, and in bfloat16 a sum stops growing at 256 terms.
    return jnp.take(constrain(table, "vocab", None), tokens, axis=0)


def scores(
    latents: jax.Array, table: jax.Array, bias: jax.Array | None = None, axis: str | None = "vocab"
) -> jax.Array:
    """latents [b n ... d] against every row of the table [v d]: float32 [b n ... v], v along that axis of the mesh."""
    # Cast here, where a loss in chunks adds up the table's gradient: so the sum is float32.
    found = jnp.einsum("...d,vd->...v", latents, table.astype(latents.dtype), preferred_element_type=jnp.float32)
    found = constrain(found, "batch", "length", *[None] * (found.ndim - 3), axis)
    return found if bias is None else found + bias


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log softmax(logits)[target], [b n]."""
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - target_logits
