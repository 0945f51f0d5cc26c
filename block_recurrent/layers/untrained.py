"""Branches of a computation that serve and are never trained through."""

from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_vjp
def untrained(outputs: Any, inputs: Any) -> Any:
    """`outputs`, which were made from `stop_gradient(inputs)`: no backward pass is built for them.

    Who trains through them all the same gets a gradient of NaN for `inputs`, and sees it.
    """
    del inputs
    return outputs


def forward(outputs: Any, inputs: Any) -> tuple[Any, tuple]:
    # The backward pass needs shapes and types alone: arrays of no elements keep them for free.
    return outputs, jax.tree.map(lambda a: jnp.zeros((0, *a.shape), a.dtype), (outputs, inputs))


def backward(shapes: tuple, cotangents: Any) -> tuple:
    del cotangents
    outputs, inputs = shapes
    return filled(outputs, 0.0), filled(inputs, jnp.nan)


def filled(shapes: Any, value: float) -> Any:
    """A cotangent of `value` everywhere; integers have none."""
    return jax.tree.map(
        lambda a: jnp.full(a.shape[1:], value, a.dtype) if jnp.issubdtype(a.dtype, jnp.inexact) else None, shapes
    )


untrained.defvjp(forward, backward)
