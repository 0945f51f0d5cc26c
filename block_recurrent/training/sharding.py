"""Which axis of what lives on which axis of the mesh: one table for parameters, optimizer, state and batch."""

import math

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from block_recurrent.errors import UserError

AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(("data", "fsdp"))

# Name of an axis in the layers, axes of the mesh. Earlier rules win where two would take the same mesh axis.
RULES = (
    ("batch", ("data", "fsdp")),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("channels", "tensor"),
    ("vocab", "tensor"),
    ("embed", "fsdp"),
    ("length", None),
    ("layers", None),
)


def make_mesh(data: int = 1, fsdp: int = -1, tensor: int = 1) -> Mesh:
    """A mesh over all devices; one size may be -1: whatever is left."""
    sizes, devices = [data, fsdp, tensor], jax.device_count()
    shape = " x ".join(map(str, sizes))
    if sizes.count(-1) > 1 or any(size == 0 or size < -1 for size in sizes):
        raise UserError(f"mesh {shape}: sizes are positive, and at most one of data, fsdp, tensor is -1")
    known = math.prod(size for size in sizes if size != -1)
    sizes = [devices // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != devices:
        raise UserError(f"mesh data x fsdp x tensor = {shape} does not cover the {devices} device(s) here")
    # Auto: the compiler propagates shardings from the constraints in the layers.
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_rows(rows: int, mesh: Mesh, accumulate: int = 1) -> None:
    """Rows of the batch are split over data and fsdp, and before that into accumulated parts."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % (ways * accumulate):
        raise UserError(
            f"{rows} rows do not divide over data x fsdp = {ways}"
            + (f" times {accumulate} accumulated parts" if accumulate > 1 else "")
            + f": take a multiple of {ways * accumulate}"
        )


def parameter_specs(boxed, mesh: Mesh):
    """PartitionSpecs of parameters from the axis names their layers gave them (a tree of boxed shapes)."""
    specs = nn.logical_to_mesh(nn.get_partition_spec(boxed), RULES)
    for (path, leaf), spec in zip(
        jax.tree_util.tree_leaves_with_path(nn.unbox(boxed)),
        jax.tree.leaves(specs, is_leaf=is_spec),
        strict=True,
    ):
        for size, axis in zip(leaf.shape, spec, strict=False):
            ways = math.prod(mesh.shape[name] for name in np.atleast_1d(axis)) if axis else 1
            if size % ways:
                raise UserError(
                    f"parameter {jax.tree_util.keystr(path)} {leaf.shape}: {size} does not divide over mesh axis "
                    f"{axis} of {ways}: change the size or the mesh"
                )
    return specs


def optimizer_specs(optimizer: optax.GradientTransformation, params, specs):
    """PartitionSpecs of an optimizer's state: its parameter's, less the axis a factored statistic averages away."""
    of_path = {
        path: (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(specs, is_leaf=is_spec), strict=True
        )
    }

    def spec_of(path, leaf):
        at = next((i for i in range(len(path)) if path[i:] in of_path), None)
        if at is None:
            return PartitionSpec()
        shape, spec = of_path[path[at:]]
        if leaf.shape == shape:
            return spec
        field = getattr(path[at - 1], "name", None)
        if field in ("v_row", "v_col") and len(shape) >= 2:
            # optax averages v_row over the largest axis and v_col over the second largest.
            averaged = int(np.argsort(shape)[-1 if field == "v_row" else -2])
            if leaf.shape == (*shape[:averaged], *shape[averaged + 1 :]):
                padded = (*spec, *[None] * (len(shape) - len(spec)))
                return PartitionSpec(*padded[:averaged], *padded[averaged + 1 :])
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec_of, jax.eval_shape(optimizer.init, params))


def named(mesh: Mesh, specs):
    """NamedShardings of a tree of PartitionSpecs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def is_spec(value) -> bool:
    return isinstance(value, PartitionSpec)
