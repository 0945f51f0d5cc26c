"""Measures of a training step show a state that works, one that is ignored, and one that has collapsed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from block_recurrent.layers.health import COLLECTION
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.stack import stack
from block_recurrent.training import optimizers
from block_recurrent.training.sharding import make_mesh
from block_recurrent.training.step import Trainer
from models.feedback import feedback_stack
from tests.laws.registry import recurrent, slide

ROWS, LENGTH = 2, 16
MEASURES = {
    "state_norm",
    "state_drift",
    "state_similarity",
    "gate_kept",
    "gate_taken",
    "state_share",
    "state_gradient",
}


def make_trainer(layers=None, build=stack, health=True, accumulate=1):
    model = LanguageModel(17, 12, build(layers or [slide(window=4), recurrent()]), loss_chunk=LENGTH)
    optimizer = optimizers.adam(optimizers.cosine(1e-3, 100))
    return Trainer(model, optimizer, make_mesh(fsdp=1, data=1), ROWS, accumulate, health)


@pytest.fixture(scope="module")
def trainer():
    return make_trainer()


def two_steps(trainer, change=lambda params: params):
    """Metrics of the second of two segments of one document, with parameters changed beforehand."""
    tokens = np.random.default_rng(0).integers(0, 17, (2, ROWS, LENGTH + 1), np.int32)
    state = trainer.init(0)
    state = state.replace(params=change(state.params))
    for segment in range(2):
        start = np.zeros((ROWS, LENGTH), bool)
        start[:, 0] = segment == 0
        batch = {
            "inputs": tokens[segment, :, :-1],
            "targets": tokens[segment, :, 1:],
            "weights": np.ones(start.shape, np.float32),
            "start": start,
        }
        state, metrics = trainer.step(state, batch)
    return {name: float(value) for name, value in metrics.items()}


def changed(**changes):
    """Parameters of the recurrent layer, each put through a function."""

    def change(params):
        layer = params["stack"]["layers_1"]
        changed = {name: function(layer[name]) for name, function in changes.items()}
        return {**params, "stack": {**params["stack"], "layers_1": {**layer, **changed}}}

    return change


def test_a_working_state_is_told_of(trainer):
    """Attention starts almost uniform, and so do states that have not learnt: these look where they want to."""
    metrics = two_steps(trainer, changed(state_scale=lambda a: 20 * a, state_cross_scale=lambda a: 20 * a))
    found = {name.removeprefix("health/layers_1/"): value for name, value in metrics.items() if "health" in name}
    assert set(found) == MEASURES and all(np.isfinite(list(found.values())))
    assert 0.2 < found["state_share"] < 0.8
    assert found["state_similarity"] < 0.9 and found["state_drift"] > 0.0 and found["state_gradient"] > 0.0
    assert abs(found["gate_kept"] + found["gate_taken"] - 1.0) < 1e-6  # the fixed gate


def test_a_model_that_ignores_its_state_shows(trainer):
    """The local optimum of 3.5: nothing of the states reaches the tokens."""
    half = 2 * 8
    metrics = two_steps(trainer, changed(attention_output=lambda kernel: kernel.at[half:].set(0.0)))
    assert metrics["health/layers_1/state_share"] < 0.05  # what one step of training has brought back
    assert metrics["health/layers_1/state_gradient"] < 0.05 * two_steps(trainer)["health/layers_1/state_gradient"]


def test_collapsed_states_show(trainer):
    """3.3: without IDs that tell them apart, equal states stay equal."""
    metrics = two_steps(
        trainer, changed(initial_state=lambda a: jnp.ones_like(a) * a[:1], state_ids=lambda a: jnp.ones_like(a) * a[:1])
    )
    assert metrics["health/layers_1/state_similarity"] > 0.999


def test_watching_changes_nothing(trainer):
    watched, unwatched = two_steps(trainer), two_steps(make_trainer(health=False))
    assert not any("health" in name for name in unwatched)
    for name, value in unwatched.items():
        np.testing.assert_allclose(watched[name], value, rtol=1e-5, err_msg=name)


def test_accumulated_parts_tell_their_mean(trainer):
    whole, parts = two_steps(trainer), two_steps(make_trainer(accumulate=2))
    for name in ("state_norm", "state_share", "state_similarity"):
        np.testing.assert_allclose(parts[f"health/layers_1/{name}"], whole[f"health/layers_1/{name}"], rtol=1e-4)


def test_feedback_tells_the_share_of_every_layer():
    layers = [slide(window=4), slide(window=4), recurrent("lstm", "dual")]
    metrics = two_steps(make_trainer(layers, feedback_stack))
    assert 0.2 < metrics["health/layers_0/state_share"] < 0.8
    gates = {"mlp_gate_kept", "mlp_gate_taken"}
    assert {name.split("/")[2] for name in metrics if "health/layers_1/" in name} == MEASURES | gates
    assert 0.6 < metrics["health/layers_1/gate_kept"] < 0.85 and 0.15 < metrics["health/layers_1/gate_taken"] < 0.4


def test_measures_are_taken_nowhere_else():
    """A call that does not ask for health returns what it always did."""
    layer = recurrent()
    x, start = np.ones((1, 4, 12), np.float32), np.zeros((1, 4), bool)
    variables = layer.init(jax.random.key(0), x, layer.initial_state(1), start)
    assert set(variables) == {"params"}


@pytest.mark.parametrize("layer", [recurrent(), feedback_stack([slide(window=4), recurrent()])], ids=["layer", "stack"])
def test_training_from_inside_a_block_is_not_silent(layer):
    x, start, state = np.ones((1, 4, 12), np.float32), np.zeros((1, 4), bool), layer.initial_state(1)
    variables = layer.init(jax.random.key(0), x, state, start)
    _, inside = layer.apply(variables, x[:, :1], state, start[:, :1])
    (y, _), _ = layer.apply(variables, x, inside, start, mutable=[COLLECTION])
    assert np.all(np.isnan(y))
    y, _ = layer.apply(variables, x, inside, start, rngs={"dropout": jax.random.key(1)})
    assert np.all(np.isnan(y))
