"""This project as a contender, from whichever source tree is on PYTHONPATH: a step, generation, or one layer."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from layers import layers
from serving import serve


def step(options: argparse.Namespace) -> None:
    from benchmarks.step import LAYERS, SIZES, Case

    case = Case(LAYERS[options.size][options.model], SIZES[options.size])
    parameters = sum(leaf.size for leaf in jax.tree.leaves(case.state.params))
    serve(case.run, SIZES[options.size]["rows"] * case.segment, parameters)


def generation(options: argparse.Namespace) -> None:
    from benchmarks.generation import WINDOW, generator_of

    name = {"rec": "Rec:fixed:skip", "slide": "Slide"}[options.model]
    # Prompts of different lengths end their blocks apart.
    prompts = [[1] * (1 + 37 * row % WINDOW if options.uneven else 1) for row in range(options.rows)]
    stream = generator_of(name)(prompts, tokens=10**6)

    def block() -> None:
        for _ in range(WINDOW):
            next(stream)

    serve(block, WINDOW * options.rows)


def layer(options: argparse.Namespace) -> None:
    """Forward and backward through one layer, by all that it is given."""
    from flax import linen as nn

    rows, length, width = (int(number) for number in options.shape.split(","))
    module = layers(width)[options.layer]()
    rng = np.random.default_rng(0)
    x, start = rng.normal(size=(rows, length, width)).astype(np.float32), np.zeros((rows, length), bool)
    state = module.initial_state(rows)
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), x, state, start))

    def total(params, x):
        y, _ = module.apply(params, x, state, start, mutable=["health"])[0]  # watched, as training does
        return jnp.sum(y * y)

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))
    serve(lambda: jax.block_until_ready(gradient(params, x)), rows * length)


PARTS = {"step": step, "generation": generation, "layer": layer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--size", default="small")
    parser.add_argument("--model", default="rec")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--layer", default="sru")
    parser.add_argument("--shape", default="4,512,256")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
