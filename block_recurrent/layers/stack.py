"""A stack of layers is itself a layer; equal neighbours run as one scan over depth."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers import health, inspection
from block_recurrent.layers.fields import check_layer
from block_recurrent.layers.target import platform

MOST_LAYERS = 10_000
# So many equal layers stand side by side in a CPU's program: faster than a loop over depth. More of them take the loop:
# 13 side by side would take 0.88 of its time and a third more memory (benchmarks/peers.md).
UNROLLED = 4


def pattern(spec: str, layers: Mapping[str, nn.Module | Callable[[], nn.Module]]) -> tuple[nn.Module, ...]:
    """Spells out a stack from names: "9*slide rec 2*slide" with {"slide": ..., "rec": ...}.

    A layer may be given as a function that makes it, called if its name occurs.
    """
    stack = []
    made: dict[str, nn.Module] = {}
    for count, name in counts_and_names(spec, layers):
        if name not in made:
            is_factory = callable(layers[name]) and not isinstance(layers[name], nn.Module)
            made[name] = layers[name]() if is_factory else layers[name]
        stack += [made[name]] * count
    return tuple(stack)


def counts_and_names(spec: str, known: Collection[str]) -> list[tuple[int, str]]:
    """Reads "9*slide rec" as [(9, "slide"), (1, "rec")]."""
    words = []
    for word in spec.split():
        match = re.fullmatch(r"(?:(\d{1,18})\*)?(\w+)", word)
        if not match or match[2] not in known:
            raise UserError(
                f"pattern {spec!r}: {word!r} is not one of {', '.join(sorted(known))}, alone or as COUNT*NAME"
            )
        words.append((int(match[1] or 1), match[2]))
    depth = sum(count for count, _ in words)
    if depth == 0:
        raise UserError(f"pattern {spec!r} names no layer: name at least one")
    if depth > MOST_LAYERS:
        raise UserError(f"pattern {spec!r} has {depth:,} layers: give {MOST_LAYERS:,} or fewer")
    return words


# What the backward pass finds saved of a layer, by the value of `remat`; the rest is computed again.
REMAT = {
    False: None,
    True: jax.checkpoint_policies.nothing_saveable,
    "products": jax.checkpoint_policies.dots_saveable,  # of every matrix product
    "projections": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # of products with parameters alone
}


def stack(layers: Sequence[nn.Module], scan_depth: bool = True, remat: bool | str = False) -> "Stack":
    """Builds a stack; with `scan_depth`, equal neighbours are compiled once and hold stacked parameters.

    `remat` computes layers again in the backward pass: all of them (True), or all but "products" or "projections".
    """
    if remat not in REMAT:
        raise UserError(f"remat is {remat!r}: give one of {', '.join(map(repr, REMAT))}")
    return Stack(*runs_of(layers, lambda layer: scan_depth), remat=remat)


def runs_of(
    layers: Sequence[nn.Module], scanned: Callable[[nn.Module], bool]
) -> tuple[tuple[nn.Module, ...], tuple[int, ...]]:
    """The layers of a stack, equal neighbours that are `scanned` once, and how often each is repeated.

    What is no layer, fields out of range and blocks that do not fit together are refused.
    """
    runs: list[list] = []
    for layer in layers:
        check_layer(layer)
        if scanned(layer) and runs and runs[-1][0] == layer:
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
    return tuple(layer.clone() for layer, _ in runs), tuple(depth for _, depth in runs)


class Stack(nn.Module):
    """Runs of layers, the i-th repeated depths[i] times; build it with `stack`.

    The state of a single layer is its own; that of a run has the depth as second axis: [b depth ...].
    """

    layers: tuple[nn.Module, ...]
    depths: tuple[int, ...]
    remat: bool | str = False

    in_pieces = False  # whether what a layer shows of itself has an axis of pieces of the text before all others

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

    def for_decoding(self, state: tuple) -> tuple:
        """The state as decoding keeps it, of those layers that have such a form; calls take and return either."""
        return self.converted("for_decoding", state)

    def from_decoding(self, state: tuple) -> tuple:
        """The state as training and saved streams have it."""
        return self.converted("from_decoding", state)

    def converted(self, method: str, state: tuple) -> tuple:
        def of_run(layer, depth, state):
            convert = getattr(layer, method, None)
            if convert is None:
                return state
            return convert(state) if depth == 1 else jax.vmap(convert, in_axes=1, out_axes=1)(state)

        return tuple(map(of_run, self.layers, self.depths, state))

    @nn.compact
    def __call__(self, x: jax.Array, state: tuple, start: jax.Array) -> tuple[jax.Array, tuple]:
        return self.through_layers(x, state, start)

    def through_layers(self, x: jax.Array, state: tuple, start: jax.Array, *shown: Any) -> tuple[jax.Array, tuple]:
        """One layer after another; `shown` is what every layer is given besides, if anything."""

        # Functions over built layers are lifted, never classes: a lifted class loses its configuration.
        def run(layer: nn.Module, x: jax.Array, state: Any, *shown: Any):
            if x.shape[1] % self.block and x.shape[1] % layer.block == 0 and layer.block > 1:
                # Starts may be anywhere in such a call, but this layer would take it for whole blocks of its own.
                head, state = through(layer, x[:, :-1], state, start[:, :-1], *shown)
                tail, state = through(layer, x[:, -1:], state, start[:, -1:], *shown)
                return jnp.concatenate([head, tail], axis=1), state
            return through(layer, x, state, start, *shown)

        run = nn.remat(run, prevent_cse=False, policy=REMAT[self.remat]) if self.remat else run
        next_state = []
        for layer, depth, layer_state in zip(self.layers, self.depths, state, strict=True):
            if depth > 1:
                over_depth = nn.scan(
                    run,
                    variable_axes={"params": 0, health.COLLECTION: 0, inspection.COLLECTION: 0},
                    split_rngs={"params": True, "dropout": True},
                    in_axes=(1, *[nn.broadcast] * len(shown)),
                    out_axes=1,
                    length=depth,
                    metadata_params={nn.PARTITION_NAME: "layers"},
                    unroll=depth if platform() == "cpu" and depth <= UNROLLED else 1,
                )
                x, layer_state = over_depth(layer, x, layer_state, *shown)
            else:
                x, layer_state = run(layer, x, layer_state, *shown)
            next_state.append(layer_state)
        return x, tuple(next_state)


def through(layer: nn.Module, x: jax.Array, state: Any, start: jax.Array, *shown: Any) -> tuple[jax.Array, Any]:
    """Calls a layer, and refuses one for inputs of another width, or one that breaks the contract of layers."""
    name, width = type(layer).__name__, x.shape[-1]
    if getattr(layer, "dim", width) != width:
        raise UserError(f"{name}.dim is {layer.dim}, but its inputs are {width} wide: give both one size")
    returned = layer(x, state, start, *shown)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UserError(f"{name} returns {type(returned).__name__}: a layer returns (y, next state)")
    shape = getattr(returned[0], "shape", None)
    if shape is None or len(shape) != 3 or shape[:2] != x.shape[:2]:
        raise UserError(f"{name} returns a y of shape {shape} for an x of {x.shape}: a layer returns y [b n width]")
    return returned


def unrolled(stack: Stack) -> Stack:
    """The same stack with every layer on its own; `unstacked_params` and `unstacked_state` are for it."""
    # Clones: one module in two places would share its parameters.
    layers = tuple(layer.clone() for layer, depth in zip(stack.layers, stack.depths, strict=True) for _ in range(depth))
    return stack.clone(layers=layers, depths=(1,) * len(layers))


def unstacked_params(stack: Stack, params: Mapping[str, Any]) -> dict[str, Any]:
    """A stack's parameters, of which runs of equal layers share arrays, layer by layer."""
    apart: list[Any] = []
    for i, depth in enumerate(stack.depths):
        run = params.get(f"layers_{i}", {})  # a layer may have none
        apart += [run] if depth == 1 else [jax.tree.map(lambda a, at=at: a[at], run) for at in range(depth)]
    return {f"layers_{i}": layer for i, layer in enumerate(apart)}


def unstacked_state(stack: Stack, state: tuple) -> tuple:
    """A stack's state, layer by layer."""
    apart: list[Any] = []
    for depth, run in zip(stack.depths, state, strict=True):
        apart += [run] if depth == 1 else [jax.tree.map(lambda a, at=at: a[:, at], run) for at in range(depth)]
    return tuple(apart)
