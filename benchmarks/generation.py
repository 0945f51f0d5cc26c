"""Law 11 for generation: a token costs the same at position 200 and at position 20,000.

python -m benchmarks.generation
"""

import argparse
import itertools
import json
import statistics
import time

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.inference.generation import Generator, Sampling
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.stack import pattern, stack
from models.sliding_window import SlidingWindowLayer


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.generation", description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, nargs="+", default=[200, 20_000])
    parser.add_argument("--around", type=int, default=200, help="tokens timed from each position on")
    options = parser.parse_args()
    layer = SlidingWindowLayer(heads=4, head_dim=64, mlp_dim=1024, window=128)
    model = LanguageModel(256, 256, stack(pattern("4*slide", {"slide": layer})))
    tokens = jnp.zeros((1, model.block), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens, model.initial_state(1), tokens.astype(bool))
    generator = Generator(model, nn.unbox(variables)["params"], Sampling())
    ends, last = [], max(options.positions) + options.around
    for _ in generator([[1]], tokens=last):
        ends.append(time.perf_counter())
    first = None
    for position in options.positions:
        seconds = statistics.median(
            after - before for before, after in itertools.pairwise(ends[position : position + options.around])
        )
        first = first or seconds
        line = {
            "position": position,
            "tokens_per_second": round(1 / seconds, 1),
            "ratio_to_first": round(seconds / first, 3),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
