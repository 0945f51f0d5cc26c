"""Heads of models that are not of text: music, frame after frame, and sequences that have a label.

They are what block_recurrent/layers/heads.py says a head is. Frames of music are records, [b n bytes] instead of [b n]:
a bit for every key. The label of a sequence is the target of its last token, and the only one.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers.heads import Head, cross_entropy, scores
from block_recurrent.layers.parameters import linear_map

MEAN, DEVIATION = 0.1307, 0.3081  # of the grey values of MNIST, black 0 and white 1


class Output(Head):
    """A linear map to `outputs` scores, as many as a subclass says; the vectors of tokens are not used for it.

    With `projected` numbers are made vectors of the model's width by a linear map, else they are given as they are.
    """

    projected: bool = True

    @nn.compact
    def __call__(self, tables: tuple, features: jax.Array) -> tuple[jax.Array, tuple]:
        weights, bias = linear_map(self, "kernel", features.shape[-1], self.outputs, "embed", None)
        return features, (weights.T, bias)

    def logits(self, latents: jax.Array, weights: tuple) -> jax.Array:
        return scores(latents, *weights, axis=None)  # too few to be spread over devices

    def map_of(self, model: nn.Module, inputs: int) -> tuple:
        """The tables of a model that is given `inputs` numbers at each position."""
        if self.projected:
            return linear_map(model, "embedding", inputs, model.dim, None, "embed")
        if model.dim != inputs:
            raise UserError(f"{inputs} numbers as they are make vectors of {inputs}: the model's dim is {model.dim}")
        return ()


def mapped(tables: tuple, numbers: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Vectors [b n d] of the numbers at each position."""
    if not tables:
        return numbers.astype(dtype)
    weights, bias = (table.astype(dtype) for table in tables)
    return numbers.astype(dtype) @ weights + bias


class Notes(Output):
    """Polyphonic music: every key of a frame is down or up by itself, given the frames before.

    The loss of a frame is summed over its keys, in nats, as the papers count it (Boulanger-Lewandowski et al. 2012).
    A model's `vocabulary_size` is the number of `keys`.
    """

    keys: int = 88

    def record(self, vocabulary_size: int) -> int:
        return -(-vocabulary_size // 8)

    def tables(self, model: nn.Module) -> tuple:
        if model.vocabulary_size != self.keys:
            raise UserError(f"the model's vocabulary_size is {model.vocabulary_size}, its head has {self.keys} keys")
        return self.map_of(model, self.keys)

    @property
    def outputs(self) -> int:
        return self.keys

    def embed(self, tables: tuple, frames: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return mapped(tables, keys_down(frames, self.keys), dtype)

    def losses(self, latents: jax.Array, weights: tuple, frames: jax.Array) -> jax.Array:
        logits = self.logits(latents, weights)
        down = keys_down(frames, self.keys)
        return jnp.sum(jax.nn.softplus(logits) - jnp.where(down, logits, 0.0), axis=-1)


def keys_down(frames: jax.Array, keys: int) -> jax.Array:
    """Bits [b n keys] of frames [b n bytes], the first key the highest bit of the first byte."""
    return jnp.unpackbits(frames, axis=-1)[..., :keys].astype(bool)


class Classifier(Output):
    """One of `classes` for a whole sequence, told by its last token.

    With `pixels` tokens are grey values, and what the stack is given is linear in them, scaled as those of MNIST; else
    they have vectors.
    """

    classes: int = 2
    pixels: bool = False

    def tables(self, model: nn.Module) -> tuple:
        return self.map_of(model, 1) if self.pixels else super().tables(model)

    @property
    def outputs(self) -> int:
        return self.classes

    def embed(self, tables: tuple, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
        if not self.pixels:
            return super().embed(tables, tokens, dtype)
        return mapped(tables, (tokens[..., None] / 255.0 - MEAN) / DEVIATION, dtype)

    def scores_of_a_token(self, vocabulary_size: int) -> int:
        return self.classes

    def losses_and_hits(self, latents: jax.Array, weights: tuple, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The loss of each token's guess, and whether it is right."""
        logits = self.logits(latents, weights)
        return cross_entropy(logits, labels), jnp.argmax(logits, axis=-1) == labels
