"""Dropout: mostly with masks shared over rows and time, which are cheap and shard freely, and the plain kind."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.layers import health


def keep_mask(key: jax.Array, rate: float, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Zero with probability `rate`, else 1 / (1 - rate)."""
    kept = jax.random.bernoulli(key, 1.0 - rate, shape)
    return kept.astype(dtype) / jnp.asarray(1.0 - rate, dtype)


def dropout_key(module: nn.Module, rate: float) -> jax.Array | None:
    """The key to drop with, or None where dropout is off."""
    return module.make_rng("dropout") if rate > 0.0 and module.has_rng("dropout") else None


def tied_dropout(module: nn.Module, x: jax.Array, rate: float, period: int = 128) -> jax.Array:
    """Drops features of `x` [b n d] by one mask for all rows, repeated every `period` tokens."""
    key = dropout_key(module, rate)
    if key is None:
        return x
    length, width = x.shape[-2:]
    mask = keep_mask(key, rate, (min(period, length), width), x.dtype)
    return x * jnp.tile(mask, (-(-length // period), 1))[:length]


def row_dropout(module: nn.Module, x: jax.Array, rate: float) -> jax.Array:
    """Drops features of `x` [b n d] by one mask for each row, the same at all its tokens."""
    key = dropout_key(module, rate)
    return x if key is None else x * keep_mask(key, rate, (x.shape[0], 1, x.shape[-1]), x.dtype)


def dropout(module: nn.Module, x: jax.Array, rate: float) -> jax.Array:
    """Drops every number of `x` by itself."""
    key = dropout_key(module, rate)
    return x if key is None else x * keep_mask(key, rate, x.shape, x.dtype)


def in_training(module: nn.Module) -> bool:
    """Whether the caller drops features or watches health, as training does.

    Training always stands between two blocks, and its parameters have changed since the state was made.
    """
    return module.has_rng("dropout") or health.watched(module)


def weight_dropout(module: nn.Module, weights: jax.Array, rate: float) -> jax.Array:
    """Drops single weights, the same for all rows and tokens (Merity et al. 2018)."""
    key = dropout_key(module, rate)
    return weights if key is None else weights * keep_mask(key, rate, weights.shape, weights.dtype)
