"""Refuses arrays that the devices here have no room for, before any of them is made."""

import math
import os
from pathlib import Path
from typing import Any

import jax

from block_recurrent.errors import UserError

CGROUP = Path("/sys/fs/cgroup/memory.max")  # of a container that may use less than its machine has


def bytes_per_device(tree: Any) -> int:
    """The bytes that a device holds of a tree of shapes with shardings; without one it holds all."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def memory_of_a_device(device: jax.Device) -> int | None:
    """The bytes of memory that a device may use; None where it does not say. CPU devices share the host's."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    limit = CGROUP.read_text().strip() if CGROUP.exists() else "max"
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(host, int(limit) if limit.isdecimal() else host) // jax.local_device_count()


def require_room(advice: str, **trees: Any) -> None:
    """Raises a UserError where named trees of shapes take more than a device of this process has."""
    sizes = {name.replace("_", " "): bytes_per_device(tree) for name, tree in trees.items()}
    total, device = sum(sizes.values()), jax.local_devices()[0]
    room = memory_of_a_device(device)
    if room is not None and total > room:
        parts = ", ".join(f"{name} {gibibytes(size)}" for name, size in sizes.items() if size > total / 100)
        raise UserError(
            f"this needs at least {gibibytes(total)} of memory a device ({parts}), and a {device.device_kind} device "
            f"here has {gibibytes(room)}: {advice}"
        )


def gibibytes(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
