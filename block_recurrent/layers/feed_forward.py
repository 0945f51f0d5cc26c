"""The feed-forward sublayer."""

import jax
from flax import linen as nn

from block_recurrent.layers.axes import constrain
from block_recurrent.layers.dropout import tied_dropout
from block_recurrent.layers.norms import rms_norm
from block_recurrent.layers.parameters import kernel, scale
from block_recurrent.layers.products import product


class FeedForward(nn.Module):
    """x + relu(norm(x) W1) W2, pre-norm, no biases."""

    width: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        d = x.shape[-1]
        hidden_kernel = kernel(self, "hidden", (d, self.width), "embed", "mlp")
        output_kernel = kernel(self, "output", (self.width, d), "mlp", "embed")
        hidden = product(rms_norm(x, scale(self, "norm", d)), hidden_kernel.astype(x.dtype))  # [b n f]
        hidden = constrain(nn.relu(hidden), "batch", "length", "mlp")
        return x + tied_dropout(self, product(hidden, output_kernel.astype(x.dtype)), self.dropout)
