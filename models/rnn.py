"""Recurrent networks whose state passes through a matrix at every token: LSTM, GRU and the plain RNN.

The equations are those of torch.nn, which the papers' baselines are made of; `reset_first` gives the GRU of Cho et al.
(2014), whose reset gate is applied to the state before its matrix, as in the LRN authors' code. Of the two biases that
torch adds to one another one is kept. All that the input decides is projected before the loop; in the loop remains the
state's own matrix.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers import inspection
from block_recurrent.layers.axes import constrain
from block_recurrent.layers.dropout import row_dropout, weight_dropout
from block_recurrent.layers.parameters import channel_vector, gate_kernel, project_gates, uniform

sigmoid = jax.nn.sigmoid

Carry = tuple[jax.Array, ...]  # the state h first, then whatever else a cell remembers
Gates = tuple[jax.Array, ...]  # an array for each gate, of the carry's shape


def added(p: Gates, q: Gates) -> Gates:
    return tuple(map(jnp.add, p, q))


def lstm(carry: Carry, pre: Gates) -> Carry:
    (_, c), (i, f, g, o) = carry, pre
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
    return sigmoid(o) * jnp.tanh(c), c


def rnn(carry: Carry, pre: Gates) -> Carry:
    return (jnp.tanh(pre[0]),)


def gru_pre(p: Gates, q: Gates) -> Gates:
    """Reset and update gate take the sum; the candidate needs the state's part alone."""
    return p[0] + q[0], p[1] + q[1], p[2], q[2]


def gru(carry: Carry, pre: Gates) -> Carry:
    (h,), (reset, update, new, of_state) = carry, pre
    z = sigmoid(update)
    return ((1.0 - z) * jnp.tanh(new + sigmoid(reset) * of_state) + z * h,)


@dataclass(frozen=True)
class Cell:
    """`step(carry, pre)` touches each channel alone; `pre(p, q)`, linear, joins what input and state give the gates."""

    step: Callable[[Carry, Gates], Carry]
    pre: Callable[[Gates, Gates], Gates]
    gates: int
    carries: int = 1
    own_bias: bool = False  # of the state's part of the last gate


CELLS = {"lstm": Cell(lstm, added, 4, 2), "gru": Cell(gru, gru_pre, 3, own_bias=True), "rnn": Cell(rnn, added, 1)}


def cell_of(name: str) -> Cell:
    if name not in CELLS:
        raise UserError(f"cell {name!r} is not one of {', '.join(CELLS)}")
    return CELLS[name]


# Inside the loop the channels come first and the rows last, arrays [d b]: on two CPU cores the product of a matrix with
# a few columns takes 0.6 of the time of that with a few rows. Elsewhere the compiler chooses its own layouts.


def product(weights: jax.Array, h: jax.Array, gates: int) -> Gates:
    """What the state [d b] gives to each gate [d b], by weights [gates*d d]."""
    q = jnp.dot(weights, h.astype(weights.dtype), preferred_element_type=jnp.float32)
    return tuple(q.reshape(gates, -1, h.shape[-1]))


def forgotten(carry: Carry, start: jax.Array) -> Carry:
    return tuple(jnp.where(start, 0.0, part) for part in carry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_cell(cell: Cell, weights: jax.Array, own_bias: jax.Array, p: Gates, start: jax.Array, carry: Carry):
    """The last carry, arrays [d b], and all states [n b d]: weights [gates*d d], own_bias [d], p [n b d], start [n b].

    The backward loop passes on what the products get, and the matrix's gradient is one product over all tokens: inside
    the loop it would be a matrix to add up at every token.
    """
    return scan_cell(cell, weights, own_bias, p, start, carry)[0]


def scan_cell(cell, weights, own_bias, p, start, carry, keep=False):
    """What `run_cell` gives and, to `keep`, the pre-activations and carries of all tokens."""

    def step(carry, now):
        p, start = now
        carry = forgotten(carry, start)
        *q, last = product(weights, carry[0], cell.gates)
        pre = cell.pre(tuple(gate.T.astype(jnp.float32) for gate in p), (*q, last + own_bias[:, None]))
        after = cell.step(carry, pre)
        return after, (after[0].T.astype(p[0].dtype), (pre, after) if keep else None)

    carry, (states, kept) = jax.lax.scan(step, carry, (p, start))
    return (carry, states), kept


def run_cell_forward(cell, weights, own_bias, p, start, carry):
    outputs, (pre, carries) = scan_cell(cell, weights, own_bias, p, start, carry, keep=True)
    before = tuple(jnp.concatenate([first[None], part[:-1]]) for first, part in zip(carry, carries, strict=True))
    like_p = jnp.zeros((0,), p[0].dtype)
    return outputs, (weights, own_bias, pre, before, start, like_p)


def run_cell_backward(cell, residuals, cotangents):
    weights, own_bias, pre, before, start, like_p = residuals
    into_last, into_states = cotangents
    transposed = weights.T

    def step(into, now):
        pre, before, start, into_state = now
        into = (into[0] + into_state.T.astype(jnp.float32), *into[1:])
        before = forgotten(before, start)
        _, pull = jax.vjp(cell.step, before, pre)
        into_before, into_pre = pull(into)
        into_p, into_q = jax.linear_transpose(cell.pre, *(into[:1] * cell.gates,) * 2)(into_pre)
        into_products = jnp.concatenate(into_q).astype(transposed.dtype)
        into_h = into_before[0] + jnp.dot(transposed, into_products, preferred_element_type=jnp.float32)
        into_p, into_q = (tuple(gate.T for gate in gates) for gates in (into_p, into_q))
        return forgotten((into_h, *into_before[1:]), start), (into_p, into_q, before[0].T)

    inputs = (pre, before, start, into_states)
    into_first, (into_p, into_q, h) = jax.lax.scan(step, into_last, inputs, reverse=True)
    h = h.astype(weights.dtype)
    into_weights = jnp.concatenate([jnp.einsum("nbe,nbd->ed", gate.astype(weights.dtype), h) for gate in into_q])
    into_bias = into_q[-1].sum(axis=(0, 1)).astype(own_bias.dtype)
    return into_weights, into_bias, tuple(gate.astype(like_p.dtype) for gate in into_p), None, into_first


run_cell.defvjp(run_cell_forward, run_cell_backward)


def run_reset_first(weights: jax.Array, p: Gates, start: jax.Array, carry: Carry):
    """`run_cell` for the GRU whose reset gate comes before the matrix: two products a token."""
    width, dtype = p[0].shape[-1], p[0].dtype
    gates, candidate = weights[: 2 * width], weights[2 * width :]

    def step(carry, now):
        p, start = now
        (h,) = forgotten(carry, start)
        p = tuple(gate.T.astype(jnp.float32) for gate in p)
        reset, update = (sigmoid(a + b) for a, b in zip(p, product(gates, h, 2), strict=False))
        h = (1.0 - update) * jnp.tanh(p[2] + product(candidate, reset * h, 1)[0]) + update * h
        return (h,), h.T.astype(dtype)

    return jax.lax.scan(step, carry, (p, start))


class RNNLayer(nn.Module):
    """An LSTM, GRU or RNN from `dim` inputs to `width` channels; y, state = layer(x, state, start)."""

    dim: int
    width: int
    cell: str = "lstm"
    reset_first: bool = False
    forget_bias: float = 0.0
    weight_dropout: float = 0.0
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32

    block = 1

    def __post_init__(self):
        cell_of(self.cell)
        if self.reset_first and self.cell != "gru":
            raise UserError(f"reset_first is for the cell 'gru', not for {self.cell!r}")
        super().__post_init__()

    def initial_state(self, batch: int) -> dict[str, jax.Array]:
        names = ("carry", "cell")[: CELLS[self.cell].carries]
        return {name: jnp.zeros((batch, self.width), jnp.float32) for name in names}

    @nn.compact
    def __call__(self, x: jax.Array, state: dict[str, jax.Array], start: jax.Array):
        weights = cell_weights(self, "", self.dim, self.width, self.cell, self.reset_first, self.forget_bias)
        y, after = through_cell(self, weights, x.astype(self.dtype), tuple(state.values()), start)
        if inspection.looked_at(self):
            inspection.show(self, carry=y)
        return row_dropout(self, y, self.dropout), dict(zip(state, after, strict=True))


def cell_weights(
    module: nn.Module, prefix: str, dim: int, width: int, name: str, reset_first: bool = False, forget_bias: float = 0.0
) -> tuple[jax.Array, ...]:
    """A cell's parameters: input kernel [dim gates d], its bias [gates d], state kernel [d gates d], own bias [d]."""
    cell, init = cell_of(name), uniform(width**-0.5)  # of torch.nn
    into = gate_kernel(module, f"{prefix}kernel", (dim, cell.gates, width), init)
    inner = gate_kernel(module, f"{prefix}carry_kernel", (width, cell.gates, width), init)

    def bias_init(key, shape, dtype):
        bias = init(key, shape, dtype)
        return bias.at[1].add(forget_bias) if name == "lstm" else bias

    bias = channel_vector(module, f"{prefix}bias", (cell.gates, width), bias_init)
    own = jnp.zeros(width)
    if cell.own_bias and not reset_first:
        own = channel_vector(module, f"{prefix}carry_bias", (width,), init)
    return into, bias, inner, own


def through_cell(layer: RNNLayer, weights: tuple, x: jax.Array, carry: Carry, start: jax.Array):
    """States of all tokens [b n d] and the last carry, arrays [b d]."""
    into, bias, inner, own_bias = weights
    inner = weight_dropout(layer, inner, layer.weight_dropout).astype(x.dtype)
    inner = constrain(inner, None, None, None)  # gathered once, before the loop
    inner = inner.reshape(len(inner), -1).T  # [gates*d d]
    u = project_gates(x, into) + bias.astype(x.dtype)  # [b n gates d]
    p = tuple(jnp.moveaxis(u, (2, 1, 0), (0, 1, 2)))  # [n b d] each
    carry = tuple(part.T for part in carry)
    if layer.reset_first:
        carry, states = run_reset_first(inner, p, start.T, carry)
    else:
        carry, states = run_cell(CELLS[layer.cell], inner, own_bias, p, start.T, carry)
    return states.swapaxes(0, 1), tuple(part.T for part in carry)


class RNNEncoderLayer(RNNLayer):
    """Both directions over whole sequences, concatenated: y, last = layer(x, carry); no stream, no laws.

    The carry, arrays [b 2 d], has the direction from the end second.
    """

    @nn.compact
    def __call__(self, x: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        x, start = x.astype(self.dtype), jnp.zeros(x.shape[:2], bool)
        outputs, after = [], []
        for way, prefix in enumerate(("", "reverse_")):
            weights = cell_weights(self, prefix, self.dim, self.width, self.cell, self.reset_first, self.forget_bias)
            turned = x[:, ::-1] if way else x
            y, last = through_cell(self, weights, turned, tuple(part[:, way] for part in carry), start)
            outputs.append(y[:, ::-1] if way else y)
            after.append(last)
        return jnp.concatenate(outputs, axis=-1), tuple(jnp.stack(parts, axis=1) for parts in zip(*after, strict=True))
