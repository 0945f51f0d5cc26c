"""Looking inside elementwise recurrences: gates and carries over a text, as arrays and as the papers' figures.

shown = gates_and_carries(model, params, tokens)          # {"layers_0/forget_gate": [n d], ...}
decay_curves(file, words, memory_decay(shown["layers_0/input_gate"], shown["layers_0/forget_gate"]))
carry_map(file, words, shown["layers_1/carry"])
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from block_recurrent.layers.inspection import COLLECTION
from block_recurrent.plots import curves_from_each, heat_map


def gates_and_carries(model: nn.Module, params: Any, tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """What every layer shows of itself over one document, [n d]; of a run of equal layers [depth n d]."""
    tokens = np.asarray(tokens)[None]
    start = np.zeros(tokens.shape, bool)
    start[:, 0] = True
    _, sown = model.apply({"params": params}, tokens, model.initial_state(1), start, mutable=[COLLECTION])
    found = {}
    for path, array in jax.tree_util.tree_leaves_with_path(sown[COLLECTION]):
        name = "/".join(key.key for key in path[-2:])
        found[name] = np.asarray(array).squeeze(axis=-3)  # the one row
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


def decay_curves(file: Path, words: Sequence[str], decay: np.ndarray) -> None:
    """Figure 1 of the LRN paper: one curve for each token's memory, along the text."""
    curves_from_each(file, words, decay, "how much of each token is left in the state", "mean of its gates' product")


def carry_map(file: Path, words: Sequence[str], carry: np.ndarray) -> None:
    """Figure 3 of the QRNN paper: the carries [n d], tokens downwards, channels across, ordered by their last value."""
    heat_map(file, words, carry[:, np.argsort(carry[-1])], "carries of the layer", "channel")
