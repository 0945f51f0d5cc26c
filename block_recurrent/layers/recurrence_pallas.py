"""Elementwise recurrences by a Pallas kernel for TPUs: the carry stays on chip, the time streams through in blocks.

Forward keeps, beside its inputs, one carry per block of time. Backward goes through the blocks from the last to the
first, runs each again from its carry, and then its tokens in reverse by the cell's own vjp: a new cell needs no
backward of its own. Off a TPU the kernels run in interpret mode, which is exact and slow.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from block_recurrent.layers.target import platform

VMEM_BYTES = 10 * 2**20  # of 16 MB, for the blocks that the backward kernel holds at once


def pallas(cell: Callable, carry: Any, inputs: Any, starts: jax.Array, shared: tuple) -> tuple[Any, Any]:
    """The last carry [b d] and the outputs [b n d] of a cell (carry, inputs, start, shared) -> (carry, y).

    Over several devices each runs the kernel on its own rows and channels: nothing is exchanged.
    """
    run = functools.partial(kernel, cell)
    # Rows and channels are the tiles of a TPU, so time comes first.
    inputs, starts = jax.tree.map(lambda a: a.swapaxes(0, 1), (inputs, starts.astype(jnp.float32)))
    if jax.sharding.get_abstract_mesh().size > 1:
        of = nn.logical_to_mesh_axes
        carry_spec, time_spec = of(("batch", "channels")), of((None, "batch", "channels"))
        run = jax.shard_map(
            run,
            in_specs=(carry_spec, time_spec, of((None, "batch", None)), PartitionSpec(carry_spec[1])),
            out_specs=(carry_spec, time_spec),
            check_vma=False,
        )
    carry, ys = run(carry, inputs, starts, shared)
    return carry, jax.tree.map(lambda a: a.swapaxes(0, 1), ys)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def kernel(cell: Callable, carry: Any, inputs: Any, starts: jax.Array, shared: tuple) -> tuple[Any, Any]:
    return forward(cell, carry, inputs, starts, shared)[0]


@dataclass(frozen=True)
class Plan:
    """How [n b d] is cut: a grid over rows, channels and time, in blocks of (time, rows, channels)."""

    length: int
    rows: int
    width: int
    block: tuple[int, int, int]

    @property
    def grid(self) -> tuple[int, int, int]:
        time, rows, width = self.block
        return self.rows // rows, self.width // width, -(-self.length // time)

    def pad(self, a: jax.Array) -> jax.Array:
        """An array [n ...] with its time filled up to whole blocks."""
        return jnp.pad(a, ((0, -self.length % self.block[0]), *[(0, 0)] * (a.ndim - 1)))

    def specs(self, backwards: bool = False) -> dict[str, pl.BlockSpec]:
        """Blocks of arrays in time [n b d], starts [n b 1], carries [b d], kept ones [blocks b d], shared [1 d]."""
        time, rows, width = self.block
        last = self.grid[2] - 1

        def at(t):
            return last - t if backwards else t

        return {
            "time": pl.BlockSpec((time, rows, width), lambda b, d, t: (at(t), b, d)),
            "start": pl.BlockSpec((time, rows, 1), lambda b, d, t: (at(t), b, 0)),
            "carry": pl.BlockSpec((rows, width), lambda b, d, t: (b, d)),
            "kept": pl.BlockSpec((1, rows, width), lambda b, d, t: (at(t), b, d)),
            "shared": pl.BlockSpec((1, width), lambda b, d, t: (0, d)),
        }

    def call(self, body: Callable, in_specs: list, out_specs: list, out_shape: list, scratch: list) -> Callable:
        return pl.pallas_call(
            body,
            grid=self.grid,
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=out_shape,
            scratch_shapes=scratch,
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            interpret=platform() != "tpu",
        )


def plan_of(length: int, rows: int, width: int, arrays: int) -> Plan:
    """Blocks that fit on chip: rows and channels in multiples of (8, 128) or whole, then as much time as there is room.

    `arrays` counts the blocks of [time rows channels] that the backward kernel holds.
    """
    row_block = 8 if rows % 8 == 0 else rows
    width_block = next((size for size in (512, 256, 128) if width % size == 0), width)
    padded = 4 * (-(-row_block // 8) * 8) * (-(-width_block // 128) * 128)  # bytes a token takes, as tiles are laid out
    time = max(1, VMEM_BYTES // (arrays * padded))
    return Plan(length, rows, width, (min(2 ** int(math.log2(time)), length), row_block, width_block))


def describe(cell: Callable, carry: Any, inputs: Any, starts: jax.Array, shared: tuple):
    """Types of the cell's outputs, and the plan for its sizes."""
    now = jax.tree.map(lambda a: a[0], (inputs, starts))
    _, y = jax.eval_shape(cell, carry, *now, shared)
    length, rows = starts.shape[:2]
    leaves = [len(jax.tree.leaves(tree)) for tree in (inputs, y, carry)]
    arrays = 2 * (2 * leaves[0] + leaves[1]) + leaves[2] + 2  # double buffers in and out, carries, starts
    return y, plan_of(length, rows, jax.tree.leaves(carry)[0].shape[-1], arrays)


def forward(cell: Callable, carry: Any, inputs: Any, starts: jax.Array, shared: tuple):
    y, plan = describe(cell, carry, inputs, starts, shared)
    trees = [jax.tree.structure(tree) for tree in (inputs, shared, carry, y)]
    counts = [tree.num_leaves for tree in trees]
    time = plan.block[0]

    def body(*refs):
        (xs, (start,), vectors, first), (ys, last, kept), (now,) = grouped(
            refs, [counts[0], 1, *counts[1:3]], [counts[3], counts[2], counts[2]], [counts[2]]
        )
        block = pl.program_id(2)

        @pl.when(block == 0)
        def _():
            store(now, load(first))

        store(kept, load(now), 0)
        constants = spread(trees[1], vectors, plan.block)

        def token(i, leaves):
            inputs = jax.tree.unflatten(trees[0], load(xs, i))
            after, y = cell(jax.tree.unflatten(trees[2], leaves), inputs, begins(start, i, plan.block), constants)
            store(ys, jax.tree.leaves(y), i)
            there = block * time + i < plan.length
            return [jnp.where(there, a, c) for a, c in zip(jax.tree.leaves(after), leaves, strict=True)]

        store(now, jax.lax.fori_loop(0, time, token, load(now)))
        store(last, load(now))

    specs = plan.specs()
    carry_leaves = jax.tree.leaves(carry)
    padded_length = plan.grid[2] * time
    ys_shape = [jax.ShapeDtypeStruct((padded_length, *leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(y)]
    last_shape = [jax.ShapeDtypeStruct(c.shape, jnp.float32) for c in carry_leaves]
    kept_shape = [jax.ShapeDtypeStruct((plan.grid[2], *c.shape), jnp.float32) for c in carry_leaves]
    run = plan.call(
        body,
        [specs["time"]] * counts[0] + [specs["start"]] + [specs["shared"]] * counts[1] + [specs["carry"]] * counts[2],
        [specs["time"]] * counts[3] + [specs["carry"]] * counts[2] + [specs["kept"]] * counts[2],
        ys_shape + last_shape + kept_shape,
        [pltpu.VMEM(plan.block[1:], jnp.float32)] * counts[2],
    )
    results = run(*map(plan.pad, jax.tree.leaves(inputs)), plan.pad(starts), *rows_of(shared), *carry_leaves)
    (ys, last, kept), *_ = grouped(results, [counts[3], counts[2], counts[2]])
    ys = jax.tree.unflatten(trees[3], [leaf[: plan.length] for leaf in ys])
    return (jax.tree.unflatten(trees[2], last), ys), (kept, carry, inputs, starts, shared)


def backward(cell: Callable, residuals: tuple, cotangents: tuple):
    kept, carry, inputs, starts, shared = residuals
    into_last, into_ys = cotangents
    y, plan = describe(cell, carry, inputs, starts, shared)
    trees = [jax.tree.structure(tree) for tree in (inputs, shared, carry, y)]
    counts = [tree.num_leaves for tree in trees]
    time = plan.block[0]

    def body(*refs):
        (xs, (start,), vectors, firsts, into_last, into_ys), (into_xs, into_vectors, into_carry), (befores, now) = (
            grouped(
                refs,
                [counts[0], 1, counts[1], counts[2], counts[2], counts[3]],
                [counts[0], counts[1], counts[2]],
                [counts[2], counts[2]],
            )
        )
        block = pl.num_programs(2) - 1 - pl.program_id(2)  # from the last to the first

        @pl.when(pl.program_id(2) == 0)
        def _():
            store(now, load(into_last))
            store(into_vectors, [jnp.zeros(plan.block[1:], jnp.float32)] * counts[1])

        constants = spread(trees[1], vectors, plan.block)

        def step_at(i):
            begun = begins(start, i, plan.block)
            return lambda carry, inputs, constants: cell(carry, inputs, begun, constants)

        def token(i, leaves):
            store(befores, leaves, i)
            inputs = jax.tree.unflatten(trees[0], load(xs, i))
            after, _ = step_at(i)(jax.tree.unflatten(trees[2], leaves), inputs, constants)
            return jax.tree.leaves(after)

        jax.lax.fori_loop(0, time, token, load(firsts, 0))

        def token_back(j, so_far):
            i = time - 1 - j
            into_after, into_constants = so_far
            there = block * time + i < plan.length
            before = jax.tree.unflatten(trees[2], load(befores, i))
            _, pull = jax.vjp(step_at(i), before, jax.tree.unflatten(trees[0], load(xs, i)), constants)
            given = (jax.tree.unflatten(trees[2], into_after), jax.tree.unflatten(trees[3], load(into_ys, i)))
            into_before, into_inputs, into_now = pull(given)
            store(into_xs, jax.tree.leaves(into_inputs), i)

            def where_there(new, old):
                return [jnp.where(there, a, b) for a, b in zip(jax.tree.leaves(new), old, strict=True)]

            added = [a + b for a, b in zip(into_constants, jax.tree.leaves(into_now), strict=True)]
            return where_there(into_before, into_after), where_there(added, into_constants)

        into_before, into_constants = jax.lax.fori_loop(0, time, token_back, (load(now), load(into_vectors)))
        store(now, into_before)
        store(into_carry, into_before)
        store(into_vectors, into_constants)

    specs = plan.specs(backwards=True)
    x_leaves, carry_leaves, shared_leaves = map(jax.tree.leaves, (inputs, carry, shared))
    padded_length = plan.grid[2] * time
    like_carry = jax.ShapeDtypeStruct((plan.rows, plan.width), jnp.float32)
    run = plan.call(
        body,
        [specs["time"]] * counts[0]
        + [specs["start"]]
        + [specs["shared"]] * counts[1]
        + [specs["kept"]] * counts[2]
        + [specs["carry"]] * counts[2]
        + [specs["time"]] * counts[3],
        [specs["time"]] * counts[0] + [specs["carry"]] * (counts[1] + counts[2]),
        [jax.ShapeDtypeStruct((padded_length, *x.shape[1:]), x.dtype) for x in x_leaves]
        + [like_carry] * (len(shared_leaves) + len(carry_leaves)),
        [pltpu.VMEM(plan.block, jnp.float32)] * counts[2] + [pltpu.VMEM(plan.block[1:], jnp.float32)] * counts[2],
    )
    results = run(
        *map(plan.pad, x_leaves),
        plan.pad(starts),
        *rows_of(shared),
        *kept,
        *jax.tree.leaves(into_last),
        *map(plan.pad, jax.tree.leaves(into_ys)),
    )
    (into_xs, into_vectors, into_carry), *_ = grouped(results, [counts[0], counts[1], counts[2]])
    return (
        jax.tree.unflatten(trees[2], into_carry),
        jax.tree.unflatten(trees[0], [leaf[: plan.length] for leaf in into_xs]),
        jnp.zeros_like(starts),
        jax.tree.unflatten(trees[1], [leaf.sum(axis=0) for leaf in into_vectors]),
    )


kernel.defvjp(forward, backward)


def grouped(values, *groups: list[int]) -> list[list[list]]:
    """Cuts a flat sequence into groups of lists of the given lengths."""
    rest = iter(values)
    return [[[next(rest) for _ in range(count)] for count in counts] for counts in groups]


def load(refs: list, index: Any = ...) -> list[jax.Array]:
    return [ref[index] for ref in refs]


def store(refs: list, values: list[jax.Array], index: Any = ...) -> None:
    for ref, value in zip(refs, values, strict=True):
        ref[index] = value


def begins(start: Any, i: jax.Array, block: tuple[int, int, int]) -> jax.Array:
    """Where a document starts at token i of the block, [rows channels]."""
    return jnp.broadcast_to(start[i], block[1:]) != 0.0


def rows_of(shared: tuple) -> list[jax.Array]:
    return [vector[None] for vector in jax.tree.leaves(shared)]


def spread(tree: Any, vectors: list, block: tuple[int, int, int]) -> Any:
    """The shared vectors, one copy for each row: their gradients need no sum inside the kernel."""
    return jax.tree.unflatten(tree, [jnp.broadcast_to(vector[...], block[1:]) for vector in vectors])
