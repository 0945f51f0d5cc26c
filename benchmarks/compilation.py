"""How long a step takes to compile, layer by layer and with scan over depth: one JSON line each.

python -m benchmarks.compilation                    # for the devices that are here
python -m benchmarks.compilation --tpu=v5litepod-4  # for TPUs, without one (pip install -r requirements-plan.txt)
"""

import argparse
import json
import time

import jax
from jax.sharding import Mesh

from benchmarks.step import LAYERS, SIZES, make_trainer
from block_recurrent.planning.compiling import slice_devices
from block_recurrent.slices import find
from block_recurrent.training.sharding import make_mesh


def mesh_of(tpu: str | None) -> Mesh:
    """This machine's devices, or those of a TPU slice that is not here."""
    return make_mesh(devices=None if tpu is None else slice_devices(find(tpu)))


def seconds_to_compile(spec: str, size: dict, mesh: Mesh, scan_depth: bool) -> tuple[float, float]:
    """Seconds to trace and lower the step, and to compile it."""
    trainer = make_trainer(spec, size, mesh, scan_depth=scan_depth)
    state, batch = trainer.abstract_state(), trainer.abstract_batch(size["segment"])
    began = time.perf_counter()
    lowered = trainer.trace(state, batch).lower()
    between = time.perf_counter()
    lowered.compile()
    return between - began, time.perf_counter() - between


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.compilation", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--model", choices=["slide", "rec"], default="rec")
    parser.add_argument("--tpu", help="a TPU slice to compile for, such as v5litepod-4")
    options = parser.parse_args()
    mesh = mesh_of(options.tpu)
    size = {**SIZES[options.size], "rows": mesh.size}
    spec, first = LAYERS[options.size][options.model], None
    for scan_depth in (False, True):
        lowering, compiling = seconds_to_compile(spec, size, mesh, scan_depth)
        first = first or lowering + compiling
        line = {
            "layers": spec,
            "for": options.tpu or jax.default_backend(),
            "scan_depth": scan_depth,
            "trace_and_lower_seconds": round(lowering, 1),
            "compile_seconds": round(compiling, 1),
            "to_layer_by_layer": round((lowering + compiling) / first, 3),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
