"""The accelerators one can book, by the names people type: one table for `plan` and `launch`.

Memory, peak FLOP/s (bfloat16, dense) and bandwidth are the vendors' published figures per chip, none measured here.
TPUs: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}; GPUs: NVIDIA's data sheets.
"""

import difflib
import math
import re
from dataclasses import dataclass, replace

from block_recurrent.errors import UserError

GIB, GB, TERA = 2**30, 10**9, 10**12


@dataclass(frozen=True)
class Slice:
    """One or several equal slices of accelerators. `chips`, `hosts` and `topology` are of one of them."""

    name: str
    kind: str  # "tpu" or "gpu"
    generation: str
    chips: int
    slices: int
    hosts: int
    chips_per_host: int
    topology: str  # as libtpu calls it; empty for GPUs
    chip_config_name: str  # with another, v4 and v5p show two devices a chip
    host_bounds: tuple[int, int, int]
    hbm_bytes: int
    peak_flops: float
    bandwidth: float
    accelerator_type: str  # gcloud's name
    runtime_version: str  # gcloud's --version of a TPU VM

    @property
    def devices(self) -> int:
        """Devices that JAX sees in all slices together: one a chip."""
        return self.chips * self.slices


@dataclass(frozen=True)
class Generation:
    """What the chips of a generation have in common, and the shapes in which they are sold."""

    prefix: str
    cores_per_chip: int  # of the number in the name
    hbm_bytes: int
    peak_flops: float
    bandwidth: float
    chip_config_name: str
    runtime_version: str
    shapes: tuple[tuple[int, ...], ...]


CUBES = (
    *((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16)),
    *((8, 16, 16), (16, 16, 16)),
)
PLANES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))

TPUS = {
    "v4": Generation("v4", 2, 32 * GIB, 275 * TERA, 1228 * GB, "megacore", "tpu-ubuntu2204-base", CUBES[:-1]),
    "v5e": Generation("v5litepod", 1, 16 * GIB, 197 * TERA, 819 * GB, "default", "v2-alpha-tpuv5-lite", PLANES),
    "v5p": Generation("v5p", 2, 95 * GIB, 459 * TERA, 2765 * GB, "megacore", "v2-alpha-tpuv5", CUBES),
    "v6e": Generation("v6e", 1, 32 * GIB, 918 * TERA, 1640 * GB, "default", "v2-alpha-tpuv6e", PLANES),
}

# Memory, peak FLOP/s and bandwidth of a GPU.
GPUS = {
    "a100-40gb": (40 * GB, 312 * TERA, 1555 * GB),
    "a100-80gb": (80 * GB, 312 * TERA, 2039 * GB),
    "h100": (80 * GB, 989 * TERA, 3350 * GB),
    "h200": (141 * GB, 989 * TERA, 4800 * GB),
    "l4": (24 * GB, 121 * TERA, 300 * GB),
}
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
GPUS_PER_HOST = 8


def tpu_slices(generation: str, about: Generation) -> list[Slice]:
    found = []
    for shape in about.shapes:
        chips = math.prod(shape)
        # v5e and v6e up to eight chips are one machine; larger slices and the other generations have four a host.
        bounds = (*shape, 1)[:3] if len(shape) == 2 and chips <= 8 else (2, 2, 1)
        name = f"{about.prefix}-{chips * about.cores_per_chip}"
        found.append(
            Slice(
                name=name,
                kind="tpu",
                generation=generation,
                chips=chips,
                slices=1,
                hosts=chips // math.prod(bounds),
                chips_per_host=math.prod(bounds),
                topology=f"{generation}:{'x'.join(map(str, shape))}",
                chip_config_name=about.chip_config_name,
                host_bounds=bounds,
                hbm_bytes=about.hbm_bytes,
                peak_flops=about.peak_flops,
                bandwidth=about.bandwidth,
                accelerator_type=name,
                runtime_version=about.runtime_version,
            )
        )
    return found


def gpu_slice(generation: str, chips: int) -> Slice:
    hbm_bytes, peak_flops, bandwidth = GPUS[generation]
    per_host = min(chips, GPUS_PER_HOST)
    return Slice(
        name=f"{generation}-{chips}",
        kind="gpu",
        generation=generation,
        chips=chips,
        slices=1,
        hosts=chips // per_host,
        chips_per_host=per_host,
        topology="",
        chip_config_name="",
        host_bounds=(per_host, 1, 1),
        hbm_bytes=hbm_bytes,
        peak_flops=peak_flops,
        bandwidth=bandwidth,
        accelerator_type=generation,
        runtime_version="",
    )


SLICES = {
    found.name: found
    for found in (
        *(found for generation, about in TPUS.items() for found in tpu_slices(generation, about)),
        *(gpu_slice(generation, chips) for generation in GPUS for chips in GPU_COUNTS),
    )
}


def find(name: str) -> Slice:
    """The slice of a name: v4-32, v5litepod-16 or v5e-16, h100-8; 2xv5litepod-16 is two slices."""
    typed = name.strip().lower()
    several = re.fullmatch(r"(\d+)x([a-z].*)", typed)
    count, one = (int(several[1]), several[2]) if several else (1, typed)
    one = re.sub(r"^v5e-", "v5litepod-", one)
    found = SLICES.get(one)
    if found is None:
        raise UserError(f"no slice is called {name!r}: {suggestions(one)}")
    if count == 1 and not several:
        return found
    if count < 1 or found.kind != "tpu":
        raise UserError(f"no slice is called {name!r}: several slices are of TPUs, such as 2xv5litepod-16")
    return found if count == 1 else replace(found, name=f"{count}x{one}", slices=count)


def suggestions(name: str) -> str:
    """The names of the same generation nearest in size, or those most alike."""
    generation, _, size = name.rpartition("-")
    siblings = [known for known in SLICES if known.rpartition("-")[0] == generation]
    if siblings and size.isdigit():
        near = sorted(siblings, key=lambda known: abs(int(known.rpartition("-")[2]) - int(size)))[:3]
        return f"{generation} has {', '.join(sorted(near, key=list(SLICES).index))}"
    close = difflib.get_close_matches(name, SLICES, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else f"known are such as {', '.join(EXAMPLES)}"


EXAMPLES = ("v4-32", "v5litepod-16", "v5p-128", "v6e-64", "2xv5litepod-16", "a100-80gb-8", "h100-8")
