"""The stack and the language model in NumPy, given a reference for each kind of layer."""

import jax
import numpy as np

from models.block_recurrent_transformer import BlockRecurrentLayer
from models.lrn import ATRLayer, LRNLayer
from models.memorizing_transformer import MemorizingLayer
from models.qrnn import QRNNLayer
from models.r_transformer import RTransformerLayer
from models.rnn import RNNLayer
from models.sliding_window import SlidingWindowLayer
from models.sru import SRULayer, SRUppLayer
from models.tcn import TCNLayer
from models.transformer import Positions, TransformerLayer
from tests.reference import baselines, heads
from tests.reference.block_recurrent import block_recurrent_layer, states_seen
from tests.reference.memorizing import memorizing_layer
from tests.reference.recurrences import atr_layer, lrn_layer, qrnn_layer, sru_layer, srupp_layer
from tests.reference.sliding_window import rms, sliding_window_layer

LAYERS = {
    SlidingWindowLayer: sliding_window_layer,
    BlockRecurrentLayer: block_recurrent_layer,
    MemorizingLayer: memorizing_layer,
    QRNNLayer: qrnn_layer,
    SRULayer: sru_layer,
    SRUppLayer: srupp_layer,
    LRNLayer: lrn_layer,
    ATRLayer: atr_layer,
    RNNLayer: baselines.rnn_layer,
    TCNLayer: baselines.tcn_layer,
    Positions: baselines.positions,
    TransformerLayer: baselines.transformer_layer,
    RTransformerLayer: baselines.r_transformer_layer,
}


def run_layer(layer, params, x, state, start, *shown):
    return LAYERS[type(layer)](layer, params, x, state, start, *shown)


def run_stack(stack, params, x, state, start, *shown):
    next_state = []
    for i, (layer, depth) in enumerate(zip(stack.layers, stack.depths, strict=True)):
        layer_params = params.get(f"layers_{i}", {})  # a layer may have none
        if depth == 1:
            x, new = run_layer(layer, layer_params, x, state[i], start, *shown)
        else:
            states = []
            for level in range(depth):
                at_level = jax.tree.map(lambda p, level=level: p[level], layer_params)
                before = jax.tree.map(lambda s, level=level: s[:, level], state[i])
                x, after = run_layer(layer, at_level, x, before, start, *shown)
                states.append(after)
            new = jax.tree.map(lambda *s: np.stack(s, axis=1), *states)
        next_state.append(new)
    return x, tuple(next_state)


def run_feedback_stack(stack, params, x, state, start):
    """The whole stack on one block after another, each block seeing the last recurrent layer's state before it."""
    last = max(i for i, layer in enumerate(stack.layers) if isinstance(layer, BlockRecurrentLayer))
    layer, own = stack.layers[last], params[f"layers_{last}"]
    outputs = []
    for at in range(0, x.shape[1], stack.block):
        block = slice(at, at + stack.block)
        rows = [
            states_seen(layer, own, own["initial_state"] if start[b, at] else state[last]["recurrent"][b])[:2]
            for b in range(len(x))
        ]
        shown = tuple(np.stack(part) for part in zip(*rows, strict=True))
        y, state = run_stack(stack, params, x[:, block], state, start[:, block], shown)
        outputs.append(y)
    return np.concatenate(outputs, axis=1), state


def run_language_model(model, params, tokens, state, start):
    x = np.array([[heads.embed(model, params, token) for token in row] for row in tokens])
    x, state = run_stack(model.stack, params["stack"], x, state, start)
    if model.final_norm:
        x = np.apply_along_axis(rms, -1, x, params["final_norm"])
    return np.array([[heads.logits(model, params, features) for features in row] for row in x]), state
