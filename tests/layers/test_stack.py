"""Stacks from patterns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.stack import pattern, stack
from block_recurrent.training.optimizers import adafactor, inverse_square_root
from block_recurrent.training.sharding import make_mesh
from block_recurrent.training.step import Trainer
from models.sliding_window import SlidingWindowLayer


def slide(window=8):
    return SlidingWindowLayer(heads=2, head_dim=8, mlp_dim=20, window=window)


def test_equal_neighbours_become_one_run():
    layers = pattern("2*far near far 3*far", {"far": slide(8), "near": slide(4)})
    assert stack(layers).depths == (2, 1, 4)
    assert stack(layers, scan_depth=False).depths == (1,) * 7
    assert stack([slide(), slide(), slide(4)]).depths == (2, 1), "equal by configuration, not by identity"


@pytest.mark.parametrize("spec", ["2*fast", "x*slide", "slide,slide", ""])
def test_a_wrong_pattern_is_told(spec):
    with pytest.raises(UserError, match="pattern"):
        pattern(spec, {"slide": slide()})


@pytest.mark.parametrize("spec", ["1000000000*slide", "9000*slide 9000*slide", "9" * 30 + "*slide"])
def test_a_stack_beyond_all_bounds_is_refused_before_it_is_built(spec):
    with pytest.raises(UserError, match="pattern"):
        pattern(spec, {"slide": slide()})


class Bare(nn.Module):
    """A layer without `block` and without `initial_state`."""

    dim: int = 12

    def __call__(self, x, state, start):
        return x, state


class Layer(Bare):
    block = 1

    def initial_state(self, batch):
        return ()


class Blockless(Layer):
    block = 0


class Batchless(Layer):
    def initial_state(self):
        return ()


class Stateless(Layer):
    def __call__(self, x, state, start):
        return x


class Flat(Layer):
    def __call__(self, x, state, start):
        return x[:, 0], state


def test_what_is_no_layer_is_refused():
    with pytest.raises(UserError, match="Bare has no block: a layer of a stack has"):
        stack([Bare()])
    with pytest.raises(UserError, match=r"Blockless.block is 0: give a whole number, 1 or more"):
        stack([Blockless()])
    with pytest.raises(UserError, match=r"Batchless.initial_state takes no batch"):
        stack([Batchless()])
    with pytest.raises(UserError, match="a stack has 3 for a layer"):
        stack(pattern("slide", {"slide": 3}))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Layer(dim=7), "Layer.dim is 7, but its inputs are 12 wide"),
        (Stateless(), "Stateless returns ArrayImpl: a layer returns"),
        (Flat(), r"Flat returns a y of shape \(2, 12\) for an x of \(2, 8, 12\)"),
    ],
)
def test_a_layer_that_breaks_the_contract_is_named(layer, message):
    whole = stack([slide(), layer])
    with pytest.raises(UserError, match=message):
        whole.init(jax.random.key(0), jnp.zeros((2, 8, 12)), whole.initial_state(2), jnp.zeros((2, 8), bool))


def test_a_query_tile_divides_its_window():
    with pytest.raises(UserError, match="query_tile 3 does not divide the window 8"):
        SlidingWindowLayer(heads=2, head_dim=8, mlp_dim=20, window=8, query_tile=3)


def test_blocks_that_do_not_fit_are_told():
    assert stack([slide(4), slide(8)]).block == 8
    with pytest.raises(UserError, match="block 6 does not fit in a stack of block 8"):
        stack([slide(6), slide(8)])


def test_a_layer_may_have_parameters_without_names_of_axes():
    class Dense(Layer):
        @nn.compact
        def __call__(self, x, state, start):
            return nn.Dense(self.dim)(x), state

    model = LanguageModel(16, 12, stack([Dense(), Dense()]))
    trainer = Trainer(model, adafactor(inverse_square_root()), make_mesh(), 2)
    tokens = np.ones((2, 8), np.int32)
    batch = {"inputs": tokens, "targets": tokens, "weights": np.ones((2, 8), np.float32), "start": tokens > 1}
    assert np.isfinite(trainer.step(trainer.init(0), batch)[1]["loss"])
