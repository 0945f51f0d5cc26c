"""Quasi-recurrent neural networks (Bradbury et al. 2017, arXiv 1611.01576): a masked convolution over time makes all
gates at once, and pooling, the only recurrence, has no weights.

The forget gate is the paper's: c = f c + (1 - f) z. In the authors' code the gate of that name is 1 - f, and zoneout at
evaluation, of which the paper says nothing, multiplies it by 1 - p; the latter is followed here.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers import inspection
from block_recurrent.layers.convolution import windows
from block_recurrent.layers.dropout import dropout_key, row_dropout
from block_recurrent.layers.fields import check_fields
from block_recurrent.layers.parameters import channel_vector, gate_kernel, project_gates
from block_recurrent.layers.recurrence import linear, recur
from block_recurrent.ranges import WHOLE_1

sigmoid = jax.nn.sigmoid


@linear
def f_pooling(c, inputs):
    z, f = inputs
    c = f * c + (1.0 - f) * z  # eq. 3
    return c, c


@linear
def fo_pooling(c, inputs):
    z, f, o = inputs
    c = f * c + (1.0 - f) * z  # eq. 4
    return c, o * c


@linear
def ifo_pooling(c, inputs):
    z, f, o, i = inputs
    c = f * c + i * z  # eq. 5
    return c, o * c


POOLINGS = {"f": (f_pooling, 2), "fo": (fo_pooling, 3), "ifo": (ifo_pooling, 4)}


class QRNNLayer(nn.Module):
    """A convolution over `window` tokens, from `dim` inputs to `width` channels, and pooling.

    The state holds the last window - 1 inputs of the document and the pooling's carry. With `dense` the input is put
    before the output: [b n dim+width].
    """

    dim: int
    width: int
    window: int = 2
    pooling: str = "fo"
    zoneout: float = 0.0
    dropout: float = 0.0
    dense: bool = False
    backend: str | None = None
    dtype: jnp.dtype = jnp.float32

    block = 1

    def __post_init__(self):
        check_fields(self)
        if self.pooling not in POOLINGS:
            raise UserError(f"pooling {self.pooling!r} is not one of {', '.join(POOLINGS)}")
        super().__post_init__()

    def initial_state(self, batch: int) -> dict[str, jax.Array]:
        return {
            "carry": jnp.zeros((batch, self.width), jnp.float32),
            "tail": jnp.zeros((batch, self.window - 1, self.dim), self.dtype),
        }

    @nn.compact
    def __call__(self, x: jax.Array, state: dict[str, jax.Array], start: jax.Array):
        pooling, gates = POOLINGS[self.pooling]
        x = x.astype(self.dtype)
        seen, tail = windows(x, state["tail"], start)
        u = project_gates(seen, gate_kernel(self, "kernel", (self.window * self.dim, gates, self.width)))
        u = u + channel_vector(self, "bias", (gates, self.width), nn.initializers.zeros).astype(u.dtype)
        z, forget, *others = (u[:, :, gate] for gate in range(gates))  # others: output, input
        inputs = (jnp.tanh(z), self.zoned_out(sigmoid(forget)), *map(sigmoid, others))
        carry, h = recur(pooling, state["carry"], inputs, start, backend=self.backend)
        if inspection.looked_at(self):
            _, carries = recur(lambda c, now: pooling(c, now)[:1] * 2, state["carry"], inputs, start)
            inspection.show(self, carry=carries, forget_gate=inputs[1])
        h = row_dropout(self, h, self.dropout)
        y = jnp.concatenate([x, h], axis=-1) if self.dense else h
        return y, {"carry": carry, "tail": tail}

    def zoned_out(self, forget: jax.Array) -> jax.Array:
        """eq. 6: channels that keep their carry for a token, chosen at random in training, in the mean otherwise."""
        key = dropout_key(self, self.zoneout)
        if key is None:
            return 1.0 - (1.0 - self.zoneout) * (1.0 - forget) if self.zoneout else forget
        kept = jax.random.bernoulli(key, self.zoneout, forget.shape)
        return jnp.where(kept, jnp.ones_like(forget), forget)


def qrnn_layers(
    dim: int, width: int, layers: int, first_window: int | None = None, dense: bool = False, **settings
) -> tuple[QRNNLayer, ...]:
    """The layers of a QRNN, the first of `dim` inputs; `dense` feeds each the inputs and outputs of all before it.

    With dense connections the last layer's output alone is the result, as in the paper's sentiment model.
    """
    WHOLE_1.check("qrnn_layers.layers", layers)
    made = []
    for index in range(layers):
        own = {"window": first_window} if index == 0 and first_window else {}
        keeps = dense and index < layers - 1
        made.append(QRNNLayer(dim=dim, width=width, dense=keeps, **{**settings, **own}))
        dim = dim + width if keeps else width
    return tuple(made)
