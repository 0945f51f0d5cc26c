"""Law 11 for generation: a token costs the same at position 200 and at position 20,000.

python -m benchmarks.generation
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.inference.generation import Generator, Sampling
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.stack import pattern, stack
from models.block_recurrent_transformer import BlockRecurrentLayer
from models.feedback import feedback_stack
from models.sliding_window import SlidingWindowLayer

SIZES = {"heads": 4, "head_dim": 64, "mlp_dim": 1024, "window": 128}
LAYERS = {"slide": SlidingWindowLayer(**SIZES), "rec": BlockRecurrentLayer(**SIZES, states=128, dim=256)}
MODELS = {
    "Slide": stack(pattern("4*slide", LAYERS)),
    "Rec:fixed:skip": stack(pattern("2*slide rec slide", LAYERS)),
    "Feedback:fixed:skip": feedback_stack(pattern("2*slide rec slide", LAYERS)),
}


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.generation", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Slide", "Rec:fixed:skip"])
    parser.add_argument("--positions", type=int, nargs="+", default=[200, 20_000])
    parser.add_argument("--around", type=int, default=256, help="tokens timed from each position on: two blocks")
    options = parser.parse_args()
    for name in options.models:
        measure(name, options.positions, options.around)


def measure(name: str, positions: list[int], around: int) -> None:
    """Prints the time of a token from each position on, by streams that take turns: its median, and its mean."""
    model = LanguageModel(256, 256, MODELS[name])
    tokens = jnp.zeros((1, model.block), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens, model.initial_state(1), tokens.astype(bool))
    generator = Generator(model, nn.unbox(variables)["params"], Sampling())
    streams = {position: generator([[1]], tokens=position + around) for position in positions}
    for position, stream in streams.items():
        for _ in range(position):
            next(stream)
    seconds = {position: [] for position in positions}
    for _ in range(around):
        for position, stream in streams.items():
            began = time.perf_counter()
            next(stream)
            seconds[position].append(time.perf_counter() - began)
    first = statistics.median(seconds[positions[0]])
    for position, steps in seconds.items():
        line = {
            "model": name,
            "position": position,
            "tokens_per_second": round(1 / statistics.median(steps), 1),
            "mean_tokens_per_second": round(1 / statistics.mean(steps), 1),
            "ratio_to_first": round(statistics.median(steps) / first, 3),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
