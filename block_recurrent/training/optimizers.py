"""Optimizers and schedules, ready for gin: each optimizer knows its learning rate so that it can be logged."""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from block_recurrent.errors import UserError
from block_recurrent.ranges import DROPOUT, POSITIVE, RATE, SHARE, Range

Schedule = Callable[[jax.Array], jax.Array]

BELOW_1 = DROPOUT  # also what an exponential average keeps of its past
RANGES = {
    **dict.fromkeys(("rate", "scale", "peak", "initial", "floor", "warmup", "after", "weight_decay", "l2"), RATE),
    **dict.fromkeys(("steps", "every", "clip", "epsilon"), POSITIVE),
    **dict.fromkeys(("momentum", "beta1", "beta2"), BELOW_1),
    "decay": SHARE,
    "decay_rate": SHARE,
}


@dataclass(frozen=True)
class Optimizer:
    """A transformation of one layer's gradients, and what concerns all of them: the learning rate and clipping."""

    transformation: optax.GradientTransformation
    learning_rate: Schedule
    clip: float | None = None  # largest global norm of the gradient


def in_range(factory: Callable) -> Callable:
    """Checks the arguments of a factory of schedules or optimizers when it is called."""
    signature = inspect.signature(factory)
    optional = {parameter.name for parameter in signature.parameters.values() if parameter.default is None}

    @functools.wraps(factory)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if value is not None or name not in optional:
                check_argument(f"{factory.__name__}.{name}", RANGES.get(name), value)
        return factory(*args, **kwargs)

    return checked


def check_argument(name: str, allowed: Range | None, value: Any) -> None:
    if allowed is not None:
        allowed.check(name, value)
    elif name.endswith(".learning_rate"):
        if not callable(value):
            schedule = f"--gin.{name}='@optimizers.constant()' --gin.optimizers.constant.rate=RATE"
            raise UserError(f"{name} is {value!r}: give a schedule, such as {schedule}")
    elif not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}: give True or False")


@in_range
def constant(rate: float) -> Schedule:
    """The same learning rate at every step."""
    return lambda step: jnp.full((), rate, jnp.float32)


@in_range
def inverse_square_root(scale: float = 1.0, warmup: int = 1000) -> Schedule:
    """scale / sqrt(step) after a linear warm-up to its value there (Hutchins et al. 2022: 0.0316 after 1000 steps)."""

    def schedule(step):
        step = jnp.asarray(step, jnp.float32) + 1.0
        return scale * jnp.minimum(step / warmup, 1.0) / jnp.sqrt(jnp.maximum(step, warmup))

    return schedule


@in_range
def cosine(peak: float, steps: int, floor: float = 0.0, warmup: int = 0) -> Schedule:
    """Linear warm-up to `peak`, then half a cosine down to `floor` at `steps`."""

    def schedule(step):
        step = jnp.asarray(step, jnp.float32) + 1.0
        progress = jnp.clip((step - warmup) / max(steps - warmup, 1), 0.0, 1.0)
        decayed = floor + (peak - floor) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        return jnp.minimum(step / max(warmup, 1), 1.0) * decayed

    return schedule


@in_range
def overall_cosine(peak: float, steps: int, warmup: int = 0) -> Schedule:
    """Linear warm-up to `peak`, then on along the half cosine that began at step 0 and is zero at `steps`.

    The schedule of the SRU++ authors' code (Lei 2021), a little above `cosine` while it falls.
    """

    def schedule(step):
        step = jnp.asarray(step, jnp.float32) + 1.0
        height = 1.0 + jnp.cos(jnp.pi * jnp.clip(step, warmup, steps) / steps)
        return peak * jnp.minimum(step / max(warmup, 1), 1.0) * height / (1.0 + math.cos(math.pi * warmup / steps))

    return schedule


@in_range
def step_decay(initial: float, decay: float, every: int, after: int = 0) -> Schedule:
    """`initial`, multiplied by `decay` at step `after` and again `every` so many steps."""

    def schedule(step):
        return initial * decay ** jnp.maximum((step - after) // every + 1, 0).astype(jnp.float32)

    return schedule


def layer_by_layer(transformation: optax.GradientTransformation, depths) -> optax.GradientTransformation:
    """Runs a transformation on each layer of stacked parameters alone, as if they were not stacked.

    `depths` is a tree like the parameters': how many layers are stacked along a leaf's first axis, 0 if it is not
    stacked. Without this Adafactor would take the scale and the clipping of an update from all layers together.
    """
    stacked = optax.GradientTransformation(jax.vmap(transformation.init), jax.vmap(transformation.update))
    found = sorted(set(jax.tree.leaves(depths)))
    return optax.partition({depth: stacked if depth else transformation for depth in found}, depths)


@in_range
def adafactor(
    learning_rate: Schedule,
    momentum: float | None = 0.9,
    decay_rate: float = 0.8,
    multiply_by_parameter_scale: bool = True,
    weight_decay: float | None = None,
    clip: float | None = None,
) -> Optimizer:
    """Adafactor as in the authors' runs: factored second moments, update clipping at 1, momentum after scaling."""
    transformation = optax.adafactor(
        learning_rate,
        momentum=momentum,
        decay_rate=decay_rate,
        multiply_by_parameter_scale=multiply_by_parameter_scale,
        weight_decay_rate=weight_decay,
    )
    return Optimizer(transformation, learning_rate, clip)


@in_range
def adam(
    learning_rate: Schedule,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
    clip: float | None = None,
    l2: float = 0.0,
) -> Optimizer:
    """Adam, with decoupled weight decay; `l2` times the parameters is added to the clipped gradient, as in PyTorch."""
    transformation = optax.adamw(learning_rate, b1=beta1, b2=beta2, weight_decay=weight_decay)
    if l2:
        transformation = optax.chain(optax.add_decayed_weights(l2), transformation)
    return Optimizer(transformation, learning_rate, clip)


@in_range
def radam(
    learning_rate: Schedule,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 0.0,
    clip: float | None = None,
) -> Optimizer:
    """Rectified Adam, with decoupled weight decay on all parameters."""
    transformation = optax.chain(
        optax.scale_by_radam(beta1, beta2),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    return Optimizer(transformation, learning_rate, clip)


@in_range
def sgd(
    learning_rate: Schedule,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
) -> Optimizer:
    """Gradient descent; `weight_decay` times the parameters is added to the clipped gradient (L2)."""
    transformation = optax.chain(
        optax.add_decayed_weights(weight_decay), optax.sgd(learning_rate, momentum=momentum or None)
    )
    return Optimizer(transformation, learning_rate, clip)


@in_range
def rmsprop(
    learning_rate: Schedule,
    decay: float = 0.9,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    clip: float | None = None,
) -> Optimizer:
    """RMSprop, epsilon added to the root; `weight_decay` times the parameters is added to the clipped gradient (L2)."""
    transformation = optax.chain(
        optax.add_decayed_weights(weight_decay),
        optax.rmsprop(learning_rate, decay=decay, eps=epsilon, eps_in_sqrt=False),
    )
    return Optimizer(transformation, learning_rate, clip)
