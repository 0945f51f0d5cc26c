"""Dense projections without biases, and the feed-forward sublayer."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.layers.axes import constrain, partitioned
from block_recurrent.layers.dropout import tied_dropout
from block_recurrent.layers.norms import rms_norm

kernel_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def kernel(module: nn.Module, name: str, shape: tuple[int, int], *axes: str | None) -> jax.Array:
    """A float32 weight matrix [in out], owned by `module`."""
    return module.param(name, partitioned(kernel_init, *axes), shape, jnp.float32)


def vector(module: nn.Module, name: str, size: int, axis: str | None = None) -> jax.Array:
    """A float32 vector of ones, owned by `module`: the scale of a norm or of attention heads."""
    return module.param(name, partitioned(nn.initializers.ones, axis), (size,), jnp.float32)


class FeedForward(nn.Module):
    """x + relu(norm(x) W1) W2, pre-norm, no biases."""

    width: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        d = x.shape[-1]
        hidden_kernel = kernel(self, "hidden", (d, self.width), "embed", "mlp")
        output_kernel = kernel(self, "output", (self.width, d), "mlp", "embed")
        hidden = rms_norm(x, vector(self, "norm", d)) @ hidden_kernel.astype(x.dtype)  # [b n f]
        hidden = constrain(nn.relu(hidden), "batch", "length", "mlp")
        return x + tied_dropout(self, hidden @ output_kernel.astype(x.dtype), self.dropout)
