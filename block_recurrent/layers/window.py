"""The keys and values that window attention carries: a cache for whole segments, a ring for one token at a time.

The cache is {keys, values}, [b w h k] each, oldest first, zeros where there is no token of the document. A segment
makes the next cache by concatenation, cheap beside the attention of a segment and dear beside that of one token. So
decoding has a ring, of which a token overwrites one place:

    keys, values [b h w k]   heads first, as products want them
    filled [b w]             whether a place holds a token of the row's document
    place [b]                of the oldest token, and so of the next one to come

`ring_of` and `cache_of` convert between the two, and `attend_window` takes either and returns its own kind.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from block_recurrent.layers.attention import attend, heads_first, holds_token, scaled, sliding_window_attention
from block_recurrent.layers.relative_bias import distance_bias

Window = dict[str, jax.Array]
RING = ("keys", "values", "filled", "place")


class WindowState:
    """A layer whose state holds a window: a cache in training and for segments, a ring in decoding."""

    def for_decoding(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state as decoding keeps it; the layer takes and returns either form."""
        return state if is_ring(state) else {**state, **ring_of(state["keys"], state["values"])}

    def from_decoding(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state as training and saved streams have it."""
        if not is_ring(state):
            return state
        others = {name: part for name, part in state.items() if name not in RING}
        return {**others, **cache_of(state)}


def is_ring(state: dict[str, Any]) -> bool:
    return "place" in state


def ring_of(keys: jax.Array, values: jax.Array) -> Window:
    """The ring of a cache, its oldest token in the first place."""
    return {
        "keys": heads_first(keys),
        "values": heads_first(values),
        "filled": holds_token(keys),
        "place": jnp.zeros((len(keys),), jnp.int32),
    }


def cache_of(ring: Window) -> Window:
    """The cache of a ring: oldest first, zeros where there is no token."""
    filled = oldest_first(ring["filled"], ring["place"])[:, :, None, None]
    return {
        name: jnp.where(filled, oldest_first(heads_first(ring[name]), ring["place"]), 0.0)
        for name in ("keys", "values")
    }


def oldest_first(x: jax.Array, place: jax.Array) -> jax.Array:
    """The entries [b w ...] of rings in the order in which they came."""
    return jax.vmap(lambda x, place: jnp.roll(x, -place, axis=0))(x, place)


def oldest(x: jax.Array, place: jax.Array, axis: int = 1) -> jax.Array:
    """The entry of each row's ring that the next token overwrites: [b ... 1 ...] of [b ... w ...]."""
    return jax.vmap(lambda x, place: jax.lax.dynamic_slice_in_dim(x, place, 1, axis - 1))(x, place)


def put(x: jax.Array, new: jax.Array, place: jax.Array, axis: int = 1) -> jax.Array:
    """The rings [b ... w ...] with new entries [b ... 1 ...] in their places."""
    new = new.astype(x.dtype)
    return jax.vmap(lambda x, new, place: jax.lax.dynamic_update_slice_in_dim(x, new, place, axis - 1))(x, new, place)


def attend_window(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    state: dict[str, Any],
    start: jax.Array,
    scale: jax.Array,
    bias_table: jax.Array | None,
    *,
    keep: jax.Array | None = None,
    sees_itself: bool = False,
    mask_empty: bool = False,
    **of_segments: Any,
) -> tuple[jax.Array, Window]:
    """`sliding_window_attention` by the window in a layer's state: outputs [b n h k], and the next window."""
    if is_ring(state) and start.shape[1] == 1 and keep is None:
        return attend_in_ring(queries, keys, values, state, start, scale, bias_table, sees_itself, mask_empty)
    cache = cache_of(state) if is_ring(state) else state
    options = {"keep": keep, "sees_itself": sees_itself, "mask_empty": mask_empty, **of_segments}
    outputs, next_keys, next_values = sliding_window_attention(
        queries, keys, values, cache["keys"], cache["values"], start, scale, bias_table, **options
    )
    return outputs, ring_of(next_keys, next_values) if is_ring(state) else {"keys": next_keys, "values": next_values}


def attend_in_ring(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    ring: Window,
    start: jax.Array,
    scale: jax.Array,
    bias_table: jax.Array | None,
    sees_itself: bool,
    mask_empty: bool,
) -> tuple[jax.Array, Window]:
    """One token of every row, [b 1 h k] each: its attention over the ring [b 1 h k], and the next ring."""
    ring = emptied({name: ring[name] for name in RING}, start[:, 0])
    if sees_itself:
        ring = with_token(ring, keys, values)
    window = ring["filled"].shape[1]
    bias = None
    if bias_table is not None:
        order = (jnp.arange(window) - ring["place"][:, None]) % window  # [b w], of the oldest 0
        by_distance = distance_bias(bias_table, jnp.abs(scale), window, sees_itself)  # [h w]
        bias = jnp.moveaxis(by_distance[:, order], 0, 1)[:, :, None]  # [b h 1 w]
    filled = ring["filled"][:, None, None, :]
    documents = {"held": filled, "holds_any": sees_itself} if mask_empty else {"same_document": filled}
    held = (ring[name].astype(queries.dtype) for name in ("keys", "values"))
    outputs = heads_first(attend(heads_first(scaled(queries, scale)), *held, bias, **documents))
    if not sees_itself:
        # Nothing but the order hangs on the outputs, for no place is negative: XLA copies a ring that it might write
        # before it is read.
        place = ring["place"]
        place = jnp.where(jnp.isnan(outputs[:, 0, 0, 0]) & (place < 0), 0, place)
        ring = with_token({**ring, "place": place}, keys, values)
    return outputs, ring


def emptied(ring: Window, start: jax.Array) -> Window:
    """The ring, without tokens in rows with a start [b], nor values, of which a weight of zero would not hide a NaN."""
    values = repeated(jnp.any(start), lambda values: select_rows(start, 0.0, values), ring["values"])
    return {**ring, "values": values, "filled": ring["filled"] & ~start[:, None]}


def select_rows(rows: jax.Array, chosen: jax.Array | float, other: jax.Array) -> jax.Array:
    """`chosen` in the rows that are true, `other` [b ...] elsewhere."""
    return jnp.where(rows.reshape(-1, *[1] * (other.ndim - 1)), chosen, other).astype(other.dtype)


def repeated(times: jax.Array, function: Callable, held: Any) -> Any:
    """`function(held)` if `times` is true, else `held`: a loop of one turn or none, for a conditional copies it."""
    return jax.lax.fori_loop(0, times.astype(jnp.int32), lambda _, held: function(held), held)


def with_token(ring: Window, keys: jax.Array, values: jax.Array) -> Window:
    """The ring after one token, keys and values [b 1 h k], has taken the place of the oldest."""
    place = ring["place"]
    return {
        "keys": put(ring["keys"], heads_first(keys), place, axis=2),
        "values": put(ring["values"], heads_first(values), place, axis=2),
        "filled": put(ring["filled"], jnp.ones((len(place), 1), bool), place),
        "place": (place + 1) % ring["filled"].shape[1],
    }
