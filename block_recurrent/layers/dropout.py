"""Dropout with masks shared over rows and time, as in the authors' code: cheap, and it shards freely."""

import jax
import jax.numpy as jnp
from flax import linen as nn


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
