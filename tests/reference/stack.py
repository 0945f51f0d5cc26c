"""The stack and the language model in NumPy, given a reference for each kind of layer."""

import jax
import numpy as np

from models.block_recurrent_transformer import BlockRecurrentLayer
from models.sliding_window import SlidingWindowLayer
from tests.reference.block_recurrent import block_recurrent_layer
from tests.reference.sliding_window import rms, sliding_window_layer

LAYERS = {SlidingWindowLayer: sliding_window_layer, BlockRecurrentLayer: block_recurrent_layer}


def run_layer(layer, params, x, state, start):
    return LAYERS[type(layer)](layer, params, x, state, start)


def run_stack(stack, params, x, state, start):
    next_state = []
    for i, (layer, depth) in enumerate(zip(stack.layers, stack.depths, strict=True)):
        layer_params = params[f"layers_{i}"]
        if depth == 1:
            x, new = run_layer(layer, layer_params, x, state[i], start)
        else:
            states = []
            for level in range(depth):
                at_level = jax.tree.map(lambda p, level=level: p[level], layer_params)
                before = jax.tree.map(lambda s, level=level: s[:, level], state[i])
                x, after = run_layer(layer, at_level, x, before, start)
                states.append(after)
            new = jax.tree.map(lambda *s: np.stack(s, axis=1), *states)
        next_state.append(new)
    return x, tuple(next_state)


def run_language_model(model, params, tokens, state, start):
    x = params["embedding"][tokens]
    x, state = run_stack(model.stack, params["stack"], x, state, start)
    normed = np.apply_along_axis(rms, -1, x, params["final_norm"])
    return normed @ params["embedding"].T / np.sqrt(model.dim), state
