"""Names for the axes of parameters and activations; training maps the names to a mesh."""

import math
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


def devices_along(name: str) -> int:
    """Over how many devices of the mesh an axis of this name is split: 1 outside a mesh."""
    (axes,) = nn.logical_to_mesh_axes((name,)) or (None,)
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes.get(axis, 1) for axis in ([axes] if isinstance(axes, str) else axes or ()))
