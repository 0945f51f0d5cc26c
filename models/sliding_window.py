"""The sliding-window transformer layer, baseline of "Block-Recurrent Transformers" (Hutchins et al. 2022, 4.1).

Keys and values of the last window are cached across segments, so a token sees exactly `window` tokens before it,
whatever the segment's length. Transformer-XL is the case segment = window. Where the authors' code differs from their
paper, the code that produced the published numbers is followed: RMS norm, a token does not see itself, and the empty
cache of a document's start is zeros that take part in the softmax.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers.attention import default_query_tile, sliding_window_attention
from block_recurrent.layers.axes import constrain, partitioned
from block_recurrent.layers.dropout import dropout_key, keep_mask, tied_dropout
from block_recurrent.layers.feed_forward import FeedForward, kernel, vector
from block_recurrent.layers.norms import l2_normalise, rms_norm
from block_recurrent.layers.relative_bias import BUCKETS


class SlidingWindowLayer(nn.Module):
    """Attention over the last `window` tokens, then a feed-forward sublayer.

    `query_tile`, a divisor of the window, is how many queries are attended at once: each tile reads window + query_tile
    keys, so smaller tiles waste less on their mask and larger ones make better matrix products. None takes what was
    measured to be fastest.
    """

    heads: int
    head_dim: int
    mlp_dim: int
    window: int
    query_tile: int | None = None
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32

    def __post_init__(self):
        if self.query_tile is not None and (self.query_tile < 1 or self.window % self.query_tile):
            raise UserError(f"query_tile {self.query_tile} does not divide the window {self.window}")
        super().__post_init__()

    @property
    def block(self) -> int:
        return self.window

    def initial_state(self, batch: int) -> dict[str, jax.Array]:
        shape = (batch, self.window, self.heads, self.head_dim)
        return {"keys": jnp.zeros(shape, self.dtype), "values": jnp.zeros(shape, self.dtype)}

    @nn.compact
    def __call__(self, x: jax.Array, state: dict[str, jax.Array], start: jax.Array):
        b, n, d = x.shape
        width = self.heads * self.head_dim
        x = x.astype(self.dtype)

        u = rms_norm(x, vector(self, "attention_norm", d))
        u = tied_dropout(self, u, self.dropout)

        def project(name):
            projected = u @ kernel(self, name, (d, width), "embed", "heads").astype(self.dtype)
            return projected.reshape(b, n, self.heads, self.head_dim)  # [b n h k]

        keys, values, queries = (
            l2_normalise(project("keys")),
            project("values"),
            l2_normalise(project("queries")),
        )
        keys, values, queries = (constrain(a, "batch", "length", "heads", None) for a in (keys, values, queries))
        scale = vector(self, "attention_scale", self.heads)
        table = self.param(
            "relative_bias",
            partitioned(nn.initializers.normal(BUCKETS**-0.5), None, None),
            (self.heads, BUCKETS),
            jnp.float32,
        )
        key = dropout_key(self, self.dropout)
        keep = None
        if key is not None:  # one mask for all rows and windows, applied after the softmax
            keep = keep_mask(key, self.dropout, (self.heads, self.window, 2 * self.window), jnp.float32)
        attended, next_keys, next_values = sliding_window_attention(
            queries,
            keys,
            values,
            state["keys"],
            state["values"],
            start,
            scale,
            table,
            self.query_tile or default_query_tile(self.window),
            keep,
        )
        output_kernel = kernel(self, "attention_output", (width, d), "heads", "embed")
        x = x + attended.reshape(b, n, width) @ output_kernel.astype(self.dtype)
        x = constrain(x, "batch", "length", "embed")
        y = FeedForward(self.mlp_dim, self.dropout, name="feed_forward")(x)
        return constrain(y, "batch", "length", "embed"), {"keys": next_keys, "values": next_values}
