"""What is about to be trained: printed before it starts."""

import jax
import numpy as np
from clu import parameter_overview
from flax import linen as nn
from jax.sharding import Mesh

from block_recurrent.data.rows import RowStream


def parameter_counts(params) -> tuple[int, int]:
    """How many parameters there are, and how many without the embedding."""
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return count, count - sum(leaf.size for name, leaf in params.items() if name.startswith("embedding"))


def overview(model: nn.Module, params, mesh: Mesh, rows: int, segment: int, steps: int, stream: RowStream) -> str:
    """Parameters, state, batch and devices of a run, and a table of its parameters."""
    count, outside = parameter_counts(params)
    state = jax.eval_shape(lambda: model.initial_state(1))
    state_bytes = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    tokens = rows * segment
    corpus = stream.inputs
    device = jax.devices()[0]
    shape = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return "\n".join(
        [
            parameter_overview.get_parameter_overview(params, include_stats=False),
            f"parameters:      {count:,} ({outside:,} without the embedding)",
            f"state of a row:  {state_bytes / 1024:,.0f} kB",
            f"tokens per step: {tokens:,} = {rows} rows x {segment}; {steps:,} steps = {tokens * steps:,} tokens, "
            f"{tokens * steps / corpus:.2f} epochs of {corpus:,}",
            f"devices:         {jax.device_count()} {device.platform} ({device.device_kind}), mesh {shape}",
        ]
    )
