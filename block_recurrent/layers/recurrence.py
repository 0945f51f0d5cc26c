"""Elementwise recurrences: a cell is written once, as a plain function, and several back ends run it.

    carry, ys = recur(cell, carry, inputs, starts)

`cell(carry, inputs_t) -> (carry, y_t)` touches each channel alone, so it holds for arrays of any shape, and a back end
may call it on one token, on a block of them or on the whole sequence. All matrix products happen before the loop.

| back end    | file                      | loop                                                             |
|-------------|---------------------------|------------------------------------------------------------------|
| scan        | recurrence_scan.py        | lax.scan; in the loop only what the carry needs                   |
| associative | recurrence_associative.py | lax.associative_scan, for cells that are `linear` in the carry    |
| pallas      | recurrence_pallas.py      | a TPU kernel that keeps the carry on chip and streams the time    |
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from block_recurrent.errors import UserError
from block_recurrent.layers.recurrence_associative import associative
from block_recurrent.layers.recurrence_pallas import pallas
from block_recurrent.layers.recurrence_scan import scan
from block_recurrent.layers.target import platform

Cell = Callable[..., tuple[Any, Any]]  # (carry, inputs of a token, *shared) -> (carry, output of the token)

BACKENDS = {"scan": scan, "associative": associative, "pallas": pallas}


def linear(cell: Cell) -> Cell:
    """Declares that every part of a cell's next carry is linear in that part alone: decay * carry + increment."""
    cell.linear = True
    return cell


def is_linear(cell: Cell) -> bool:
    return getattr(cell, "linear", False)


def recur(
    cell: Cell,
    carry: Any,
    inputs: Any,
    starts: jax.Array,
    shared: tuple[jax.Array, ...] = (),
    backend: str | None = None,
) -> tuple[Any, Any]:
    """Runs `cell` over a segment: the carry after its last token, and the outputs of all.

    carry: arrays [b d], kept in float32; inputs: arrays [b n d], the outputs' type is theirs; starts [b n], where the
    carry becomes zero before the token; shared: arrays [d] that the cell takes after its inputs, the same for all
    tokens. `backend` forces one of BACKENDS; None takes what is best for the platform and the size.
    """
    if backend is not None and backend not in BACKENDS:
        raise UserError(f"recurrence back end {backend!r} is not one of {', '.join(BACKENDS)}")
    if backend == "associative" and not is_linear(cell):
        raise UserError(f"the back end 'associative' needs a cell that is linear in its carry; {cell} is not")
    dtype = jnp.result_type(*jax.tree.leaves(inputs))
    carry, shared = jax.tree.map(lambda a: a.astype(jnp.float32), (carry, shared))

    def restarted(carry: Any, inputs: Any, start: jax.Array, shared: tuple) -> tuple[Any, Any]:
        carry = jax.tree.map(lambda c: jnp.where(start, 0.0, c), carry)
        carry, y = cell(carry, jax.tree.map(lambda a: a.astype(jnp.float32), inputs), *shared)
        return carry, jax.tree.map(lambda a: a.astype(dtype), y)

    restarted.linear = is_linear(cell)
    starts = starts[..., None]
    if starts.shape[1] == 1:
        carry, y = restarted(carry, *jax.tree.map(lambda a: a[:, 0], (inputs, starts)), shared)
        return carry, jax.tree.map(lambda a: a[:, None], y)
    backend = backend or best_backend(platform(), is_linear(cell))
    return BACKENDS[backend](restarted, carry, inputs, starts, shared)


def best_backend(platform: str, cell_is_linear: bool) -> str:
    """The back end of a platform: on CPU as measured in benchmarks/recurrences.md, elsewhere by design alone."""
    if platform == "tpu":
        return "pallas"
    if platform == "gpu" and cell_is_linear:
        return "associative"
    return "scan"
