"""The parameters that layers have in common, declared by name in the layer that owns them."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer

from block_recurrent.layers.axes import constrain, partitioned
from block_recurrent.layers.dropout import dropout_key, keep_mask
from block_recurrent.layers.norms import l2_normalise
from block_recurrent.layers.products import product
from block_recurrent.layers.relative_bias import BUCKETS
from block_recurrent.ranges import RATE, WHOLE_1

kernel_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def xavier_gates(share: float = 1.0) -> Initializer:
    """Xavier's init of weights [in gates channels], with that share of its variance."""
    return nn.initializers.variance_scaling(share, "fan_avg", "uniform", in_axis=0, out_axis=(1, 2))


def uniform(limit: float) -> Initializer:
    """Uniform between -limit and limit."""
    RATE.check("uniform.limit", limit)
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -limit, limit)


def uniform_by_dim(dim: int) -> Initializer:
    """Uniform between -sqrt(3 / dim) and sqrt(3 / dim), of variance 1 / dim, whatever the shape."""
    WHOLE_1.check("uniform_by_dim.dim", dim)
    return lambda key, shape, dtype=jnp.float32: uniform(math.sqrt(3.0 / dim))(key, shape, dtype)


def normal(deviation: float) -> Initializer:
    """Normal around zero."""
    RATE.check("normal.deviation", deviation)
    return nn.initializers.normal(deviation)


def kernel(
    module: nn.Module, name: str, shape: tuple[int, int], *axes: str | None, init: Initializer = kernel_init
) -> jax.Array:
    """A float32 weight matrix [in out]."""
    return module.param(name, partitioned(init, *axes), shape, jnp.float32)


def linear_map(module: nn.Module, name: str, inputs: int, width: int, *axes: str | None) -> tuple[jax.Array, jax.Array]:
    """A kernel [inputs width] and a bias [width], as PyTorch makes them."""
    init = uniform(inputs**-0.5)
    weights = module.param(name, partitioned(init, *axes), (inputs, width), jnp.float32)
    return weights, module.param(f"{name}_bias", partitioned(init, axes[1]), (width,), jnp.float32)


def gate_kernel(module: nn.Module, name: str, shape: tuple[int, int, int], init: Callable | None = None) -> jax.Array:
    """Float32 weights [in gates channels] of the gates of an elementwise recurrence, by default of Xavier's init."""
    return module.param(name, partitioned(init or xavier_gates(), "embed", None, "channels"), shape, jnp.float32)


def project_gates(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Pre-activations [b n gates channels] of all gates in one product, by weights [in gates channels]."""
    width, gates, channels = weights.shape
    projected = product(x, weights.astype(x.dtype).reshape(width, gates * channels))
    return constrain(projected.reshape(*x.shape[:-1], gates, channels), "batch", "length", None, "channels")


def channel_vector(module: nn.Module, name: str, shape: tuple[int, ...], init: Callable) -> jax.Array:
    """Float32 weights [... channels], one vector or several, for every channel alone."""
    axes = [None] * (len(shape) - 1)
    return module.param(name, partitioned(init, *axes, "channels"), shape, jnp.float32)


def scale(module: nn.Module, name: str, size: int) -> jax.Array:
    """A float32 vector that starts at one: of a norm, or of the heads of an attention."""
    return module.param(name, partitioned(nn.initializers.ones, None), (size,), jnp.float32)


def offset(module: nn.Module, name: str, size: int, axis: str | None = None) -> jax.Array:
    """A float32 vector that starts at zero: the bias of a projection."""
    return module.param(name, partitioned(nn.initializers.zeros, axis), (size,), jnp.float32)


def in_heads(x: jax.Array, weights: jax.Array, heads: int) -> jax.Array:
    """Projects [b n d] by weights [d hk] and splits the heads: [b n h k]."""
    projected = product(x, weights.astype(x.dtype)).reshape(*x.shape[:-1], heads, -1)
    return constrain(projected, "batch", "length", "heads", None)


def project(module: nn.Module, name: str, x: jax.Array, heads: int, head_dim: int) -> jax.Array:
    """Values of each head: [b n d] to [b n h k]."""
    return in_heads(x, kernel(module, name, (x.shape[-1], heads * head_dim), "embed", "heads"), heads)


def project_unit(module: nn.Module, name: str, x: jax.Array, heads: int, head_dim: int) -> jax.Array:
    """Keys or queries of each head, of length one."""
    return l2_normalise(project(module, name, x, heads, head_dim))


def bias_table(module: nn.Module, name: str, heads: int) -> jax.Array:
    """The T5 relative bias of a layer, [h BUCKETS]."""
    init = partitioned(nn.initializers.normal(BUCKETS**-0.5), "heads", None)
    return module.param(name, init, (heads, BUCKETS), jnp.float32)


def attention_mask(module: nn.Module, rate: float, heads: int, window: int, length: int) -> jax.Array | None:
    """A dropout mask for attention weights, shared by all rows and windows; None where dropout is off.

    It is [h q w+q], for the q queries of a window, or those of a segment whose length is less.
    """
    key, queries = dropout_key(module, rate), min(window, length)
    return None if key is None else keep_mask(key, rate, (heads, queries, window + queries), jnp.float32)
