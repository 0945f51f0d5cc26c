"""Normalisations: statistics in float32 whatever the compute type."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Root-mean-square norm over the last axis: no mean subtracted, no bias."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * scale).astype(x.dtype)


def l2_normalise(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Unit vectors along the last axis; a zero vector stays zero."""
    wide = x.astype(jnp.float32)
    norm = jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * norm).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, offset: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """Layer norm over the last axis, biased variance."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * scale + offset).astype(x.dtype)


def layer_norm_unbiased(x: jax.Array, scale: jax.Array, offset: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Layer norm by the unbiased standard deviation, epsilon added to it: of "The Annotated Transformer"."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    square = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    # The root of zero has no gradient: where all numbers are equal, it is not taken.
    deviation = jnp.sqrt(jnp.where(square > 0.0, square, 1.0) / max(x.shape[-1] - 1, 1)) * (square > 0.0)
    return (scale * wide / (deviation + epsilon) + offset).astype(x.dtype)
