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
from block_recurrent.layers.convolution import next_tail, taps
from block_recurrent.layers.parameters import channel_vector, gate_kernel, project_gates, uniform
from models.lrn import UNITS
from models.rnn import CELLS, Cell, advance, cell_weights
from models.sru import sru_cell
from models.transformer import TransformerLayer

KEPT = 2**28  # bytes that a device may keep of the steps inside windows

Gates = tuple[jax.Array, ...]  # an array [b n d] for each gate
Step = Callable[[tuple | None, Gates], tuple]  # (carry, what the input gives to the gates) -> carry, h first


def matrix_step(cell: Cell, inner: jax.Array, own_bias: jax.Array, carry: tuple | None, p: Gates) -> tuple:
    """A step of a cell with a matrix [d gates d]; in the first of a window the state is zero and so is its product."""
    if carry is None:
        carry = (jnp.zeros_like(p[0]),) * cell.carries
        q = (jnp.zeros_like(p[0]),) * cell.gates
    else:
        # A product for each gate: parts of a joint one would be put together again, number by number, in the gradient.
        h = carry[0].astype(inner.dtype)
        q = tuple(jnp.dot(h, inner[:, gate], preferred_element_type=jnp.float32) for gate in range(cell.gates))
    return advance(cell, carry, p, (*q[:-1], q[-1] + own_bias))


def elementwise_step(cell: Callable, carry: tuple | None, gates: Gates) -> tuple:
    """A step of an elementwise recurrence; what a window gives is the cell's output."""
    after, y = cell(jnp.zeros_like(gates[0]) if carry is None else carry[1], gates)
    return y, after


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
    **{name: Elementwise(functools.partial(unit, jnp.tanh), gates) for name, (unit, gates) in UNITS.items()},
}


def window_states(step: Step, bias: jax.Array, u: Gates, tail: Gates, start: jax.Array) -> jax.Array:
    """The last state of every window [b n d], from projected inputs u [b n d] and those before them, `tail`.

    Before a document's first token are inputs of zero, whose projection is zero: all that they give is the bias.
    """
    backwards = [list(taps(*gate, start)) for gate in zip(u, tail, strict=True)]  # of each gate, the token's own first
    carry = None
    for gates in reversed(list(zip(*backwards, strict=True))):
        carry = step(carry, tuple(gate.astype(jnp.float32) + own for gate, own in zip(gates, bias, strict=True)))
    return carry[0].astype(u[0].dtype)


def in_stretches(function: Callable, u: Gates, tail: Gates, start: jax.Array, kept: int) -> jax.Array:
    """`function(u, tail, start)` a stretch of positions at a time, each made anew for its gradient, if it keeps much.

    `kept` are the bytes that the backward pass finds of one position of all rows.
    """
    (b, n), back = start.shape, tail[0].shape[1]
    if n * kept <= KEPT:
        return function(u, tail, start)
    stretch = max(size for size in range(1, n + 1) if n % size == 0 and (size == 1 or size * kept <= KEPT))
    everything = tuple(jnp.concatenate(gate, axis=1) for gate in zip(tail, u, strict=True))
    # Where the document of a stretch's first token begins is seen in the starts of the window before it.
    starts = jnp.pad(start, ((0, 0), (back, 0)))

    @jax.checkpoint
    def one(at):
        *here, flags = (jax.lax.dynamic_slice_in_dim(x, at, back + stretch, axis=1) for x in (*everything, starts))
        begins = jnp.max(jnp.where(flags[:, :back], jnp.arange(back), -1), axis=1, initial=-1)  # [b] -1: before
        inside = (jnp.arange(back) >= begins[:, None])[..., None]
        before = tuple(jnp.where(inside, gate[:, :back], 0.0) for gate in here)
        return function(tuple(gate[:, back:] for gate in here), before, flags[:, back:])

    pieces = jax.lax.map(one, jnp.arange(0, n, stretch))  # [n/stretch b stretch d]
    return pieces.swapaxes(0, 1).reshape(b, n, -1)


class RTransformerLayer(TransformerLayer):
    """`local_layers` LocalRNNs over windows of `window` positions, attention over `context` tokens, feed-forward.

    `cell` is "gru", "lstm" or "rnn", or an elementwise recurrence: "qrnn", "sru", "lrn", "olrn", "glrn" or "elrn". The
    state holds the last window - 1 inputs of every LocalRNN, and keys and values.
    """

    window: int = 7
    cell: str = "gru"
    local_layers: int = 1

    def __post_init__(self):
        if self.cell not in (*CELLS, *ELEMENTWISE):
            raise UserError(f"cell {self.cell!r} is not one of {', '.join((*CELLS, *ELEMENTWISE))}")
        if self.window < 1 or self.local_layers < 1:
            raise UserError(f"window {self.window}, local_layers {self.local_layers}: both are 1 at least")
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
        """Every window's last state [b n d] (eq. 5 of the paper), and the tail for the next segment."""
        into, bias, step = self.cell_at(prefix)
        projected, before = (tuple(jnp.moveaxis(project_gates(x, into), 2, 0)) for x in (u, tail.astype(u.dtype)))
        run = functools.partial(window_states, step, bias)
        numbers = u.shape[0] * (self.window - 1) * into.shape[1] * self.dim  # of all gates, one position of all rows
        return in_stretches(run, projected, before, start, 4 * 2 * numbers), next_tail(u, tail, start)

    def cell_at(self, prefix: str) -> tuple[jax.Array, jax.Array, Step]:
        """A LocalRNN's input kernel [d gates d], its bias [gates d], and its step."""
        if self.cell in CELLS:
            into, bias, inner, own_bias = cell_weights(self, prefix, self.dim, self.dim, self.cell)
            return into, bias, functools.partial(matrix_step, CELLS[self.cell], inner.astype(self.dtype), own_bias)
        found, d = ELEMENTWISE[self.cell], self.dim
        into = gate_kernel(self, f"{prefix}kernel", (d, found.gates, d))
        bias = channel_vector(self, f"{prefix}bias", (found.gates, d), nn.initializers.zeros)
        cell = found.cell
        if self.cell == "sru":
            vectors = channel_vector(self, f"{prefix}carry_weights", (2, d), uniform(1.0))
            unbiased = jnp.zeros((2, d))  # the gates' biases are in `bias`
            cell = lambda c, gates: found.cell(c, gates, *vectors, *unbiased)  # noqa: E731
        return into, bias, functools.partial(elementwise_step, cell)
