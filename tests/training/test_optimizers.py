"""Each optimizer against its update rule in NumPy, and the schedules at steps worked out by hand."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from block_recurrent import config
from block_recurrent.errors import UserError
from block_recurrent.training import optimizers
from block_recurrent.training.loop import train

RATE, DECAY, STEPS = 0.1, 0.01, 8


def constant(step):
    return jnp.asarray(RATE, jnp.float32)


def radam(parameter, gradients):
    """Liu et al. 2020, algorithm 2, with decoupled weight decay."""
    first = second = 0.0
    longest = 2 / (1 - 0.999) - 1
    for t, gradient in enumerate(gradients, start=1):
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        update = first / (1 - 0.9**t)
        length = longest - 2 * t * 0.999**t / (1 - 0.999**t)
        if length >= 5:
            rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            update = np.sqrt(rectified) * update / np.sqrt(second / (1 - 0.999**t))
        parameter = parameter - RATE * (update + DECAY * parameter)
    return parameter


def adam(parameter, gradients, l2=0.0, decay=0.0):
    """As in PyTorch: L2 in the gradient, or decay beside it."""
    first = second = 0.0
    for t, gradient in enumerate(gradients, start=1):
        gradient = gradient + l2 * parameter
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
        update = first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.99**t)) + 1e-8)
        parameter = parameter - RATE * (update + decay * parameter)
    return parameter


def sgd(parameter, gradients, momentum=0.0):
    velocity = 0.0
    for gradient in gradients:
        velocity = momentum * velocity + gradient + DECAY * parameter
        parameter = parameter - RATE * velocity
    return parameter


def rmsprop(parameter, gradients):
    mean_square = 0.0
    for gradient in gradients:
        gradient = gradient + DECAY * parameter
        mean_square = 0.9 * mean_square + 0.1 * gradient**2
        parameter = parameter - RATE * gradient / (np.sqrt(mean_square) + 1e-8)
    return parameter


CASES = {
    "adam": (optimizers.adam(constant, weight_decay=DECAY), lambda p, g: adam(p, g, decay=DECAY)),
    "adam_l2": (optimizers.adam(constant, l2=0.5), lambda p, g: adam(p, g, l2=0.5)),
    "adam_both": (optimizers.adam(constant, l2=0.5, weight_decay=DECAY), lambda p, g: adam(p, g, 0.5, DECAY)),
    "radam": (optimizers.radam(constant, weight_decay=DECAY), radam),
    "sgd": (optimizers.sgd(constant, weight_decay=DECAY), sgd),
    "sgd_momentum": (optimizers.sgd(constant, momentum=0.9, weight_decay=DECAY), lambda p, g: sgd(p, g, momentum=0.9)),
    "rmsprop": (optimizers.rmsprop(constant, weight_decay=DECAY), rmsprop),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("steps", [1, STEPS])
def test_updates_follow_the_rule(name, steps):
    """Matrices, vectors and the layers of a stack alike: weight decay spares none."""
    optimizer, rule = CASES[name]
    rng = np.random.default_rng(0)
    first = {"kernel": rng.normal(size=(3, 4)), "bias": rng.normal(size=4), "layers": rng.normal(size=(2, 3, 4))}
    gradients = [jax.tree.map(lambda p: rng.normal(size=p.shape), first) for _ in range(steps)]
    transformation = optimizers.layer_by_layer(optimizer.transformation, {"kernel": 0, "bias": 0, "layers": 2})
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), first)
    state, update = transformation.init(params), jax.jit(transformation.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    for key, parameter in params.items():
        expected = rule(first[key], [gradient[key] for gradient in gradients])
        np.testing.assert_allclose(parameter, expected, rtol=1e-3, atol=1e-3 * RATE)


def test_step_decay_drops_at_once_and_then_at_every_interval():
    schedule = optimizers.step_decay(2.0, 0.5, every=10, after=60)
    found = [schedule(jnp.asarray(step)) for step in (0, 59, 60, 69, 70, 89)]
    np.testing.assert_allclose(found, [2.0, 2.0, 1.0, 1.0, 0.5, 0.25], rtol=1e-6)


def test_overall_cosine_goes_on_from_the_warm_up():
    """lr * (1 + cos(pi t / T)) / (1 + cos(pi W / T)), which recurs step by step as in the authors' code."""
    schedule = optimizers.overall_cosine(0.3, steps=400, warmup=16)
    np.testing.assert_allclose([schedule(0), schedule(15)], [0.3 / 16, 0.3], rtol=1e-6)
    np.testing.assert_allclose([schedule(399), schedule(500)], 0.0, atol=1e-7)
    rate = 0.3
    for t in range(17, 350):
        rate *= (1 + np.cos(np.pi * t / 400)) / (1 + np.cos(np.pi * (t - 1) / 400))
        np.testing.assert_allclose(schedule(t - 1), rate, rtol=1e-4)
    np.testing.assert_allclose(optimizers.overall_cosine(1.0, steps=100)(49), 0.5, rtol=1e-6)


@pytest.mark.parametrize(("name", "clip", "first"), [("radam", 1.0, 3e-4 / 16000), ("sgd", None, 1.0)])
def test_fragments_build(name, clip, first):
    config.parse(["tests/tiny.gin", f"configs/base/{name}.gin"], ["STEPS = 400000"])
    optimizer = config.bindings_of(train)["optimizer"]
    assert optimizer.clip == clip
    np.testing.assert_allclose(optimizer.learning_rate(jnp.asarray(0)), first, rtol=1e-6)


FACTORIES = [
    optimizers.constant,
    optimizers.inverse_square_root,
    optimizers.cosine,
    optimizers.overall_cosine,
    optimizers.step_decay,
    optimizers.adafactor,
    optimizers.adam,
    optimizers.radam,
    optimizers.sgd,
    optimizers.rmsprop,
]


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: factory.__name__)
def test_arguments_out_of_range_are_refused(factory):
    parameters = inspect.signature(factory).parameters
    right = {"learning_rate": constant, "rate": 1.0, "peak": 1.0, "initial": 1.0, "steps": 9, "every": 2, "decay": 0.5}
    right = {name: right[name] for name, parameter in parameters.items() if parameter.default is parameter.empty}
    factory(**right)
    for name, parameter in parameters.items():
        for value in ("fast", -0.1, math.nan, *([] if parameter.default is None else [None])):
            with pytest.raises(UserError, match=rf"^{factory.__name__}\.{name} is .*: give "):
                factory(**{**right, name: value})
