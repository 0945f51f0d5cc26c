"""The layer with a memory of "Memorizing Transformers" (Wu et al. 2022, arXiv 2203.08913).

A sliding-window layer that besides its window attends to the `top_k` best of up to `memory` older keys and values of
the same document (3.1), each head to its own. Nothing is learnt through the memory: what is in it is a constant,
queries alone have gradients. It has no positions, its keys have length one as all have here (3.2), its queries and
their scale are those of the window, and one learned number a head weighs it against the window. In the window the paper
has T5's relative bias; the authors' released config (meliad) leaves it out of this layer, here `relative_bias` False.

The paper adds a whole segment to the memory after a training step, so that what a token finds there depends on how its
text was cut. Here a token enters when it leaves the window: a token sees the `window` tokens before it in the window
and exactly the `memory` tokens before those in the memory, in training, in odd pieces and one token at a time. The
oldest is forgotten first, and everything at a document's start. (Two tokens whose scores differ by less than rounding
may stand for each other as the last of the `top_k`; the approximate search, where it approximates, has more of that.)

The paper does not say what a token sees whose memory is still empty: here the gate is closed to it, so that a document
begins as in a sliding-window layer.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers import health
from block_recurrent.layers.attention import heads_first, query_tile_of, scaled
from block_recurrent.layers.axes import constrain, devices_along
from block_recurrent.layers.dropout import dropout_key, keep_mask, tied_dropout
from block_recurrent.layers.feed_forward import FeedForward
from block_recurrent.layers.fields import check_fields
from block_recurrent.layers.norms import rms_norm
from block_recurrent.layers.parameters import (
    attention_mask,
    bias_table,
    kernel,
    offset,
    project,
    project_unit,
    scale,
)
from block_recurrent.layers.products import product
from block_recurrent.layers.relative_bias import BUCKETS, MASKED
from block_recurrent.layers.window import WindowState, attend_window, cache_of, is_ring, oldest

SEARCHES = ("exact", "approximate")

State = dict[str, jax.Array]


class MemorizingLayer(WindowState, nn.Module):
    """Attention over the last `window` tokens and over what is found in the memory, then a feed-forward sublayer.

    The memory is a ring: the document's token number p lies in place p % memory, so that writing costs what is written.
    `position` counts the tokens of the document; past memory + window it counts in rounds, and never overflows.

    `search` is "exact", or "approximate": as fast as a TPU can, it finds `recall_target` of the best on average;
    elsewhere it is exact too. `search_tile` queries of a row search at once: their scores, [b h search_tile memory] in
    float32, are the most that a call holds of them.
    """

    heads: int
    head_dim: int
    mlp_dim: int
    window: int
    memory: int = 32768
    top_k: int = 32
    search: str = "exact"
    recall_target: float = 0.95
    search_tile: int = 64
    relative_bias: bool = True
    sees_itself: bool = False
    mask_empty: bool = False
    query_tile: int | None = None
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32

    def __post_init__(self):
        check_fields(self)
        if self.search not in SEARCHES:
            raise UserError(f"search {self.search!r} is not one of {', '.join(SEARCHES)}")
        query_tile_of(self.window, self.query_tile)  # a wrong one is told when the layer is built
        super().__post_init__()

    @property
    def block(self) -> int:
        return self.window

    def initial_state(self, batch: int) -> State:
        window = (batch, self.window, self.heads, self.head_dim)
        memory = (batch, self.heads, self.memory, self.head_dim)  # a head's keys together: a product with them is fast
        return {
            "keys": jnp.zeros(window, self.dtype),
            "values": jnp.zeros(window, self.dtype),
            "memory_keys": jnp.zeros(memory, self.dtype),
            "memory_values": jnp.zeros(memory, self.dtype),
            "position": jnp.zeros((batch,), jnp.int32),
        }

    @nn.compact
    def __call__(self, x: jax.Array, state: State, start: jax.Array) -> tuple[jax.Array, State]:
        b, n, d = x.shape
        shape = (self.heads, self.head_dim)
        x = x.astype(self.dtype)
        u = tied_dropout(self, rms_norm(x, scale(self, "attention_norm", d)), self.dropout)
        queries, keys = (project_unit(self, name, u, *shape) for name in ("queries", "keys"))
        values = project(self, "values", u, *shape)
        attention_scale = scale(self, "attention_scale", self.heads)
        no_bias = jnp.zeros((self.heads, BUCKETS))
        by_distance = bias_table(self, "relative_bias", self.heads) if self.relative_bias else no_bias
        in_window, window = attend_window(
            queries,
            keys,
            values,
            state,
            start,
            attention_scale,
            by_distance,
            query_tile=query_tile_of(self.window, self.query_tile),
            keep=attention_mask(self, self.dropout, self.heads, self.window, n),
            sees_itself=self.sees_itself,
            mask_empty=self.mask_empty,
        )
        memory = tuple(jax.lax.stop_gradient(state[name]) for name in ("memory_keys", "memory_values"))
        # A state is split by rows alone, so the memory has all heads everywhere: they are exchanged as they leave.
        left = tuple(
            constrain(jax.lax.stop_gradient(left_window(state, name, new)), "batch", "length", None, None)
            for name, new in (("keys", keys), ("values", values))
        )
        origin = origins(start, state["position"])
        in_memory, found_any = self.attend_memory(
            scaled(queries, attention_scale), memory, left, origin, state["position"]
        )
        gate = jax.nn.sigmoid(offset(self, "memory_gate", self.heads))
        health.sow(self, memory_gate=jnp.mean(gate))
        gate = jnp.where(found_any, gate, 0.0)[..., None].astype(self.dtype)  # [b n h 1]
        attended = (in_memory * gate + in_window * (1.0 - gate)).reshape(b, n, -1)  # 3.1: V_m g + V_c (1 - g)
        output_kernel = kernel(self, "attention_output", (attended.shape[-1], d), "heads", "embed").astype(self.dtype)
        x = constrain(x + product(attended, output_kernel), "batch", "length", "embed")
        y = FeedForward(self.mlp_dim, self.dropout, name="feed_forward")(x)

        memory_keys, memory_values = (
            remember(old, new, start, origin[:, -1], self.window, in_memory)
            for old, new in zip(memory, left, strict=True)
        )
        next_state = {
            **window,
            "memory_keys": memory_keys,
            "memory_values": memory_values,
            "position": in_rounds(n - origin[:, -1], self.memory, self.window),
        }
        return constrain(y, "batch", "length", "embed"), next_state

    def attend_memory(
        self,
        queries: jax.Array,
        memory: tuple[jax.Array, jax.Array],
        left: tuple[jax.Array, jax.Array],
        origin: jax.Array,
        position: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Of scaled queries [b n h k]: what they find in the memory [b n h k], and whether they found anything [b n h].

        memory, keys and values [b h m k]; left, those that leave the window during the call, [b n h k]; origin [b n].
        """
        b, n, h, _ = queries.shape
        tile = min(n, self.search_tile)
        found_at_most = min(self.top_k, self.memory)
        left = tuple(a.swapaxes(1, 2) for a in left)  # [b h n k]
        key = dropout_key(self, self.dropout)
        keep = None if key is None else keep_mask(key, self.dropout, (h, tile, found_at_most), jnp.float32)
        # The backward pass takes keys and values from the memory anew: kept, they would be top_k times the queries.
        attend = jax.checkpoint(attend_found)

        def one_tile(inputs):
            queries, at, origin = inputs
            visible = jnp.concatenate(
                [
                    visible_in_memory(at, origin, position, self.memory, self.window, self.sees_itself),
                    visible_of_left(at, origin, n, self.memory, self.window, self.sees_itself),
                ],
                axis=-1,
            )
            scores = best_scores(jax.lax.stop_gradient(queries), memory[0], left[0], visible)
            found = self.best(scores, found_at_most)
            return attend(queries, memory, left, found, keep), found[..., 0] >= 0

        pad = -n % tile
        at = jnp.arange(n + pad).reshape(-1, tile)  # [t q]
        tiles = jnp.pad(queries, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(b, -1, tile, *queries.shape[2:])
        origins = jnp.pad(origin, ((0, 0), (0, pad))).reshape(b, -1, tile)
        inputs = tiles.transpose(1, 0, 3, 2, 4), at, origins.swapaxes(0, 1)  # [t b h q k], [t q], [t b q]
        if n == tile:
            outputs = jax.tree.map(lambda a: a[None], one_tile(jax.tree.map(lambda a: a[0], inputs)))
        else:
            outputs = jax.lax.map(one_tile, inputs)
        in_memory, found_any = (jnp.moveaxis(a, (0, 3), (1, 2)) for a in outputs)  # [b t q h ...]
        return tuple(a.reshape(b, -1, *a.shape[3:])[:, :n] for a in (in_memory, found_any))

    def best(self, scores: jax.Array, count: int) -> jax.Array:
        """Where the `count` best of scores [b h q m] are, best first; -1 where there are not so many to be seen."""

        def search(scores: jax.Array) -> jax.Array:
            if self.search == "exact":
                scores, places = jax.lax.top_k(scores, count)
            else:
                scores, places = jax.lax.approx_max_k(scores, count, recall_target=self.recall_target)
            return jnp.where(scores > MASKED / 2, places, -1)

        if jax.sharding.get_abstract_mesh().size > 1:
            # The partitioner does not split a search: it would bring the scores of all rows to every device.
            axes = ("batch", "heads")
            axes = (
                None if size % devices_along(name) else name for name, size in zip(axes, scores.shape, strict=False)
            )
            split = nn.logical_to_mesh_axes((*axes, None, None))
            search = jax.shard_map(search, in_specs=split, out_specs=split)
        return search(scores)


def origins(start: jax.Array, position: jax.Array) -> jax.Array:
    """Where in the call the document of each token begins, [b n]: before it, so negative, for one that goes on."""
    begun = jnp.where(start, jnp.arange(start.shape[1]), -position[:, None])
    return jax.lax.cummax(begun, axis=1)


def in_rounds(position: jax.Array, memory: int, window: int) -> jax.Array:
    """A position that stands for the same place in a full memory, below 2 * memory + window."""
    return jnp.where(position < memory + window, position, memory + window + (position - window) % memory)


def left_window(state: State, name: str, new: jax.Array) -> jax.Array:
    """What leaves the window's keys or values when new entries [b n h k] come, oldest first, [b n h k]."""
    if is_ring(state) and new.shape[1] == 1:
        return heads_first(oldest(state[name], state["place"], axis=2)).astype(new.dtype)
    cached = (cache_of(state) if is_ring(state) else state)[name]  # [b w h k]
    n, window = new.shape[1], cached.shape[1]
    return jnp.concatenate([cached[:, :n].astype(new.dtype), new[:, : max(n - window, 0)]], axis=1)


def visible_in_memory(
    at: jax.Array, origin: jax.Array, position: jax.Array, memory: int, window: int, sees_itself: bool
) -> jax.Array:
    """Which places of the memory the tokens `at` [q] of a call may see, [b q m]; origin [b q], position [b].

    Its contents are of the document before the call. For each token that has left the window since, the oldest is
    forgotten, though it is overwritten only when the call ends.
    """
    written = jnp.maximum(position - window, 0)[:, None]  # [b 1]
    age = (written - 1 - jnp.arange(memory)) % memory  # [b m], of the newest 0
    not_forgotten = age[:, None, :] + at[:, None] + int(sees_itself) < memory
    same_document = origin == -position[:, None]
    return (age < written)[:, None, :] & not_forgotten & same_document[:, :, None]


def visible_of_left(at: jax.Array, origin: jax.Array, n: int, memory: int, window: int, sees_itself: bool) -> jax.Array:
    """Which of the n tokens that leave the window in the call the tokens `at` [q] may see, [b q n]; origin [b q]."""
    age = at[:, None] + int(sees_itself) - 1 - jnp.arange(n)  # [q n]
    same_document = jnp.arange(n) - window >= origin[:, :, None]
    return (age >= 0) & (age < memory) & same_document


def best_scores(queries: jax.Array, memory: jax.Array, left: jax.Array, visible: jax.Array) -> jax.Array:
    """Scores of queries [b h q k] with keys [b h m k] and [b h n k], one after the other: [b h q m+n], float32."""
    scores = [
        jnp.einsum("bhqk,bhmk->bhqm", queries, keys.astype(queries.dtype), preferred_element_type=jnp.float32)
        for keys in (memory, left)
    ]
    return jnp.where(visible[:, None], jnp.concatenate(scores, axis=-1), MASKED)


def attend_found(
    queries: jax.Array,
    memory: tuple[jax.Array, jax.Array],
    left: tuple[jax.Array, jax.Array],
    found: jax.Array,
    keep: jax.Array | None,
) -> jax.Array:
    """Softmax attention of queries [b h q k] over the entries found, [b h q top_k]: [b h q k], zeros if there are none.

    `keep` is a dropout mask [h q top_k].
    """
    keys, values = (taken(*entries, found) for entries in zip(memory, left, strict=True))  # [b h q top_k k]
    held = found >= 0
    logits = jnp.einsum("bhqk,bhqck->bhqc", queries, keys.astype(queries.dtype), preferred_element_type=jnp.float32)
    weights = jnp.where(held, jax.nn.softmax(jnp.where(held, logits, MASKED), axis=-1), 0.0)
    weights = weights if keep is None else weights * keep
    return jnp.einsum("bhqc,bhqck->bhqk", weights.astype(queries.dtype), values.astype(queries.dtype))


def taken(memory: jax.Array, left: jax.Array, places: jax.Array) -> jax.Array:
    """Entries [b h q c k] of memory [b h m k] and, counted on from its end, of left [b h n k]."""

    def of_head(memory: jax.Array, left: jax.Array, places: jax.Array) -> jax.Array:
        old = memory.at[places].get(mode="clip")
        new = left.at[places - memory.shape[0]].get(mode="clip")
        return jnp.where((places < memory.shape[0])[..., None], old.astype(new.dtype), new)

    return jax.vmap(jax.vmap(of_head))(memory, left, places)


def remember(
    memory: jax.Array, left: jax.Array, start: jax.Array, origin: jax.Array, window: int, read: jax.Array
) -> jax.Array:
    """The memory [b h m k] after a call in which left [b n h k] have left the window; the last document's origin [b].

    A row in which a document has started (start [b n]) holds that document alone. `read` is what the call has found.
    """
    size, n = memory.shape[2], left.shape[1]
    begun = jnp.any(start, axis=1)[:, None, None, None]
    # Nothing hangs on `read` but the order: XLA copies a memory that it might write before it is read.
    look = jnp.any(start) | jnp.any(jnp.isnan(read))
    memory = jax.lax.cond(look, lambda: jnp.where(begun, 0.0, memory), lambda: memory)
    number = jnp.arange(max(n - size, 0), n) - window - origin[:, None]  # of each token in its document, [b min(n,m)]
    places = jnp.where(number >= 0, number % size, size)  # outside the memory, and so nowhere, if of another document
    write = jax.vmap(lambda memory, places, new: memory.at[:, places].set(new.swapaxes(0, 1), mode="drop"))
    memory = write(memory, places, left[:, max(n - size, 0) :].astype(memory.dtype))
    return constrain(memory, "batch", None, None, None)
