"""What is about to be trained: printed before it starts."""

import re
from collections.abc import Iterator

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from block_recurrent.data.rows import RowStream
from block_recurrent.training.step import boxed_params, is_boxed

LAYERS = re.compile(r"(?:.*/)?layers_(\d+)/(.+)")  # equal neighbours are one group, their arrays stacked


def parameter_counts(params) -> tuple[int, int]:
    """How many parameters there are, and how many without the embedding."""
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return count, count - sum(leaf.size for name, leaf in params.items() if name.startswith("embedding"))


def overview(
    model: nn.Module, params, mesh: Mesh, rows: int, segment: int, steps: int, stream: RowStream, with_table: bool
) -> str:
    """Parameters, state, batch and devices of a run, with a table of its parameters where it is new."""
    count, outside = parameter_counts(params)
    state = jax.eval_shape(lambda: model.initial_state(1))
    state_bytes = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    tokens = rows * segment
    corpus = stream.inputs
    device = jax.devices()[0]
    shape = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return "\n".join(
        [
            *(parameter_table(model) if with_table else ()),
            f"parameters:      {count:,} ({outside:,} without the embedding)",
            f"state of a row:  {state_bytes / 1024:,.0f} kB",
            f"tokens per step: {tokens:,} = {rows} rows x {segment}",
            f"training:        {steps:,} steps = {tokens * steps:,} tokens, "
            f"{tokens * steps / corpus:.2f} epochs of {corpus:,}",
            f"devices:         {jax.device_count()} {device.platform} ({device.device_kind}), mesh {shape}",
        ]
    )


def parameter_table(model: nn.Module) -> Iterator[str]:
    """Yields a line for each array of parameters, and for layers that are alike those of one of them."""
    alone, layers = [], {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(boxed_params(model), is_leaf=is_boxed):
        name, array = "/".join(part.key for part in path), leaf.value if is_boxed(leaf) else leaf
        stacked = is_boxed(leaf) and leaf.names[:1] == ("layers",)
        if found := LAYERS.fullmatch(name):
            _, arrays = layers.setdefault(int(found[1]), (array.shape[0] if stacked else 1, []))
            arrays.append((found[2], array.shape[stacked:], array.dtype.name))
        else:
            alone.append((name, array.shape, array.dtype.name))
    yield from map(table_row, alone)
    kinds: dict[tuple, list[range]] = {}
    first = 0
    for _, (depth, arrays) in sorted(layers.items()):
        kinds.setdefault(tuple(arrays), []).append(range(first, first + depth))
        first += depth
    for arrays, places in kinds.items():
        count = sum(map(len, places))
        numbers = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in merged(places))
        size = sum(int(np.prod(shape)) for _, shape, _ in arrays)
        yield (
            f"layers {numbers}: {count} x {size:,} parameters" if count > 1 else f"layer {numbers}: {size:,} parameters"
        )
        yield from (table_row((f"  {name}", shape, kind)) for name, shape, kind in arrays)


def table_row(about: tuple[str, tuple[int, ...], str]) -> str:
    name, shape, kind = about
    return f"{name:36} {' x '.join(map(str, shape)):>20} {kind:>9} {int(np.prod(shape)):>12,}"


def merged(places: list[range]) -> Iterator[range]:
    """Joins ranges that follow each other."""
    joined = places[0]
    for place in places[1:]:
        if place.start == joined.stop:
            joined = range(joined.start, place.stop)
        else:
            yield joined
            joined = place
    yield joined
