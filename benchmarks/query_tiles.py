"""How many queries a tile of sliding-window attention should have: forward and backward of one layer.

python -m benchmarks.query_tiles --window=128
"""

import argparse
import json

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.interleaved import medians
from block_recurrent.ranges import WHOLE_1
from models.sliding_window import SlidingWindowLayer


def case(window: int, tile: int, options: argparse.Namespace):
    layer = SlidingWindowLayer(
        heads=options.heads, head_dim=options.head_dim, mlp_dim=4 * options.dim, window=window, query_tile=tile
    )
    x = jax.random.normal(jax.random.key(0), (options.batch, options.segment, options.dim))
    start, state = jnp.zeros(x.shape[:2], bool), layer.initial_state(options.batch)
    params = nn.unbox(layer.init(jax.random.key(1), x, state, start))
    gradient = jax.jit(jax.grad(lambda params, x: jnp.sum(jnp.sin(layer.apply(params, x, state, start)[0])), (0, 1)))
    return lambda: jax.block_until_ready(gradient(params, x))


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.query_tiles", description=__doc__.splitlines()[0])
    for name, default in (
        ("window", 128),
        ("dim", 256),
        ("heads", 4),
        ("head_dim", 64),
        ("segment", 1024),
        ("batch", 2),
    ):
        parser.add_argument(f"--{name}", type=WHOLE_1, default=default)
    parser.add_argument("--repetitions", type=WHOLE_1, default=9)
    options = parser.parse_args()
    tiles = [options.window // parts for parts in (1, 2, 4, 8) if options.window // parts >= 8]
    seconds = medians({str(tile): case(options.window, tile, options) for tile in tiles}, options.repetitions)
    for tile in map(str, tiles):
        ratio = seconds[tile] / seconds[str(options.window)]
        line = {"window": options.window, "query_tile": int(tile), "seconds": round(seconds[tile], 4)}
        print(json.dumps({**line, "ratio_to_whole_window": round(ratio, 3)}), flush=True)


if __name__ == "__main__":
    main()
