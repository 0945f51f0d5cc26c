"""Temporal convolutional networks (Bai et al. 2018, arXiv 1803.01271): dilated causal convolutions with weight norm.

A layer is a residual block of two convolutions, its dilation twice that of the layer before. The state holds the last
(kernel_size - 1) * dilation inputs of each convolution, so that a stream sees what the whole sequence would.

The authors' code sets the weights from a normal distribution of deviation 0.01, which weight norm then overrides with
PyTorch's own of before (they confirm it): that one is used here, and theirs where a block changes its width.
"""

import itertools

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.layers.axes import constrain, partitioned
from block_recurrent.layers.convolution import windows
from block_recurrent.layers.dropout import dropout
from block_recurrent.layers.fields import check_fields
from block_recurrent.layers.parameters import channel_vector, gate_kernel, normal, uniform
from block_recurrent.layers.products import product
from block_recurrent.ranges import WHOLE_1


class TCNLayer(nn.Module):
    """A residual block from `dim` to `width` channels; y, state = layer(x, state, start)."""

    dim: int
    width: int
    kernel_size: int
    dilation: int
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32

    block = 1

    def __post_init__(self):
        check_fields(self)
        super().__post_init__()

    @property
    def reach(self) -> int:
        """How many tokens back a convolution sees."""
        return (self.kernel_size - 1) * self.dilation

    def initial_state(self, batch: int) -> dict[str, jax.Array]:
        return {
            "inputs": jnp.zeros((batch, self.reach, self.dim), self.dtype),
            "hidden": jnp.zeros((batch, self.reach, self.width), self.dtype),
        }

    @nn.compact
    def __call__(self, x: jax.Array, state: dict[str, jax.Array], start: jax.Array):
        x = x.astype(self.dtype)
        hidden, inputs = self.convolved("first", x, state["inputs"], start)
        y, hidden_tail = self.convolved("second", hidden, state["hidden"], start)
        passed = x
        if self.dim != self.width:
            init = partitioned(normal(0.01), "embed", "channels")
            down = self.param("downsample", init, (self.dim, self.width), jnp.float32).astype(self.dtype)
            bias = channel_vector(self, "downsample_bias", (self.width,), uniform(self.dim**-0.5))
            passed = product(x, down) + bias.astype(self.dtype)
        return nn.relu(y + passed), {"inputs": inputs, "hidden": hidden_tail}

    def convolved(self, name: str, x: jax.Array, tail: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A causal convolution, ReLU and dropout [b n width], and the tail that the next segment needs."""
        d = x.shape[-1]
        init = uniform((self.kernel_size * d) ** -0.5)  # PyTorch's
        direction = gate_kernel(self, f"{name}_kernel", (d, self.kernel_size, self.width), init)
        length = jnp.sqrt(jnp.sum(jnp.square(direction), axis=(0, 1)))  # [width]
        gain = channel_vector(self, f"{name}_gain", length.shape, lambda *_: length)  # begins as what it is
        weights = (direction * (gain / length)).swapaxes(0, 1).reshape(-1, self.width)  # taps first, as in the windows
        bias = channel_vector(self, f"{name}_bias", (self.width,), init)
        seen, tail = windows(x, tail, start, self.dilation)
        y = nn.relu(product(seen, weights.astype(self.dtype)) + bias.astype(self.dtype))
        return dropout(self, constrain(y, "batch", "length", "channels"), self.dropout), tail


def tcn_layers(
    dim: int, width: int, layers: int, kernel_size: int, last_width: int | None = None, **settings
) -> tuple[TCNLayer, ...]:
    """The layers of a TCN, the first of `dim` inputs, the last of `last_width` if given; dilations are 1, 2, 4 ..."""
    WHOLE_1.check("tcn_layers.layers", layers)
    widths = [dim, *[width] * (layers - 1), last_width or width]
    return tuple(
        TCNLayer(before, after, kernel_size, 2**level, **settings)
        for level, (before, after) in enumerate(itertools.pairwise(widths))
    )
