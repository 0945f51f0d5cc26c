"""The R-Transformer (Wang et al. 2019, arXiv 1907.05572): a recurrent network in a short window at every position,
attention over the past, a feed-forward sublayer; no positions.

The paper normalises after the residual sum, its authors' code before the sublayer: the code is followed, its layer norm
too, and the zeros that it puts before a sequence, which the recurrent network of a window reads like any other input.

All windows run side by side: the input is projected once for each position, not once for each window that it is in, and
step k of all windows is one product with the state's matrix. What the backward pass would keep of every step of every
window is made anew, a stretch of positions at a time, once it is more than KEPT.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers.axes import devices_along
from block_recurrent.layers.convolution import next_tail, taps
from block_recurrent.layers.fields import check_fields
from block_recurrent.layers.parameters import channel_vector, gate_kernel, project_gates, uniform
from block_recurrent.layers.products import weights_gradient
from models.lrn import UNITS, activation_of
from models.rnn import CELLS, Biases, Cell, Gates, cell_weights, from_state
from models.sru import sru_cell
from models.transformer import TransformerLayer

KEPT = 2**28  # bytes that a device may keep of the steps inside windows

Taps = list[Gates]  # of each step of all m windows: what the input gives to the gates, [m d] each
States = Callable[[Taps], jax.Array]  # the last states [m d] of the windows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matrix_states(cell: Cell, weights: jax.Array, biases: Biases, taps: Taps) -> jax.Array:
    """The last states [m d] of windows of a cell with a matrix [d gates*d].

    In the first step of a window the state is zero, and so is its product. The gradient has one product for all gates
    of a step where JAX's own would have one for each. Gates are arrays of their own: side by side in one, as the loop
    over tokens has them, windows of width 32 take twice as long on two CPU cores.
    """
    return matrix_states_forward(cell, weights, biases, taps)[0]


def matrix_states_forward(cell, weights, biases, taps):
    dtype = taps[0][0].dtype
    cast = weights.astype(dtype)  # here, so that its gradient adds up in float32
    zeros = jnp.zeros(taps[0][0].shape, jnp.float32)
    before, kept = [(zeros,) * cell.carries], []
    for step, u in enumerate(taps):
        q = jnp.split(from_state(cast, before[-1][0]), cell.gates, axis=-1) if step else [zeros] * cell.gates
        kept.append(gates_from(cell, u, q, biases))
        before.append(cell.step(before[-1], kept[-1]))
    like_u = jnp.zeros((0,), dtype)
    return before.pop()[0], (weights, before, kept, like_u)


def gates_from(cell: Cell, u: Gates, q: Gates, biases: Biases) -> Gates:
    """What a cell's step takes, of what input and state give to each gate."""
    bias, own_bias = biases
    p = [part.astype(jnp.float32) + bias[i] for i, part in enumerate(u)]
    squashed = (s * jnp.tanh(s * (a + b)) + (1.0 - s) for s, a, b in zip(cell.squashes, p, q, strict=False))
    first = len(cell.squashes)
    return (*squashed, *p[first:], *(part + own_bias for part in q[first:]))


def into_parts(cell: Cell, gates: Gates, into_gates: Gates) -> tuple[Gates, Gates]:
    """The gradient of `gates_from`: what goes into u, and into q."""
    first = len(cell.squashes)
    squashed = zip(cell.squashes, gates, into_gates, strict=False)
    into_sums = [into * (s * s - jnp.square(gate - (1.0 - s))) for s, gate, into in squashed]
    return (*into_sums, *into_gates[first : cell.gates]), (*into_sums, *into_gates[cell.gates :])


def matrix_states_backward(cell, residuals, into_h):
    weights, before, kept, like_u = residuals
    dtype, transposed = like_u.dtype, weights.T.astype(like_u.dtype)
    into = (into_h, *(jnp.zeros_like(into_h),) * (cell.carries - 1))
    into_weights, into_own, into_taps = jnp.zeros_like(weights), 0.0, []
    for step in reversed(range(len(kept))):
        _, pull = jax.vjp(cell.step, before[step], kept[step])
        into, into_gates = pull(into)
        into_u, into_q = into_parts(cell, kept[step], into_gates)
        into_taps.append(into_u)
        into_own += into_q[-1]
        if step:
            flat = jnp.concatenate(into_q, axis=-1).astype(dtype)
            into = (into[0] + from_state(transposed, flat), *into[1:])
            into_weights += weights_gradient(before[step][0].astype(dtype), flat)
    into_bias = jnp.stack([sum(parts).sum(axis=0) for parts in zip(*into_taps, strict=True)])
    into_taps = [tuple(part.astype(dtype) for part in u) for u in reversed(into_taps)]
    return into_weights, (into_bias, into_own.sum(axis=0)), into_taps


matrix_states.defvjp(matrix_states_forward, matrix_states_backward)


def elementwise_states(cell: Callable, bias: jax.Array, taps: Taps) -> jax.Array:
    """The last outputs of windows of an elementwise recurrence, whose gates have a bias [gates d]."""
    carry = jnp.zeros_like(taps[0][0], jnp.float32)
    for u in taps:
        carry, y = cell(carry, tuple(part.astype(jnp.float32) + bias[i] for i, part in enumerate(u)))
    return y


def qrnn_unit(c, inputs):
    """fo-pooling (Bradbury et al. 2017, eq. 4), its nonlinearities included."""
    z, f, o = inputs
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(-f) * jnp.tanh(z)
    return c, jax.nn.sigmoid(o) * c


@dataclass(frozen=True)
class Elementwise:
    """A recurrence without a matrix: `cell(carry, gates, *vectors)` of so many gates."""

    cell: Callable
    gates: int


ELEMENTWISE = {
    "qrnn": Elementwise(qrnn_unit, 3),
    "sru": Elementwise(functools.partial(sru_cell, lambda c: c), 3),
    **{name: Elementwise(functools.partial(unit, activation_of(name)), gates) for name, (unit, gates) in UNITS.items()},
}


def window_states(states: States, u: jax.Array, tail: jax.Array, start: jax.Array) -> jax.Array:
    """The last state of every window [b n d], from projected inputs u [b n gates d] and those before them, `tail`.

    Before a document's first token are inputs of zero, whose projection is zero: all that they give is the bias.
    """
    b, n, gates, d = u.shape
    backwards = zip(*(taps(u[:, :, i], tail[:, :, i], start) for i in range(gates)), strict=True)
    steps = [tuple(tap.reshape(b * n, d) for tap in step) for step in reversed(list(backwards))]
    return states(steps).reshape(b, n, d).astype(u.dtype)


def in_stretches(function: Callable, u: jax.Array, tail: jax.Array, start: jax.Array, kept: int) -> jax.Array:
    """`function(u, tail, start)` a stretch of positions at a time, each made anew for its gradient, if it keeps much.

    `kept` are the bytes that the backward pass finds of one position of a device's rows.
    """
    (b, n), back = start.shape, tail.shape[1]
    if n * kept <= KEPT:
        return function(u, tail, start)
    count = -(-n * kept // KEPT)
    stretch = -(-n // count)
    after = count * stretch - n  # positions that fill the last stretch
    everything = jnp.pad(jnp.concatenate([tail, u], axis=1), ((0, 0), (0, after), (0, 0), (0, 0)))
    # Where the document of a stretch's first token begins is seen in the starts of the window before it.
    starts = jnp.pad(start, ((0, 0), (back, after)))

    @jax.checkpoint
    def one(at):
        here, flags = (jax.lax.dynamic_slice_in_dim(x, at, back + stretch, axis=1) for x in (everything, starts))
        begins = jnp.max(jnp.where(flags[:, :back], jnp.arange(back), -1), axis=1, initial=-1)  # [b] -1: before
        inside = jnp.arange(back) >= begins[:, None]
        before = jnp.where(inside[:, :, None, None], here[:, :back], 0.0)
        return function(here[:, back:], before, flags[:, back:])

    pieces = jax.lax.map(one, jnp.arange(count) * stretch)  # [count b stretch d]
    return pieces.swapaxes(0, 1).reshape(b, count * stretch, -1)[:, :n]


class RTransformerLayer(TransformerLayer):
    """`local_layers` LocalRNNs over windows of `window` positions, attention over `context` tokens, feed-forward.

    `cell` is "gru", "lstm" or "rnn", or an elementwise recurrence: "qrnn", "sru", "lrn", "olrn", "glrn" or "elrn". The
    state holds the last window - 1 inputs of every LocalRNN, and keys and values.
    """

    window: int = 7
    cell: str = "gru"
    local_layers: int = 1

    def __post_init__(self):
        check_fields(self)
        if self.cell not in (*CELLS, *ELEMENTWISE):
            raise UserError(f"cell {self.cell!r} is not one of {', '.join((*CELLS, *ELEMENTWISE))}")
        super().__post_init__()

    def initial_state(self, batch: int) -> dict[str, jax.Array]:
        tails = jnp.zeros((batch, self.local_layers, self.window - 1, self.dim), self.dtype)
        return {"tails": tails, **super().initial_state(batch)}

    @nn.compact
    def __call__(self, x: jax.Array, state: dict[str, jax.Array], start: jax.Array):
        x, tails = x.astype(self.dtype), []
        for i in range(self.local_layers):

            def local(u, i=i):
                y, tail = self.local_rnn(f"local_{i}_", u, state["tails"][:, i], start)
                tails.append(tail)
                return y

            x = self.sublayer(f"local_{i}", x, local)
        y, kept = self.attention_and_feed_forward(x, state, start)
        return y, {"tails": jnp.stack(tails, axis=1), **kept}

    def local_rnn(self, prefix: str, u: jax.Array, tail: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Every window's last state [b n d] (eqs. 2 and 3), and the tail for the next segment."""
        into, states = self.cell_at(prefix)
        projected, before = (project_gates(x, into) for x in (u, tail.astype(u.dtype)))
        run = functools.partial(window_states, states)
        rows = u.shape[0] / devices_along("batch")
        numbers = rows * (self.window - 1) * into.shape[1] * self.dim  # of all gates, one position of a device's rows
        return in_stretches(run, projected, before, start, int(4 * 2 * numbers)), next_tail(u, tail, start)

    def cell_at(self, prefix: str) -> tuple[jax.Array, States]:
        """A LocalRNN's input kernel [d gates d], and what its windows' last states are."""
        if self.cell in CELLS:
            into, bias, inner, own_bias = cell_weights(self, prefix, self.dim, self.dim, self.cell)
            weights = inner.reshape(self.dim, -1)
            return into, functools.partial(matrix_states, CELLS[self.cell], weights, (bias, own_bias))
        found, d = ELEMENTWISE[self.cell], self.dim
        into = gate_kernel(self, f"{prefix}kernel", (d, found.gates, d))
        bias = channel_vector(self, f"{prefix}bias", (found.gates, d), nn.initializers.zeros)
        cell = found.cell
        if self.cell == "sru":
            vectors = channel_vector(self, f"{prefix}carry_weights", (2, d), uniform(1.0))
            unbiased = jnp.zeros((2, d))  # the gates' biases are in `bias`
            cell = lambda c, gates: found.cell(c, gates, *vectors, *unbiased)  # noqa: E731
        return into, functools.partial(elementwise_states, cell, bias)
