"""The sliding-window transformer layer, baseline of "Block-Recurrent Transformers" (Hutchins et al. 2022, 4.1).

Keys and values of the last window are cached across segments, so a token sees exactly `window` tokens before it,
whatever the segment's length. Transformer-XL is the case segment = window. Where the authors' code differs from their
paper, the code that produced the published numbers is followed: RMS norm, a token does not see itself, and the empty
cache of a document's start is zeros that take part in the softmax. `sees_itself` and `mask_empty` follow the paper's
text: a causal mask, and attention to tokens alone.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.layers import health
from block_recurrent.layers.attention import attend_by_head, query_tile_of, scaled
from block_recurrent.layers.axes import constrain
from block_recurrent.layers.dropout import tied_dropout
from block_recurrent.layers.feed_forward import FeedForward
from block_recurrent.layers.fields import check_fields
from block_recurrent.layers.norms import rms_norm
from block_recurrent.layers.parameters import attention_mask, bias_table, kernel, project, project_unit, scale
from block_recurrent.layers.products import product
from block_recurrent.layers.window import WindowState, attend_window


class SlidingWindowLayer(WindowState, nn.Module):
    """Attention over the last `window` tokens, then a feed-forward sublayer.

    `query_tile`, a divisor of the window, is how many queries are attended at once: each tile reads window + query_tile
    keys, so smaller tiles waste less on their mask and larger ones make better matrix products. None takes what was
    measured to be fastest.
    """

    heads: int
    head_dim: int
    mlp_dim: int
    window: int
    sees_itself: bool = False
    mask_empty: bool = False
    query_tile: int | None = None
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32

    def __post_init__(self):
        check_fields(self)
        query_tile_of(self.window, self.query_tile)  # a wrong one is told when the layer is built
        super().__post_init__()

    @property
    def block(self) -> int:
        return self.window

    def initial_state(self, batch: int) -> dict[str, jax.Array]:
        shape = (batch, self.window, self.heads, self.head_dim)
        return {"keys": jnp.zeros(shape, self.dtype), "values": jnp.zeros(shape, self.dtype)}

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        state: dict[str, jax.Array],
        start: jax.Array,
        shown: tuple[jax.Array, jax.Array] | None = None,
    ):
        """Inside a feedback stack `shown` are keys and values [b s h k] of the states, attended to in parallel."""
        b, n, d = x.shape
        shape = (self.heads, self.head_dim)
        x = x.astype(self.dtype)
        u = tied_dropout(self, rms_norm(x, scale(self, "attention_norm", d)), self.dropout)
        attended, state = attend_window(
            project_unit(self, "queries", u, *shape),
            project_unit(self, "keys", u, *shape),
            project(self, "values", u, *shape),
            state,
            start,
            scale(self, "attention_scale", self.heads),
            bias_table(self, "relative_bias", self.heads),
            query_tile=query_tile_of(self.window, self.query_tile),
            keep=attention_mask(self, self.dropout, self.heads, self.window, n),
            sees_itself=self.sees_itself,
            mask_empty=self.mask_empty,
        )
        attended = attended.reshape(b, n, -1)
        if shown is not None:
            cross_queries = project_unit(self, "cross_queries", u, *shape)
            in_states = attend_by_head(scaled(cross_queries, scale(self, "cross_scale", self.heads)), *shown)
            attended = jnp.concatenate([attended, in_states.reshape(b, n, -1)], axis=-1)
        output_kernel = kernel(self, "attention_output", (attended.shape[-1], d), "heads", "embed").astype(self.dtype)
        if shown is not None and health.watched(self):
            health.sow(self, state_share=health.share_of_states(attended, output_kernel))
        x = constrain(x + product(attended, output_kernel), "batch", "length", "embed")
        y = FeedForward(self.mlp_dim, self.dropout, name="feed_forward")(x)
        return constrain(y, "batch", "length", "embed"), state
