"""A stack of layers is itself a layer; equal neighbours run as one scan over depth."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError


def pattern(spec: str, layers: Mapping[str, nn.Module]) -> tuple[nn.Module, ...]:
    """Spells out a stack from names: "9*slide rec 2*slide" with {"slide": ..., "rec": ...}."""
    stack = []
    for word in spec.split():
        match = re.fullmatch(r"(?:(\d+)\*)?(\w+)", word)
        if not match or match[2] not in layers:
            raise UserError(
                f"pattern {spec!r}: {word!r} is not one of {', '.join(sorted(layers))}, alone or as COUNT*NAME"
            )
        stack += [layers[match[2]]] * int(match[1] or 1)
    if not stack:
        raise UserError("pattern is empty: name at least one layer")
    return tuple(stack)


def stack(layers: Sequence[nn.Module], scan_depth: bool = True, remat: bool = False) -> "Stack":
    """Builds a stack; with `scan_depth`, equal neighbours are compiled once and hold stacked parameters."""
    runs: list[list] = []
    for layer in layers:
        if scan_depth and runs and runs[-1][0] == layer:
            runs[-1][1] += 1
        else:
            runs.append([layer, 1])
    block = max(layer.block for layer in layers)
    for layer in layers:
        if block % layer.block:
            raise UserError(
                f"a layer of block {layer.block} does not fit in a stack of block {block}: "
                "make one a multiple of the other"
            )
    return Stack(
        layers=tuple(layer.clone() for layer, _ in runs),
        depths=tuple(depth for _, depth in runs),
        remat=remat,
    )


class Stack(nn.Module):
    """Runs of layers, the i-th repeated depths[i] times; build it with `stack`.

    The state of a single layer is its own; that of a run has the depth as second axis: [b depth ...].
    """

    layers: tuple[nn.Module, ...]
    depths: tuple[int, ...]
    remat: bool = False

    @property
    def block(self) -> int:
        return max(layer.block for layer in self.layers)

    def initial_state(self, batch: int) -> tuple:
        def repeated(layer, depth):
            state = layer.initial_state(batch)
            if depth == 1:
                return state
            return jax.tree.map(lambda a: a[:, None].repeat(depth, axis=1), state)

        return tuple(map(repeated, self.layers, self.depths))

    @nn.compact
    def __call__(self, x: jax.Array, state: tuple, start: jax.Array) -> tuple[jax.Array, tuple]:
        # Functions over built layers are lifted, never classes: a lifted class loses its configuration.
        def run(layer: nn.Module, x: jax.Array, state: Any):
            if x.shape[1] % self.block and x.shape[1] % layer.block == 0 and layer.block > 1:
                # Starts may be anywhere in such a call, but this layer would take it for whole blocks of its own.
                head, state = layer(x[:, :-1], state, start[:, :-1])
                tail, state = layer(x[:, -1:], state, start[:, -1:])
                return jnp.concatenate([head, tail], axis=1), state
            return layer(x, state, start)

        run = nn.remat(run, prevent_cse=False) if self.remat else run
        next_state = []
        for layer, depth, layer_state in zip(self.layers, self.depths, state, strict=True):
            if depth > 1:
                over_depth = nn.scan(
                    run,
                    variable_axes={"params": 0, "intermediates": 0},
                    split_rngs={"params": True, "dropout": True},
                    in_axes=1,
                    out_axes=1,
                    length=depth,
                    metadata_params={nn.PARTITION_NAME: "layers"},
                )
                x, layer_state = over_depth(layer, x, layer_state)
            else:
                x, layer_state = run(layer, x, layer_state)
            next_state.append(layer_state)
        return x, tuple(next_state)
