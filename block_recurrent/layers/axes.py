"""Names for the axes of parameters and activations; training maps the names to a mesh."""

from collections.abc import Callable

import jax
from flax import linen as nn

# What the names mean is decided once, in block_recurrent.training.sharding.
Axes = tuple[str | None, ...]


def partitioned(init: Callable, *axes: str | None) -> Callable:
    """An initializer whose parameter carries the names of its axes."""
    return nn.with_logical_partitioning(init, axes)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Keeps `x` sharded along its named axes; does nothing outside a mesh."""
    return nn.with_logical_constraint(x, axes)
