"""The Transformer (Vaswani et al. 2017) as the R-Transformer's authors have it: norms before the sublayers, biased
projections, the layer norm of "The Annotated Transformer", and sinusoidal positions as a layer of their own. Theirs
drops each attention weight by itself; here all rows and windows share a mask.

A token attends to itself and the `context` - 1 tokens before it in its document: as long as the longest document, that
is all of its past.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers.attention import query_tile_of
from block_recurrent.layers.axes import constrain
from block_recurrent.layers.dropout import dropout
from block_recurrent.layers.fields import check_fields
from block_recurrent.layers.norms import layer_norm_unbiased
from block_recurrent.layers.parameters import attention_mask, linear_map, offset, scale
from block_recurrent.layers.products import product
from block_recurrent.layers.window import Window, WindowState, attend_window


class Positions(nn.Module):
    """Adds sines and cosines of a token's place in its document; y, state = layer(x, state, start).

    With a `period` places are counted anew after so many tokens: a document of any length has only those that were
    seen in training. If it is no shorter than the context, no two tokens that attention sees together have the same.
    """

    period: int | None = None

    block = 1

    def __post_init__(self):
        check_fields(self)
        super().__post_init__()

    def initial_state(self, batch: int) -> dict[str, jax.Array]:
        return {"position": jnp.zeros((batch,), jnp.int32)}  # of the next token

    @nn.compact
    def __call__(self, x: jax.Array, state: dict[str, jax.Array], start: jax.Array):
        n, d = x.shape[1:]
        at = jnp.arange(n)
        begins = jax.lax.cummax(jnp.where(start, at, -1), axis=1)  # [b n] of the token's document, -1 if before
        position = jnp.where(begins < 0, state["position"][:, None] + at, at - begins)
        position = position if self.period is None else position % self.period
        waves = jnp.exp(jnp.arange(0, d, 2) * (-math.log(10000.0) / d))
        angles = position[..., None].astype(jnp.float32) * waves  # [b n d/2]
        signal = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*x.shape[:2], -1)[..., :d]
        return x + signal.astype(x.dtype), {"position": position[:, -1] + 1}


class TransformerLayer(WindowState, nn.Module):
    """Attention over the last `context` tokens, then a feed-forward sublayer of four times the width."""

    dim: int
    heads: int
    context: int
    query_tile: int | None = None
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32

    block = 1

    def __post_init__(self):
        check_fields(self)
        if self.dim % self.heads:
            raise UserError(f"dim {self.dim} does not divide into {self.heads} heads")
        query_tile_of(self.context, self.query_tile)
        super().__post_init__()

    def initial_state(self, batch: int) -> dict[str, jax.Array]:
        shape = (batch, self.context, self.heads, self.dim // self.heads)
        return {"keys": jnp.zeros(shape, self.dtype), "values": jnp.zeros(shape, self.dtype)}

    @nn.compact
    def __call__(self, x: jax.Array, state: dict[str, jax.Array], start: jax.Array):
        return self.attention_and_feed_forward(x.astype(self.dtype), state, start)

    def attention_and_feed_forward(self, x: jax.Array, state: dict[str, jax.Array], start: jax.Array):
        kept = {}

        def attention(u):
            y, window = self.attended(u, state, start)
            kept.update(window)
            return y

        x = self.sublayer("attention", x, attention)
        return self.sublayer("feed_forward", x, self.feed_forward), kept

    def sublayer(self, name: str, x: jax.Array, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """x + function(norm(x))."""
        d = x.shape[-1]
        u = layer_norm_unbiased(x, scale(self, f"{name}_norm", d), offset(self, f"{name}_norm_offset", d))
        return constrain(x + dropout(self, function(u), self.dropout), "batch", "length", "embed")

    def linear(self, name: str, x: jax.Array, width: int, *axes: str) -> jax.Array:
        weights, bias = linear_map(self, name, x.shape[-1], width, *axes)
        return product(x, weights.astype(x.dtype)) + bias.astype(x.dtype)

    def attended(self, u: jax.Array, state: dict[str, jax.Array], start: jax.Array) -> tuple[jax.Array, Window]:
        """The output of attention [b n d], and the next window."""

        def in_heads(name):
            flat = self.linear(name, u, self.dim, "embed", "heads")
            return constrain(flat.reshape(*u.shape[:2], self.heads, -1), "batch", "length", "heads", None)

        y, window = attend_window(  # eqs. 4 to 6 of the R-Transformer's paper
            in_heads("queries"),
            in_heads("keys"),
            in_heads("values"),
            state,
            start,
            jnp.full((self.heads,), (self.dim // self.heads) ** -0.5),
            None,
            query_tile=query_tile_of(self.context, self.query_tile),
            keep=attention_mask(self, self.dropout, self.heads, self.context, u.shape[1]),
            sees_itself=True,
            mask_empty=True,
            starts_anywhere=True,
        )
        y = self.linear("attention_output", y.reshape(*u.shape[:2], -1), self.dim, "heads", "embed")
        return y, window

    def feed_forward(self, u: jax.Array) -> jax.Array:
        hidden = nn.relu(self.linear("hidden", u, 4 * self.dim, "embed", "mlp"))  # eq. 7
        hidden = dropout(self, constrain(hidden, "batch", "length", "mlp"), self.dropout)
        return self.linear("output", hidden, self.dim, "mlp", "embed")
