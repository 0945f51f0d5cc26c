"""Looking inside: gates, carries, states and who attends to what over a text, as arrays and as the papers' figures.

shown = inside(model, params, tokens)          # {"layers_0/forget_gate": [n d], ...}
decay_curves(file, words, memory_decay(shown["layers_0/input_gate"], shown["layers_0/forget_gate"]))
carry_map(file, words, shown["layers_1/carry"])
layer_by_layer(model, shown)                   # {"layer 0": {"forget_gate": [n d], ...}, "layer 1": ...}

A figure is returned, and written where a file is given.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import linen as nn

from block_recurrent.layers.inspection import COLLECTION
from block_recurrent.plots import curves_from_each, heat_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def inside(model: nn.Module, params: Any, tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """What every layer shows of itself over one document, "LAYER/WHAT": of every token [n ...] or block [blocks ...].

    Of a run of equal layers it is [depth n ...] or [depth blocks ...].
    """
    tokens, block = np.asarray(tokens, np.int32), model.block
    length = block if block > 1 else len(tokens)

    @jax.jit
    def look(params, piece, state, start):
        (_, state), sown = model.apply({"params": params}, piece, state, start, mutable=[COLLECTION])
        return state, sown.get(COLLECTION, {})

    state, pieces = model.initial_state(1), []
    for at in range(0, len(tokens), length):
        piece = np.pad(tokens[at : at + length], (0, max(at + length - len(tokens), 0)))  # nothing looks ahead
        start = np.zeros((1, length), bool)
        start[0, 0] = at == 0
        state, sown = look(params, piece[None], state, start)
        pieces.append(of_one_row(model.stack, sown))
    found = {}
    for name in pieces[0] if pieces else ():
        depth_first = model.stack.depths[layer_number(name)] > 1
        joined = np.concatenate([piece[name] for piece in pieces], axis=int(depth_first))
        found[name] = joined[:, : len(tokens)] if depth_first else joined[: len(tokens)]
    return found


def of_one_row(stack: nn.Module, sown: Any) -> dict[str, np.ndarray]:
    """What was sown by a call with one row, without the axes of one."""
    found = {}
    for path, array in jax.tree_util.tree_leaves_with_path(sown):
        name = "/".join(key.key for key in path[-2:])
        array = np.asarray(array)[0] if stack.in_pieces else np.asarray(array)
        found[name] = array[:, 0] if stack.depths[layer_number(name)] > 1 else array[0]
    return found


def layer_number(name: str) -> int:
    """3 of "layers_3/carry"."""
    return int(name.partition("/")[0].rpartition("_")[2])


def layer_by_layer(model: nn.Module, shown: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """The same for each layer alone, from the bottom: runs of equal layers are taken apart."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for number, depth in enumerate(model.stack.depths):
        first = sum(model.stack.depths[:number])
        own = {name.partition("/")[2]: array for name, array in shown.items() if layer_number(name) == number}
        for i in range(depth if own else 0):
            found[f"layer {first + i}"] = {what: array[i] if depth > 1 else array for what, array in own.items()}
    return found


def memory_decay(input_gate: np.ndarray, forget_gate: np.ndarray) -> np.ndarray:
    """How much of token s is left in the state after token t >= s, [s t], the mean over channels (LRN paper, eq. 5).

    A token comes in by its input gate and goes on by the forget gates of all tokens after it; gates are [n d].
    """
    n = len(input_gate)
    left = np.full((n, n), np.nan)
    for s in range(n):
        strength = input_gate[s]
        left[s, s] = strength.mean()
        for t in range(s + 1, n):
            strength = strength * forget_gate[t]
            left[s, t] = strength.mean()
    return left


def decay_curves(file: Path | None, words: Sequence[str], decay: np.ndarray, of: str = "the layer") -> "Figure":
    """Figure 1 of the LRN paper: one curve for each token's memory, along the text."""
    title = f"how much of each token is left in the state of {of}"
    return curves_from_each(file, words, decay, title, "mean of its gates' product, 0 to 1")


def carry_map(file: Path | None, words: Sequence[str], carry: np.ndarray, of: str = "the layer") -> "Figure":
    """Figure 3 of the QRNN paper: the carries [n d], tokens downwards, channels across, ordered by their last value."""
    ordered = carry[:, np.argsort(carry[-1])]
    return heat_map(file, words, ordered, f"carries of {of}", "channel, by its last value", "carry")
