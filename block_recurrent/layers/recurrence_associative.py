"""Elementwise recurrences that are linear in the carry, by lax.associative_scan: parallel over time."""

from collections.abc import Callable
from typing import Any

import jax

from block_recurrent.layers.recurrence_scan import carries_before, linear_terms, outputs


def associative(cell: Callable, carry: Any, inputs: Any, starts: jax.Array, shared: tuple) -> tuple[Any, Any]:
    """The last carry [b d] and the outputs [b n d] of a cell whose next carry is decay * carry + increment."""
    decay, increment = linear_terms(cell, carry, inputs, starts, shared)

    def compose(first, second):
        return jax.tree.map(lambda a, b: a * b, first[0], second[0]), jax.tree.map(
            lambda b, a2, b2: a2 * b + b2, first[1], second[0], second[1]
        )

    decays, increments = jax.lax.associative_scan(compose, (decay, increment), axis=1)
    afters = jax.tree.map(lambda a, c, b: a * c[:, None] + b, decays, carry, increments)
    ys = outputs(cell, carries_before(carry, afters), afters, inputs, starts, shared)
    return jax.tree.map(lambda a: a[:, -1], afters), ys
