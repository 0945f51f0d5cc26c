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
from block_recurrent.layers.fields import check_fields
from block_recurrent.layers.parameters import channel_vector, gate_kernel, uniform
from block_recurrent.layers.products import product, weights_gradient

Carry = tuple[jax.Array, ...]  # the state h first, then whatever else a cell remembers
Gates = tuple[jax.Array, ...]  # an array for each gate, of the carry's shape
Biases = tuple[jax.Array, jax.Array]  # of the gates [gates d], and of the state's part of the last of them [d]
Kept = tuple[jax.Array, tuple[jax.Array, jax.Array]]  # of `gates_of`


def lstm(carry: Carry, gates: Gates) -> Carry:
    (_, c), (i, f, g, o) = carry, gates
    c = f * c + i * g
    return o * jnp.tanh(c), c


def gru(carry: Carry, gates: Gates) -> Carry:
    (h,), (reset, update, new, of_state) = carry, gates
    return ((1.0 - update) * jnp.tanh(new + reset * of_state) + update * h,)


def rnn(carry: Carry, gates: Gates) -> Carry:
    return gates


SIGMOID, TANH = 0.5, 1.0  # each, of x, is s tanh(s x) + 1 - s with this s


@dataclass(frozen=True)
class Cell:
    """`step(carry, gates)` touches each channel alone.

    The first gates of a cell take the sum of what input and state give them through a sigmoid or tanh, as `squashes`
    has them; of any other gate the step gets both parts as they are, all inputs' and then all states'.
    """

    step: Callable[[Carry, Gates], Carry]
    gates: int
    squashes: tuple[float, ...]
    carries: int = 1

    @property
    def own_bias(self) -> bool:
        """Whether the state's part of the last gate has a bias of its own."""
        return len(self.squashes) < self.gates


CELLS = {
    "lstm": Cell(lstm, 4, (SIGMOID, SIGMOID, TANH, SIGMOID), carries=2),
    "gru": Cell(gru, 3, (SIGMOID, SIGMOID)),
    "rnn": Cell(rnn, 1, (TANH,)),
}


def cell_of(name: str) -> Cell:
    if name not in CELLS:
        raise UserError(f"cell {name!r} is not one of {', '.join(CELLS)}")
    return CELLS[name]


def from_state(weights: jax.Array, h: jax.Array) -> jax.Array:
    """h [b d] by weights [d e] in their type, added up in float32."""
    return jnp.dot(h.astype(weights.dtype), weights, preferred_element_type=jnp.float32)


def forgotten(carry: Carry, start: jax.Array) -> Carry:
    """The carry, zeros in the rows whose document starts: start [... b], arrays [... b d]."""
    return tuple(jnp.where(start[..., None], 0.0, part) for part in carry)


# In the loop the gates of a token are one array, [b gates d], and one tanh makes all that are squashed: gate by gate
# the loop takes 1.4 times as long on two CPU cores.


def scales(cell: Cell) -> jax.Array:
    return jnp.array(cell.squashes, jnp.float32)[:, None]  # [gates 1]


def gates_of(cell: Cell, t: jax.Array, others: tuple[jax.Array, jax.Array]) -> Gates:
    """What a cell's step takes, from tanh(s x) of the squashed gates and both parts of the others, [b gates d] each."""
    first = scales(cell) * t + (1.0 - scales(cell))
    return tuple(gate for part in (first, *others) for gate in jnp.moveaxis(part, 1, 0))


def advance(cell: Cell, carry: Carry, u: jax.Array, q: jax.Array, biases: Biases) -> tuple[Carry, Kept]:
    """The carry after a token, and the gates as its gradient wants them; input and state give u and q, [b gates d]."""
    bias, own_bias = biases
    first, p = len(cell.squashes), u.astype(jnp.float32) + bias
    t = jnp.tanh(scales(cell) * (p[:, :first] + q[:, :first]))
    kept = t, (p[:, first:], q[:, first:] + own_bias)
    return cell.step(carry, gates_of(cell, *kept)), kept


def go_back(cell: Cell, before: Carry, kept: Kept, into: Carry) -> tuple[Carry, jax.Array, jax.Array]:
    """The gradient of `advance`: what goes into the carry before, and into u and q, which are one if only added."""
    t, first = kept[0], len(cell.squashes)
    _, pull = jax.vjp(cell.step, before, gates_of(cell, *kept))
    into_before, into_gates = pull(into)
    into_sums = jnp.stack(into_gates[:first], axis=1) * scales(cell) ** 2 * (1.0 - t * t)
    if not cell.own_bias:
        return into_before, into_sums, into_sums
    others = jnp.split(jnp.stack(into_gates[first:], axis=1), 2, axis=1)  # of the input, of the state
    return into_before, *(jnp.concatenate([into_sums, other], axis=1) for other in others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_cell(cell: Cell, weights: jax.Array, biases: Biases, u: jax.Array, start: jax.Array, carry: Carry):
    """The last carry, arrays [b d], and all states [n b d]: weights [d gates*d], u [n b gates d], start [n b].

    The backward loop passes on what the products get, and the matrix's gradient is one product over all tokens: inside
    the loop it would be a matrix to add up at every token.
    """
    return scan_cell(cell, weights, biases, u, start, carry)[0]


def scan_cell(cell, weights, biases, u, start, carry, keep=False):
    """What `run_cell` gives and, to `keep`, the gates and carries of all tokens."""

    def step(carry, now):
        u, start = now
        carry = forgotten(carry, start)
        after, kept = advance(cell, carry, u, from_state(weights, carry[0]).reshape(u.shape), biases)
        return after, (after[0].astype(u.dtype), (kept, after) if keep else None)

    carry, (states, kept) = jax.lax.scan(step, carry, (u, start))
    return (carry, states), kept


def run_cell_forward(cell, weights, biases, u, start, carry):
    outputs, (kept, carries) = scan_cell(cell, weights, biases, u, start, carry, keep=True)
    before = tuple(jnp.concatenate([first[None], part[:-1]]) for first, part in zip(carry, carries, strict=True))
    like_u = jnp.zeros((0,), u.dtype)
    return outputs, (weights, kept, forgotten(before, start), start, like_u)


def run_cell_backward(cell, residuals, cotangents):
    weights, kept, before, start, like_u = residuals
    into_last, into_states = cotangents
    transposed = weights.T

    def step(into, now):
        kept, before, start, into_output = now
        into = (into[0] + into_output.astype(jnp.float32), *into[1:])
        into_before, into_u, into_q = go_back(cell, before, kept, into)
        into_before = (into_before[0] + from_state(transposed, into_q.reshape(len(into_q), -1)), *into_before[1:])
        return forgotten(into_before, start), (into_u if cell.own_bias else None, into_q)

    into_first, (into_u, into_q) = jax.lax.scan(step, into_last, (kept, before, start, into_states), reverse=True)
    into_u = into_q if into_u is None else into_u
    tokens = into_q.shape[0] * into_q.shape[1]
    h, into_gates = (a.reshape(tokens, -1).astype(weights.dtype) for a in (before[0], into_q))
    into_biases = into_u.sum(axis=(0, 1)), into_q[:, :, -1].sum(axis=(0, 1))
    return (
        weights_gradient(h, into_gates).astype(weights.dtype),
        into_biases,
        into_u.astype(like_u.dtype),
        None,
        into_first,
    )


run_cell.defvjp(run_cell_forward, run_cell_backward)


def run_reset_first(weights: jax.Array, bias: jax.Array, u: jax.Array, start: jax.Array, carry: Carry):
    """`run_cell` for the GRU whose reset gate comes before the matrix: two products a token."""
    width = u.shape[-1]
    gates, candidate = weights[:, : 2 * width], weights[:, 2 * width :]

    def step(carry, now):
        u, start = now
        (h,) = forgotten(carry, start)
        p = jnp.moveaxis(u.astype(jnp.float32) + bias, 1, 0)
        reset, update = jax.nn.sigmoid(p[:2] + jnp.stack(jnp.split(from_state(gates, h), 2, axis=-1)))
        h = (1.0 - update) * jnp.tanh(p[2] + from_state(candidate, reset * h)) + update * h
        return (h,), h.astype(u.dtype)

    return jax.lax.scan(step, carry, (u, start))


class RNNLayer(nn.Module):
    """An LSTM, GRU or RNN from `dim` inputs to `width` channels; y, state = layer(x, state, start)."""

    dim: int
    width: int
    cell: str = "lstm"
    reset_first: bool = False
    weight_dropout: float = 0.0
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32

    block = 1

    def __post_init__(self):
        check_fields(self)
        cell_of(self.cell)
        if self.reset_first and self.cell != "gru":
            raise UserError(f"reset_first is for the cell 'gru', not for {self.cell!r}")
        super().__post_init__()

    def initial_state(self, batch: int) -> dict[str, jax.Array]:
        names = ("carry", "cell")[: CELLS[self.cell].carries]
        return {name: jnp.zeros((batch, self.width), jnp.float32) for name in names}

    @nn.compact
    def __call__(self, x: jax.Array, state: dict[str, jax.Array], start: jax.Array):
        weights = cell_weights(self, "", self.dim, self.width, self.cell, self.reset_first)
        y, after = through_cell(self, weights, x.astype(self.dtype), tuple(state.values()), start)
        if inspection.looked_at(self):
            inspection.show(self, carry=y)
        return row_dropout(self, y, self.dropout), dict(zip(state, after, strict=True))


def cell_weights(
    module: nn.Module, prefix: str, dim: int, width: int, name: str, reset_first: bool = False
) -> tuple[jax.Array, ...]:
    """A cell's parameters: input kernel [dim gates d], its bias [gates d], state kernel [d gates d], own bias [d]."""
    cell, init = cell_of(name), uniform(width**-0.5)  # of torch.nn
    into = gate_kernel(module, f"{prefix}kernel", (dim, cell.gates, width), init)
    inner = gate_kernel(module, f"{prefix}carry_kernel", (width, cell.gates, width), init)
    bias = channel_vector(module, f"{prefix}bias", (cell.gates, width), init)
    own = jnp.zeros(width)
    if cell.own_bias and not reset_first:
        own = channel_vector(module, f"{prefix}carry_bias", (width,), init)
    return into, bias, inner, own


def through_cell(layer: RNNLayer, weights: tuple, x: jax.Array, carry: Carry, start: jax.Array):
    """States of all tokens [b n d] and the last carry, arrays [b d]."""
    into, bias, inner, own_bias = weights
    inner = weight_dropout(layer, inner, layer.weight_dropout).astype(x.dtype)
    inner = constrain(inner, None, None, None)  # gathered once, before the loop
    inner = inner.reshape(len(inner), -1)  # [d gates*d]
    # The loop takes tokens one after another: the input is turned, not the gates, which are larger.
    turned = x.swapaxes(0, 1).reshape(-1, x.shape[-1])
    u = product(turned, into.astype(x.dtype).reshape(len(into), -1))
    u = u.reshape(x.shape[1], x.shape[0], *into.shape[1:])  # [n b gates d]
    u = constrain(u, "length", "batch", None, "channels")
    if layer.reset_first:
        carry, states = run_reset_first(inner, bias, u, start.T, carry)
    else:
        carry, states = run_cell(CELLS[layer.cell], inner, (bias, own_bias), u, start.T, carry)
    return states.swapaxes(0, 1), carry


class RNNEncoderLayer(RNNLayer):
    """Both directions over whole sequences, concatenated: y, last = layer(x, carry); no stream, no laws.

    The carry, arrays [b 2 d], has the direction from the end second.
    """

    @nn.compact
    def __call__(self, x: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        x, start = x.astype(self.dtype), jnp.zeros(x.shape[:2], bool)
        outputs, after = [], []
        for way, prefix in enumerate(("", "reverse_")):
            weights = cell_weights(self, prefix, self.dim, self.width, self.cell, self.reset_first)
            turned = x[:, ::-1] if way else x
            y, last = through_cell(self, weights, turned, tuple(part[:, way] for part in carry), start)
            outputs.append(y[:, ::-1] if way else y)
            after.append(last)
        return jnp.concatenate(outputs, axis=-1), tuple(jnp.stack(parts, axis=1) for parts in zip(*after, strict=True))
