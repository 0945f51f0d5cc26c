"""The T5 relative position bias (Raffel et al. 2020), causal form, laid out for attention tiles."""

import jax
import jax.numpy as jnp
import numpy as np

BUCKETS = 32
MAX_DISTANCE = 128
MASKED = -1e6


def bucket(distance: np.ndarray) -> np.ndarray:
    """The bucket of each distance query - key >= 0: exact up to 16, then logarithmic up to MAX_DISTANCE."""
    exact = BUCKETS // 2
    ratio = np.maximum(distance, 1).astype(np.float32) / exact + np.finfo(np.float32).eps
    log_bucket = exact + (np.log(ratio) / np.log(MAX_DISTANCE / exact) * (BUCKETS - exact)).astype(int)
    return np.where(distance < exact, distance, np.minimum(log_bucket, BUCKETS - 1))


def distance_bias(table: jax.Array, scale: jax.Array, window: int, sees_itself: bool = False) -> jax.Array:
    """The scaled bias of the keys in a query's window, [h w] from a table [h BUCKETS], the furthest key first."""
    one_hot = np.eye(BUCKETS, dtype=np.float32)[bucket(np.arange(window, 0, -1) - int(sees_itself))]  # [w BUCKETS]
    return jnp.einsum("hc,wc->hw", table * scale[:, None], one_hot, precision="highest")


def window_bias(table: jax.Array, scale: jax.Array, window: int, queries: int, sees_itself: bool = False) -> jax.Array:
    """The scaled bias of a tile, MASKED outside the window: [h q j] from a table [h BUCKETS].

    Query i of the tile stands at position window + i and sees the `window` keys strictly before it, that is keys
    i .. window + i - 1 of the tile's window + queries; with `sees_itself` its own and the window - 1 before. The entry
    depends on key - query alone, so the tile is one vector, laid out along the diagonals by a reshape: no gather, and
    no scatter in the gradient.
    """
    own = int(sees_itself)
    by_distance = distance_bias(table, scale, window, sees_itself)
    period = window + 2 * queries
    diagonal = jnp.pad(by_distance, ((0, 0), (own, 2 * queries - own)), constant_values=MASKED)  # [h period]
    skewed = jnp.tile(diagonal, (1, queries))[:, : queries * (period - 1)]
    return skewed.reshape(-1, queries, period - 1)[:, :, : window + queries]
