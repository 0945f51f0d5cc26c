"""Gates and carries of a model over a text, and the papers' figures of them."""

from types import SimpleNamespace

import jax
import matplotlib.image
import numpy as np
import pytest
from flax import linen as nn

from block_recurrent.inference.inspection import carry_map, decay_curves, inside, layer_by_layer, memory_decay
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.stack import stack
from models.lrn import LRNLayer
from models.qrnn import QRNNLayer

TEXT = "The film was $5 and\n great"
DIM = 6


@pytest.fixture(scope="module")
def shown():
    layers = [LRNLayer(DIM, DIM, activation="identity"), QRNNLayer(DIM, DIM), QRNNLayer(DIM, DIM)]
    model = LanguageModel(256, DIM, stack(layers))
    tokens = np.frombuffer(TEXT.encode(), np.uint8)[None].astype(np.int32)
    variables = model.init(jax.random.key(0), tokens, model.initial_state(1), np.zeros(tokens.shape, bool))
    return inside(model, nn.unbox(variables)["params"], tokens[0])


def test_every_layer_shows_itself(shown):
    assert {name: array.shape for name, array in shown.items()} == {
        "layers_0/input_gate": (len(TEXT), DIM),
        "layers_0/forget_gate": (len(TEXT), DIM),
        "layers_1/carry": (2, len(TEXT), DIM),
        "layers_1/forget_gate": (2, len(TEXT), DIM),
    }


def test_memory_decays_by_the_gates_that_follow():
    """With an identity activation the state is the sum of what is left of every token (LRN paper, eq. 5)."""
    rng = np.random.default_rng(0)
    i, f, v = rng.random((3, 5, 1))
    h = np.zeros(1)
    for t in range(5):
        h = i[t] * v[t] + f[t] * h
    left = memory_decay(i, f)
    np.testing.assert_allclose(sum(left[s, 4] * v[s] for s in range(5)), h)
    assert np.isnan(left[3, 2])


def test_the_figures_are_drawn(shown, tmp_path):
    decay_curves(
        tmp_path / "decay.png", TEXT, memory_decay(shown["layers_0/input_gate"], shown["layers_0/forget_gate"])
    )
    carry_map(tmp_path / "map.png", TEXT, shown["layers_1/carry"][-1])
    for name in ("decay", "map"):
        assert matplotlib.image.imread(tmp_path / f"{name}.png").std() > 0.05


def test_runs_of_equal_layers_are_taken_apart(shown):
    model = SimpleNamespace(stack=SimpleNamespace(depths=(1, 2)))
    layers = layer_by_layer(model, shown)
    assert {name: set(own) for name, own in layers.items()} == {
        "layer 0": {"input_gate", "forget_gate"},
        "layer 1": {"carry", "forget_gate"},
        "layer 2": {"carry", "forget_gate"},
    }
    np.testing.assert_array_equal(layers["layer 2"]["carry"], shown["layers_1/carry"][1])
