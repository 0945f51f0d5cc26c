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
from models.rnn import CELLS, Cell, cell_weights
from models.sru import sru_cell
from models.transformer import TransformerLayer

KEPT = 2**28  # bytes that a device may keep of the steps inside windows

Step = Callable[[tuple, jax.Array], tuple]  # (carry, pre-activations without the state's part) -> carry, h first


def matrix_step(cell: Cell, inner: jax.Array, own_bias: jax.Array, dtype: jnp.dtype, carry, u: jax.Array):
    """A step of a cell with a matrix [d gates d]; in the first of a window the state is zero and so is its product."""
    d, gates, _ = inner.shape
    if carry is None:
        carry = (jnp.zeros(u.shape[:-2] + u.shape[-1:], jnp.float32),) * cell.carries
        q = jnp.zeros_like(u, jnp.float32)
    else:
        q = jnp.dot(carry[0].astype(dtype), inner.astype(dtype).reshape(d, -1), preferred_element_type=jnp.float32)
        q = q.reshape(u.shape)
    p = tuple(u[..., gate, :].astype(jnp.float32) for gate in range(gates))
    q = tuple(q[..., gate, :] for gate in range(gates))
    return cell.step(carry, cell.pre(p, (*q[:-1], q[-1] + own_bias)))


def elementwise_step(cell: Callable, carry, u: jax.Array):
    """A step of an elementwise recurrence; what a window gives is the cell's output."""
    gates = tuple(u[..., gate, :].astype(jnp.float32) for gate in range(u.shape[-2]))
    before = jnp.zeros_like(gates[0]) if carry is None else carry[1]
    after, y = cell(before, gates)
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


def window_states(step: Step, bias: jax.Array, u: jax.Array, tail: jax.Array, start: jax.Array) -> jax.Array:
    """The last state of every window [b n d], from projected inputs u [b n gates d] and those before them, `tail`.

    Before a document's first token are inputs of zero, whose projection is zero: all that they give is the bias.
    """
    b, n, gates, d = u.shape
    flat = [x.reshape(*x.shape[:2], -1) for x in (u, tail)]
    carry = None
    for back in reversed(list(taps(*flat, start))):
        carry = step(carry, back.reshape(b, n, gates, d) + bias.astype(u.dtype))
    return carry[0].astype(u.dtype)


def in_stretches(function: Callable, u: jax.Array, tail: jax.Array, start: jax.Array, kept: int) -> jax.Array:
    """`function(u, tail, start)` a stretch of positions at a time, each made anew for its gradient, if it keeps much.

    `kept` are the bytes that the backward pass finds of one position of all rows.
    """
    n, back = u.shape[1], tail.shape[1]
    if n * kept <= KEPT:
        return function(u, tail, start)
    stretch = max(size for size in range(1, n + 1) if n % size == 0 and (size == 1 or size * kept <= KEPT))
    everything = jnp.concatenate([tail, u], axis=1)
    # Where the document of a stretch's first token begins is seen in the starts of the window before it.
    starts = jnp.pad(start, ((0, 0), (back, 0)))

    @jax.checkpoint
    def one(at):
        here, flags = (jax.lax.dynamic_slice_in_dim(x, at, back + stretch, axis=1) for x in (everything, starts))
        begins = jnp.max(jnp.where(flags[:, :back], jnp.arange(back), -1), axis=1, initial=-1)  # [b] -1: before
        inside = jnp.arange(back) >= begins[:, None]
        before = jnp.where(inside.reshape(*inside.shape, *[1] * (u.ndim - 2)), here[:, :back], 0.0)
        return function(here[:, back:], before, flags[:, back:])

    pieces = jax.lax.map(one, jnp.arange(0, n, stretch))  # [n/stretch b stretch d]
    return pieces.swapaxes(0, 1).reshape(u.shape[0], n, -1)


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
        projected = project_gates(u, into)
        before = project_gates(tail.astype(u.dtype), into)
        run = functools.partial(window_states, step, bias)
        numbers = u.shape[0] * (self.window - 1) * into.shape[1] * self.dim  # of all gates, one position of all rows
        return in_stretches(run, projected, before, start, 4 * 2 * numbers), next_tail(u, tail, start)

    def cell_at(self, prefix: str) -> tuple[jax.Array, jax.Array, Step]:
        """A LocalRNN's input kernel [d gates d], its bias [gates d], and its step."""
        if self.cell in CELLS:
            into, bias, inner, own_bias = cell_weights(self, prefix, self.dim, self.dim, self.cell)
            return into, bias, functools.partial(matrix_step, CELLS[self.cell], inner, own_bias, self.dtype)
        found, d = ELEMENTWISE[self.cell], self.dim
        into = gate_kernel(self, f"{prefix}kernel", (d, found.gates, d))
        bias = channel_vector(self, f"{prefix}bias", (found.gates, d), nn.initializers.zeros)
        cell = found.cell
        if self.cell == "sru":
            vectors = channel_vector(self, f"{prefix}carry_weights", (2, d), uniform(1.0))
            unbiased = jnp.zeros((2, d))  # the gates' biases are in `bias`
            cell = lambda c, gates: found.cell(c, gates, *vectors, *unbiased)  # noqa: E731
        return into, bias, functools.partial(elementwise_step, cell)
