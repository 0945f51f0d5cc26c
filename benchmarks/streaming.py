"""How much memory a long document takes: ten million bytes through one stream, in pieces.

python -m benchmarks.streaming
python -m benchmarks.streaming --run=runs/quickstart --tokens=2e6

The process's resident memory is told along the way; it is held by the model's state, so it does not grow.
"""

import argparse
import resource
import time
from pathlib import Path

import jax
import numpy as np
from flax import linen as nn

import block_recurrent
from block_recurrent.data.vocabulary import ByteVocabulary
from block_recurrent.inference.streaming import Scorer, Stream
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.stack import stack
from block_recurrent.ranges import Range
from models.block_recurrent_transformer import BlockRecurrentLayer
from models.sliding_window import SlidingWindowLayer

PIECE = 100_001  # tokens, no multiple of anything
SIZES = {"heads": 2, "head_dim": 16, "mlp_dim": 64, "window": 64}


def small_stream() -> Stream:
    """A stream of a small untrained Rec:fixed:skip."""
    layers = [SlidingWindowLayer(**SIZES), BlockRecurrentLayer(**SIZES, states=16, dim=32)]
    model = LanguageModel(ByteVocabulary.size, 32, stack(layers))
    tokens = np.zeros((1, model.block), np.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens, model.initial_state(1), tokens.astype(bool))
    return Stream(Scorer(model), nn.unbox(variables)["params"], ByteVocabulary(), {})


def resident() -> int:
    """Megabytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a training run's workdir (default: a small untrained model)")
    parser.add_argument("--tokens", type=Range(least=1, most=1e15), default=1e7)
    options = parser.parse_args()
    stream = block_recurrent.open(options.run).stream() if options.run else small_stream()
    size, rng, began, told = stream.scorer.model.vocabulary_size, np.random.default_rng(0), time.perf_counter(), 0
    while stream.position < options.tokens:
        stream.feed(rng.integers(3, size, PIECE))
        if stream.position >= told:
            speed = stream.position / (time.perf_counter() - began)
            print(f"{stream.position:>12,} tokens: {resident():,} MB, {speed:,.0f} tokens a second", flush=True)
            told += options.tokens / 10


if __name__ == "__main__":
    main()
