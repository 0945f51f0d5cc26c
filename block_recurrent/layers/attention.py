"""Sliding-window attention in tiles: every query sees exactly `window` keys, by default those strictly before it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from block_recurrent.errors import UserError
from block_recurrent.layers.products import inner_products, product
from block_recurrent.layers.relative_bias import MASKED, window_bias

WEIGHTS = "attention_weights"  # their name for jax.checkpoint


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    bias: jax.Array | None = None,
    same_document: jax.Array | None = None,
    keep: jax.Array | None = None,
    held: jax.Array | None = None,
    holds_any: bool = False,
) -> jax.Array:
    """Softmax attention of queries [... q k] over keys and values [... j k], the softmax in float32.

    Keys and values outside a query's document (`same_document` false) count as zeros, which still take their share of
    the softmax by their position's bias. Those that are not `held` take none; a query for which nothing is held gets
    zeros, unless `holds_any` says that there is none. `keep` is a dropout mask. All are broadcast to [... q j].
    """
    logits = inner_products(queries, keys)
    if same_document is not None:
        logits = jnp.where(same_document, logits, 0.0)
    logits = logits if bias is None else logits + bias
    if held is not None:
        logits = jnp.where(held, logits, MASKED)
    weights = softmax(logits, values.dtype)
    if same_document is not None:
        weights = jnp.where(same_document, weights, 0.0)
    if held is not None and not holds_any:
        weights = jnp.where(held, weights, 0.0)
    if keep is not None:
        weights = weights * keep
    return product(weights.astype(values.dtype), values)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def softmax(logits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Softmax over the last axis. The backward pass keeps the weights alone, in `dtype`, and takes no exponential."""
    return jax.nn.softmax(logits, axis=-1)


def softmax_forward(logits, dtype):
    kept = checkpoint_name(jax.nn.softmax(logits, axis=-1).astype(dtype), WEIGHTS)
    return kept.astype(jnp.float32), kept


def softmax_backward(dtype, weights, into):
    weights = weights.astype(jnp.float32)
    return (weights * (into - jnp.sum(weights * into, axis=-1, keepdims=True)),)


softmax.defvjp(softmax_forward, softmax_backward)


def heads_first(x: jax.Array) -> jax.Array:
    """[... n h k] to [... h n k], or back: products are fast where the vectors of a head lie together."""
    return x.swapaxes(-2, -3)


def attend_by_head(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Attention of queries [... q h k] over keys and values [... j h k]."""
    return heads_first(attend(heads_first(queries), heads_first(keys), heads_first(values)))


def attention_weights(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """The weights [... q j] of queries [... q k] for keys [... j k], for inspection."""
    return jax.nn.softmax(inner_products(queries, keys), axis=-1)


def scaled(queries: jax.Array, scale: jax.Array) -> jax.Array:
    """Queries [... h k] times the learned scale of their head."""
    return (queries * jnp.abs(scale)[:, None]).astype(queries.dtype)


def holds_token(keys: jax.Array) -> jax.Array:
    """Where keys [... h k] are those of a token, [...]: they have length one, and an empty place holds zeros."""
    return jnp.any(keys != 0.0, axis=(-2, -1))


def query_tile_of(window: int, query_tile: int | None = None) -> int:
    """The tile asked for, or the fastest on CPU: half of a window of 64 or 128, a quarter of a larger one.

    Measured by benchmarks/query_tiles.py: 0.90 of the time of whole windows at 128, 0.87 at 256, 0.79 at 512.
    """
    if query_tile is not None:
        if query_tile < 1 or window % query_tile:
            raise UserError(f"query_tile {query_tile} does not divide the window {window}")
        return query_tile
    parts = 4 if window >= 256 else 2 if window >= 64 else 1
    return window // parts if window % parts == 0 else window


def overlapping(x: jax.Array, tile: int, window: int, axis: int = 1) -> jax.Array:
    """The keys of each tile: [... w+n ...] to [... t j ...], tile t reading window + tile entries from t * tile on."""
    pieces = x.reshape(*x.shape[:axis], -1, tile, *x.shape[axis + 1 :])
    reach = window // tile
    tiles = pieces.shape[axis] - reach
    parts = [jax.lax.slice_in_dim(pieces, i, i + tiles, axis=axis) for i in range(reach + 1)]
    return jnp.concatenate(parts, axis=axis + 1)


def sliding_window_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    cached_keys: jax.Array,
    cached_values: jax.Array,
    start: jax.Array,
    scale: jax.Array,
    bias_table: jax.Array | None,
    query_tile: int,
    keep: jax.Array | None = None,
    sees_itself: bool = False,
    mask_empty: bool = False,
    starts_anywhere: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attends over a segment and the cache: outputs [b n h k], and the next cache, keys and values [b w h k].

    queries, keys, values [b n h k], keys and queries normalised; cached_keys, cached_values [b w h k]; start [b n];
    scale [h]; bias_table [h 32], or None for no bias; keep [h q w+q], q the shorter of n and w. Before the first token
    of a document lie zero keys and values, masked with `mask_empty` alone, which goes without a bias. With
    `sees_itself` a query's own key is the last of its window. A length that is a multiple of the window takes starts on
    its multiples unless they may be anywhere, and tiles of `query_tile` queries.
    """
    b, n = queries.shape[:2]
    window = cached_keys.shape[1]
    queries = scaled(queries, scale)
    all_keys = jnp.concatenate([cached_keys.astype(keys.dtype), keys], axis=1)  # [b w+n h k]
    all_values = jnp.concatenate([cached_values.astype(values.dtype), values], axis=1)
    whole_blocks = n % window == 0 and not starts_anywhere
    tile = query_tile if n % window == 0 else min(n, window)
    bias = None
    if bias_table is not None:
        bias = window_bias(bias_table, jnp.abs(scale), window, tile, sees_itself)  # [h q j]

    # The backward pass copies keys and values into their tiles anew: kept, the copies would be most of the memory.
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(WEIGHTS))
    def in_tiles(queries, all_keys, all_values, bias, keep):
        is_token = holds_token(all_keys) if mask_empty else None  # [b w+n]
        queries, all_keys, all_values = map(heads_first, (queries, all_keys, all_values))  # [b h n k], [b h w+n k]
        if whole_blocks:
            blocks, per_block = n // window, window // tile
            # At a document start, what a tile reads of the block before it becomes zeros.
            own_block = np.arange(window + tile) >= window - tile * np.arange(per_block)[:, None]  # [window/tile, j]
            begins = start.reshape(b, blocks, window)[:, :, 0]
            visible = (own_block | ~begins[:, :, None, None]).reshape(b, n // tile, window + tile)
            zeroed = visible[:, None, :, :, None].astype(keys.dtype)
            key_tiles, value_tiles = (overlapping(a, tile, window, 2) * zeroed for a in (all_keys, all_values))
            same_document = None
            if mask_empty:
                is_token = overlapping(is_token, tile, window) & visible  # [b t j]
        else:
            documents = jnp.pad(jnp.cumsum(start, axis=1, dtype=jnp.int32), ((0, 0), (window, 0)))  # [b w+n]
            if n > tile:
                pad = -n % tile

                def tiles(x, axis):
                    widths = [(0, pad if at == axis else 0) for at in range(x.ndim)]
                    return overlapping(jnp.pad(x, widths), tile, window, axis)

                queries = jnp.pad(queries, ((0, 0), (0, 0), (0, pad), (0, 0)))
                key_tiles, value_tiles, key_documents = tiles(all_keys, 2), tiles(all_values, 2), tiles(documents, 1)
                is_token = tiles(is_token, 1) if mask_empty else None
            else:
                key_tiles, value_tiles, key_documents = all_keys[:, :, None], all_values[:, :, None], documents[:, None]
                is_token = is_token[:, None] if mask_empty else None
            same_document = (key_documents[:, :, window:, None] == key_documents[:, :, None, :])[:, None]  # [b 1 t q j]

        query_tiles = queries.reshape(*queries.shape[:2], -1, tile, queries.shape[-1])  # [b h t q k]
        if keep is not None:
            keep = tiles_of_mask(keep, tile, query_tiles.shape[2])
        held = None
        if mask_empty:
            # A query that sees nothing at all must not take comfort in the keys outside its window.
            held = is_token[:, None, :, None, :] & in_window(window, tile, sees_itself)  # [b 1 t q j]
            held = held if same_document is None else held & same_document
            same_document = None  # what is masked needs not be zero, too
        by_tile = None if bias is None else bias[:, None]  # [h 1 q j]
        # A query that sees itself never sees nothing, unless its own key is zero.
        outputs = attend(query_tiles, key_tiles, value_tiles, by_tile, same_document, keep, held, sees_itself)
        return heads_first(outputs.reshape(queries.shape))[:, :n]

    outputs = in_tiles(queries, all_keys, all_values, bias, keep)

    next_keys, next_values = (tail_of_document(x, start).astype(cached_keys.dtype) for x in (all_keys, all_values))
    return outputs, next_keys, next_values


def in_window(window: int, tile: int, sees_itself: bool) -> np.ndarray:
    """Which keys of a tile, window + tile of them, are in the window of each of its queries: [q j]."""
    first = np.arange(tile)[:, None] + int(sees_itself)
    keys = np.arange(window + tile)
    return (keys >= first) & (keys < first + window)


def tiles_of_mask(mask: jax.Array, tile: int, tiles: int) -> jax.Array:
    """One mask of `queries` in a row, [h queries w+queries], as their tiles see it, then repeated: [h t q j]."""
    queries, keys = mask.shape[1:]
    seen = keys - queries + tile
    parts = [mask[:, at : at + tile, at : at + seen] for at in range(0, queries - tile + 1, tile)]
    return jnp.tile(jnp.stack(parts, axis=1), (1, -(-tiles // len(parts)), 1, 1))[:, :tiles]


def tail_of_document(x: jax.Array, start: jax.Array) -> jax.Array:
    """The last w entries of x [b w+n ...], zeros where they are not of the last token's document; start [b n]."""
    n = start.shape[1]
    window = x.shape[1] - n
    begins = jnp.max(jnp.where(start, jnp.arange(n), -(1 << 30)), axis=1)  # of the last document; far below 0 if before
    inside = jnp.arange(window) >= begins[:, None] - n + window
    return jnp.where(inside.reshape(*inside.shape, *[1] * (x.ndim - 2)), x[:, n:], 0.0)
