"""Which axis of what lives on which axis of the mesh: one table for parameters, optimizer, state and batch."""

import contextlib
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

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


# Auto: the compiler propagates shardings from the constraints in the layers.
AXIS_TYPES = (AxisType.Auto,) * len(AXES)


def mesh_sizes(
    devices: int, slices: int = 1, data: int | None = None, fsdp: int = -1, tensor: int = 1
) -> tuple[int, int, int]:
    """Sizes of the mesh's axes; one may be -1: whatever is left. By default data is one a slice, fsdp the rest."""
    sizes = [slices if data is None else data, fsdp, tensor]
    shape = " x ".join(map(str, sizes))
    if sizes.count(-1) > 1 or any(not isinstance(size, int) or size == 0 or size < -1 for size in sizes):
        raise UserError(f"mesh {shape}: sizes are whole and positive, and at most one of data, fsdp, tensor is -1")
    known = math.prod(size for size in sizes if size != -1)
    sizes = [devices // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != devices:
        raise UserError(
            f"mesh data x fsdp x tensor = {shape} does not cover the {devices} device(s) here: their product must be "
            f"{devices}, or one of them -1 and the others a divisor"
        )
    if sizes[0] % slices:
        raise UserError(
            f"mesh data x fsdp x tensor = {shape}: data is split over {slices} slices, so a multiple of them"
        )
    return tuple(sizes)


def make_mesh(
    data: int | None = None, fsdp: int = -1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh over all devices of all hosts, or over those given; between slices there is data parallelism alone.

    `data`, `fsdp` and `tensor` are its sizes, of which one may be -1: what is left. By default data is one a slice.
    """
    devices = jax.devices() if devices is None else list(devices)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    sizes = mesh_sizes(len(devices), slices, data, fsdp, tensor)
    if slices == 1:
        return jax.make_mesh(sizes, AXES, axis_types=AXIS_TYPES, devices=devices)
    within = (sizes[0] // slices, *sizes[1:])
    placed = mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1), devices)
    return Mesh(placed, AXES, axis_types=AXIS_TYPES)


@contextlib.contextmanager
def in_mesh(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Where the names of axes mean those of a mesh; an abstract one, without devices, will do for tracing."""
    entered = jax.sharding.use_abstract_mesh(mesh) if isinstance(mesh, AbstractMesh) else jax.set_mesh(mesh)
    with entered, nn.logical_axis_rules(RULES):
        yield


def check_rows(rows: int, mesh: Mesh | AbstractMesh, accumulate: int = 1) -> None:
    """Rows of the batch are split over data and fsdp, and before that into accumulated parts."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % (ways * accumulate):
        raise UserError(
            f"{rows} rows do not divide over data x fsdp = {ways}"
            + (f" times {accumulate} accumulated parts" if accumulate > 1 else "")
            + f": take a multiple of {ways * accumulate}"
        )


def parameter_specs(boxed, mesh: Mesh | AbstractMesh):
    """PartitionSpecs of parameters from the axis names their layers gave them (a tree of boxed shapes)."""
    problems = indivisible(boxed, mesh)
    if problems:
        raise UserError(f"{problems[0]}: change the size or the mesh")
    return logical_specs(boxed, mesh)


def logical_specs(boxed, mesh: Mesh | AbstractMesh):
    """PartitionSpecs by the rules; a vocabulary that does not divide, as that of bytes, stays whole on every device."""

    def spec_of(names: PartitionSpec, leaf) -> PartitionSpec:
        ways = mesh.shape["tensor"]
        kept = [
            None if name == "vocab" and size % ways else name for name, size in zip(names, leaf.shape, strict=False)
        ]
        return nn.logical_to_mesh_axes(kept, RULES)

    return jax.tree.map(spec_of, nn.get_partition_spec(boxed), nn.unbox(boxed), is_leaf=is_spec)


def indivisible(boxed, mesh: Mesh | AbstractMesh) -> list[str]:
    """Parameters that a mesh cannot divide evenly, each with the rule that would have it divided."""
    names = jax.tree.leaves(nn.get_partition_spec(boxed), is_leaf=is_spec)
    specs = jax.tree.leaves(logical_specs(boxed, mesh), is_leaf=is_spec)
    leaves = jax.tree_util.tree_leaves_with_path(nn.unbox(boxed))
    found = []
    for (path, leaf), axes, spec in zip(leaves, names, specs, strict=True):
        for size, name, axis in zip(leaf.shape, axes, spec, strict=False):
            ways = math.prod(mesh.shape[part] for part in np.atleast_1d(axis)) if axis else 1
            if size % ways:
                found.append(
                    f"parameter {jax.tree_util.keystr(path)} {leaf.shape}: {size} does not divide over {axis} = {ways} "
                    f"(rule {name} -> {axis})"
                )
    return found


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


def named(mesh: Mesh | AbstractMesh, specs):
    """NamedShardings of a tree of PartitionSpecs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def is_spec(value) -> bool:
    return isinstance(value, PartitionSpec)
