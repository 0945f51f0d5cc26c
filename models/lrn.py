"""The units of "A Lightweight Recurrent Network for Sequence Modeling" (Zhang and Sennrich 2019, arXiv 1905.13324).

LRN has no weights inside the loop: gates are made of the input's projections and the state itself. oLRN adds an output
gate, gLRN ties the input gate to the forget gate, eLRN has no gate of its own at all. ATR, the unit that the paper
starts from, multiplies its state by a matrix, so it is a plain scan.

The paper drops the biases and writes an activation g that may be the identity; its authors' language models have biases
and tanh, which are the defaults here. oLRN has neither tanh nor g: eq. 11 has none in the place of eq. 4, and the
authors' translation code, the only one with an oLRN, follows it. Their "layer norm" is an RMS norm in some programs and
a true one in others; both are taken over the joint projection of all gates, before the bias, outside the loop.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers import inspection
from block_recurrent.layers.axes import constrain
from block_recurrent.layers.dropout import row_dropout, weight_dropout
from block_recurrent.layers.fields import check_fields
from block_recurrent.layers.norms import layer_norm, rms_norm
from block_recurrent.layers.parameters import channel_vector, gate_kernel, kernel, project_gates
from block_recurrent.layers.products import product, weights_gradient
from block_recurrent.layers.recurrence import recur

ACTIVATIONS = {"tanh": jnp.tanh, "identity": lambda x: x}
NORMS = (None, "layer", "rms")
EPSILON = 1e-8  # of both norms, in the authors' code

sigmoid = jax.nn.sigmoid


def lrn(activation, h, inputs):
    k, q, v = inputs
    h = activation(sigmoid(k + h) * v + sigmoid(q - h) * h)  # eqs. 2 to 4
    return h, h


def olrn(activation, h, inputs):
    k, q, v, w = inputs
    c = activation(sigmoid(k + h) * v + sigmoid(q - h) * h)  # eq. 11
    h = sigmoid(w - c) * c  # eqs. 12, 13
    return h, h


def glrn(activation, h, inputs):
    q, v = inputs
    forget = sigmoid(q - h)  # eq. 14
    h = activation((1.0 - forget) * v + forget * h)
    return h, h


def elrn(activation, h, inputs):
    (v,) = inputs
    forget = sigmoid(-h)  # eq. 15
    h = activation((1.0 - forget) * v + forget * h)
    return h, h


UNITS = {"lrn": (lrn, 3), "olrn": (olrn, 4), "glrn": (glrn, 2), "elrn": (elrn, 1)}


def activation_of(unit: str, name: str | None = None) -> Callable[[jax.Array], jax.Array]:
    """The activation of that name, or a unit's own: tanh, and none in oLRN."""
    return ACTIVATIONS[name or ("identity" if unit == "olrn" else "tanh")]


def one_of(name: str, value: str | None, known) -> None:
    if value not in known:
        raise UserError(f"{name} {value!r} is not one of {', '.join(map(str, known))}")


class LRNLayer(nn.Module):
    """An LRN, or one of its variants, from `dim` inputs to `width` channels; y, state = layer(x, state, start).

    `activation` is "tanh", "identity" or None, the unit's own.
    """

    dim: int
    width: int
    unit: str = "lrn"
    activation: str | None = None
    bias: bool = True
    norm: str | None = None
    weight_dropout: float = 0.0
    dropout: float = 0.0
    backend: str | None = None
    dtype: jnp.dtype = jnp.float32

    block = 1

    def __post_init__(self):
        check_fields(self)
        one_of("unit", self.unit, UNITS)
        one_of("activation", self.activation, (None, *ACTIVATIONS))
        one_of("norm", self.norm, NORMS)
        super().__post_init__()

    def initial_state(self, batch: int) -> dict[str, jax.Array]:
        return {"carry": jnp.zeros((batch, self.width), jnp.float32)}

    @nn.compact
    def __call__(self, x: jax.Array, state: dict[str, jax.Array], start: jax.Array):
        unit, gates = UNITS[self.unit]
        shape = (gates, self.width)
        weights = gate_kernel(self, "kernel", (self.dim, *shape))
        u = project_gates(x.astype(self.dtype), weight_dropout(self, weights, self.weight_dropout))  # [b n gates d]
        if self.norm:
            scale = channel_vector(self, "norm_scale", shape, nn.initializers.ones)
            jointly = u.reshape(*u.shape[:2], -1)
            if self.norm == "rms":
                normed = rms_norm(jointly, scale.reshape(-1), EPSILON)
            else:
                offset = channel_vector(self, "norm_offset", shape, nn.initializers.zeros)
                normed = layer_norm(jointly, scale.reshape(-1), offset.reshape(-1), EPSILON)
            u = normed.reshape(u.shape)
        if self.bias:
            u = u + channel_vector(self, "bias", shape, nn.initializers.zeros).astype(u.dtype)
        cell = functools.partial(unit, activation_of(self.unit, self.activation))
        inputs = tuple(u[:, :, gate] for gate in range(gates))
        carry, h = recur(cell, state["carry"], inputs, start, backend=self.backend)
        if inspection.looked_at(self):
            before = jnp.concatenate([state["carry"][:, None], h[:, :-1]], axis=1)
            inspection.show(self, **self.gates(inputs, jnp.where(start[..., None], 0.0, before)))
        return row_dropout(self, h, self.dropout), {"carry": carry}

    def gates(self, inputs: tuple[jax.Array, ...], before: jax.Array) -> dict[str, jax.Array]:
        """How far each token lets itself in and its past through, [b n d]."""
        if self.unit in ("lrn", "olrn"):
            return {"input_gate": sigmoid(inputs[0] + before), "forget_gate": sigmoid(inputs[1] - before)}
        forget = sigmoid((inputs[0] if self.unit == "glrn" else 0.0) - before)
        return {"input_gate": 1.0 - forget, "forget_gate": forget}


class ATRLayer(nn.Module):
    """The addition-subtraction twin-gated unit (Zhang et al. 2018), with the tanh of the LRN authors' code."""

    dim: int
    width: int
    activation: str | None = None
    bias: bool = True
    weight_dropout: float = 0.0
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32

    block = 1

    def __post_init__(self):
        check_fields(self)
        one_of("activation", self.activation, (None, *ACTIVATIONS))
        super().__post_init__()

    def initial_state(self, batch: int) -> dict[str, jax.Array]:
        return {"carry": jnp.zeros((batch, self.width), jnp.float32)}

    @nn.compact
    def __call__(self, x: jax.Array, state: dict[str, jax.Array], start: jax.Array):
        weights = kernel(self, "kernel", (self.dim, self.width), "embed", "channels")
        inner = kernel(self, "carry_kernel", (self.width, self.width), "embed", "channels")
        weights, inner = (weight_dropout(self, w, self.weight_dropout).astype(self.dtype) for w in (weights, inner))
        inner = constrain(inner, None, None)  # gathered once, before the loop
        p = product(x.astype(self.dtype), weights)
        inner_bias = 0.0
        if self.bias:
            p = p + channel_vector(self, "bias", (self.width,), nn.initializers.zeros).astype(self.dtype)
            inner_bias = channel_vector(self, "carry_bias", (self.width,), nn.initializers.zeros)
        inner_bias = jnp.broadcast_to(inner_bias, (self.width,))
        carry, h = atr_states(self.activation or "tanh", inner, inner_bias, p, start, state["carry"])
        return row_dropout(self, h, self.dropout), {"carry": carry}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def atr_states(activation: str, inner: jax.Array, bias: jax.Array, p: jax.Array, start: jax.Array, h: jax.Array):
    """The last state [b d] and all states [b n d], from projected inputs p [b n d] and the state's matrix [d d].

    The backward loop passes on what the products get, and the matrix's gradient is one product of all tokens: inside
    the loop it would be a matrix to add up at every token.
    """
    return atr_scan(activation, inner, jnp.broadcast_to(bias, p.shape).astype(jnp.float32), p, start, h)


def atr_scan(activation: str, inner: jax.Array, biases: jax.Array, p: jax.Array, start: jax.Array, h: jax.Array):
    def step(h, now):
        p, bias, start = now
        h = jnp.where(start[:, None], 0.0, h)
        q = jnp.dot(h.astype(inner.dtype), inner, preferred_element_type=jnp.float32) + bias
        wide = p.astype(jnp.float32)
        h = ACTIVATIONS[activation](sigmoid(wide + q) * wide + sigmoid(wide - q) * h)
        return h, h

    in_time = jax.tree.map(lambda a: a.swapaxes(0, 1), (p, biases, start))
    h, states = jax.lax.scan(step, h, in_time)
    return h, states.swapaxes(0, 1).astype(p.dtype)


def atr_forward(activation, inner, bias, p, start, h):
    outputs = atr_states(activation, inner, bias, p, start, h)
    return outputs, (inner, bias, p, start, h, outputs[1])


def atr_backward(activation, residuals, cotangents):
    inner, bias, p, start, h, states = residuals
    biases = jnp.broadcast_to(bias, p.shape).astype(jnp.float32)
    _, pull = jax.vjp(lambda biases, p, h: atr_scan(activation, inner, biases, p, start, h), biases, p, h)
    into_biases, into_p, into_h = pull(cotangents)
    before = jnp.concatenate([h[:, None].astype(states.dtype), states[:, :-1]], axis=1)
    before = jnp.where(start[..., None], 0.0, before)
    h, into_q = (a.reshape(-1, a.shape[-1]) for a in (before, into_biases.astype(before.dtype)))
    into_inner = weights_gradient(h, into_q)
    return into_inner.astype(inner.dtype), into_biases.sum(axis=(0, 1)).astype(bias.dtype), into_p, None, into_h


atr_states.defvjp(atr_forward, atr_backward)
