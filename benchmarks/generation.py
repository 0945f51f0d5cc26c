"""Generation on CPU: tokens a second of one text and of several, and whether a token costs more at a later position.

python -m benchmarks.generation                    # 1, 8 and 64 texts at once
python -m benchmarks.generation --part=positions   # law 11: at position 100,000 a token costs what it does at 100

One JSON line for each case, medians of repetitions that take turns. `python -m benchmarks.peers --part=generation` has
PyTorch's package, or an older checkout, beside it. What was measured is in benchmarks/generation.md.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.interleaved import medians
from block_recurrent.inference.generation import Generator, Sampling
from block_recurrent.kept_memory import keep_memory
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.stack import pattern, stack
from block_recurrent.ranges import WHOLE_1
from models.block_recurrent_transformer import BlockRecurrentLayer
from models.feedback import feedback_stack
from models.sliding_window import SlidingWindowLayer

VOCABULARY, DIM, WINDOW = 256, 256, 128
SIZES = {"heads": 4, "head_dim": 64, "mlp_dim": 1024, "window": WINDOW}
LAYERS = {"slide": SlidingWindowLayer(**SIZES), "rec": BlockRecurrentLayer(**SIZES, states=WINDOW, dim=DIM)}
MODELS = {
    "Slide": stack(pattern("4*slide", LAYERS)),
    "Rec:fixed:skip": stack(pattern("2*slide rec slide", LAYERS)),
    "Feedback:fixed:skip": feedback_stack(pattern("2*slide rec slide", LAYERS)),
}


def generator_of(name: str) -> Generator:
    model = LanguageModel(VOCABULARY, DIM, MODELS[name])
    tokens = jnp.zeros((1, model.block), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens, model.initial_state(1), tokens.astype(bool))
    return Generator(model, nn.unbox(variables)["params"], Sampling())


def advance(stream: Iterator, tokens: int) -> None:
    for _ in range(tokens):
        next(stream)


def positions(name: str, options: argparse.Namespace) -> None:
    """A block of tokens from each position on, by streams that take turns."""
    generator = generator_of(name)
    streams = {position: generator([[1]], tokens=position + 10**6) for position in options.positions}
    for position, stream in streams.items():
        advance(stream, position)
    seconds = medians({at: partial(advance, stream, WINDOW) for at, stream in streams.items()}, options.repetitions)
    for position, block in seconds.items():
        ratio = block / seconds[options.positions[0]]
        report(model=name, position=position, tokens_per_second=WINDOW / block, ratio_to_first=ratio)


def rows(name: str, options: argparse.Namespace) -> None:
    """A block of tokens of each number of texts."""
    generator = generator_of(name)
    streams = {number: generator([[1]] * number, tokens=10**6) for number in options.rows}
    seconds = medians(
        {number: partial(advance, stream, WINDOW) for number, stream in streams.items()}, options.repetitions
    )
    for number, block in seconds.items():
        report(model=name, rows=number, tokens_per_second=number * WINDOW / block)


def report(**values) -> None:
    """A line, with numbers to three digits."""
    print(
        json.dumps({name: float(f"{v:.3g}") if isinstance(v, float) else v for name, v in values.items()}), flush=True
    )


PARTS = {"rows": rows, "positions": positions}


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.generation", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, default="rows")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Rec:fixed:skip"])
    parser.add_argument("--rows", type=WHOLE_1, nargs="+", default=[1, 8, 64])
    parser.add_argument("--positions", type=WHOLE_1, nargs="+", default=[100, 100_000])
    parser.add_argument("--repetitions", type=WHOLE_1, default=7)
    options = parser.parse_args()
    for name in options.models:
        PARTS[options.part](name, options)


if __name__ == "__main__":
    keep_memory()
    main()
