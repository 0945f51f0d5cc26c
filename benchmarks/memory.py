"""The Memorizing Transformer on CPU: what a token costs as the memory fills, beside the sliding window, and its bytes.

python -m benchmarks.memory
python -m benchmarks.memory --memory=4096 --repetitions=5

One JSON line for each case, medians of repetitions that take turns: one row goes on from a memory that is empty, partly
full, full, and overwritten several times, a segment at a time and token by token, with each search. A sliding-window
model has read as many tokens. What was measured is in benchmarks/memory.md.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks.generation import advance, report
from benchmarks.interleaved import medians
from block_recurrent.inference.generation import Generator, Sampling
from block_recurrent.kept_memory import keep_memory
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.stack import stack
from block_recurrent.ranges import WHOLE_1
from models.memorizing_transformer import MemorizingLayer
from models.sliding_window import SlidingWindowLayer

VOCABULARY, DIM, WINDOW = 256, 256, 128
SIZES = {"heads": 4, "head_dim": 64, "mlp_dim": 1024, "window": WINDOW}
FILLED = (0.0, 0.25, 0.5, 1.0, 3.5)  # of the memory: the last has been overwritten twice and a half
FULL = 1.0
DRAWN = 64  # tokens


def model_of(search: str | None, memory: int) -> LanguageModel:
    """Four layers, the third with a memory that is searched in this way; None: none has one."""
    slide = SlidingWindowLayer(**SIZES)
    third = MemorizingLayer(**SIZES, memory=memory, search=search) if search else slide
    return LanguageModel(VOCABULARY, DIM, stack([slide, slide, third, slide]))


class Streams:
    """A model at several places of a document, each a state of its own that goes on when it is timed."""

    def __init__(self, model: LanguageModel, segment: int):
        self.model, self.segment, self.rng = model, segment, np.random.default_rng(0)
        blank = jnp.zeros((1, model.block), jnp.int32)
        variables = jax.jit(model.init)(jax.random.key(0), blank, model.initial_state(1), blank.astype(bool))
        self.params = nn.unbox(variables)["params"]

        def read(params, tokens, state, start):
            return model.apply({"params": params}, tokens, state, start, method="features")

        self.read = jax.jit(read, donate_argnums=2)

    def after_segment(self, state, starts: bool = False):
        tokens = self.rng.integers(0, VOCABULARY, (1, self.segment), np.int32)
        start = np.arange(self.segment)[None] == (0 if starts else -1)
        return jax.block_until_ready(self.read(self.params, tokens, state, start))[1]

    def states(self, memory: int) -> dict[float, Any]:
        """The state at each place, read up to there."""
        state, found, seen = self.model.initial_state(1), {}, 0
        for filled in FILLED:
            while filled and seen < WINDOW + filled * memory:
                state, seen = self.after_segment(state, starts=seen == 0), seen + self.segment
            found[filled] = jax.tree.map(jnp.copy, state)
        return found

    def segments(self, states: dict[float, Any]) -> dict[float, Callable[[], None]]:
        states = {filled: jax.tree.map(jnp.copy, state) for filled, state in states.items()}

        def go_on(filled: float) -> None:
            states[filled] = self.after_segment(states[filled])

        return {filled: partial(go_on, filled) for filled in states}

    def generation(self, states: dict[float, Any]) -> dict[float, Callable[[], None]]:
        generator = Generator(self.model, self.params, Sampling())
        streams = {filled: generator([[1]], tokens=10**6, state=state) for filled, state in states.items()}
        return {filled: partial(advance, stream, DRAWN) for filled, stream in streams.items()}


def bytes_of(state) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--memory", type=WHOLE_1, default=32768)
    parser.add_argument("--segment", type=WHOLE_1, default=512)
    parser.add_argument("--repetitions", type=WHOLE_1, default=7)
    options = parser.parse_args()
    models = {"exact": "exact", "approximate": "approximate", "sliding window": None}
    streams = {name: Streams(model_of(search, options.memory), options.segment) for name, search in models.items()}
    states = {name: streams[name].states(options.memory) for name in ("exact", "sliding window")}
    states["approximate"] = states["exact"]  # parameters do not depend on the search
    for way, tokens in (("segments", options.segment), ("generation", DRAWN)):
        cases = {
            (name, filled): run for name in models for filled, run in getattr(streams[name], way)(states[name]).items()
        }
        seconds = medians(cases, options.repetitions)
        for (name, filled), each in seconds.items():
            report(
                way=way,
                model=name,
                memory=options.memory,
                filled=filled,
                microseconds_per_token=each / tokens * 1e6,
                ratio_to_full=each / seconds[name, FULL],
                ratio_to_sliding_window=each / seconds["sliding window", filled],
                state_megabytes=bytes_of(states[name][filled]) / 2**20,
            )


if __name__ == "__main__":
    keep_memory()
    main()
