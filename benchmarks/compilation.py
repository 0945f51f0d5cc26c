"""How long a step takes to compile, layer by layer and with scan over depth: one JSON line each.

python -m benchmarks.compilation                # for the devices that are here
python -m benchmarks.compilation --tpu=v5e:2x2  # for a TPU, by its own compiler, without one (pip install libtpu)
"""

import argparse
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from benchmarks.step import LAYERS, SIZES, make_trainer
from block_recurrent.training.sharding import RULES, make_mesh


def mesh_of(tpu: str | None) -> Mesh:
    """This machine's devices, or those of a TPU topology that is not here."""
    if tpu is None:
        return make_mesh()
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    found = topologies.get_topology_desc(topology_name=tpu, platform="tpu", chip_config_name="default")
    devices = np.array(found.devices).reshape(1, -1, 1)
    return Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def seconds_to_compile(spec: str, size: dict, mesh: Mesh, scan_depth: bool) -> tuple[float, float]:
    """Seconds to trace and lower the step, and to compile it."""
    trainer = make_trainer(spec, size, mesh, scan_depth=scan_depth)
    shape = (size["rows"], size["segment"])
    types = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32, "start": jnp.bool_}
    batch = {name: jax.ShapeDtypeStruct(shape, t, sharding=trainer.batch_sharding) for name, t in types.items()}
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        state = trainer.abstract_state()
        began = time.perf_counter()
        lowered = trainer._step.trace(state, batch).lower()
        between = time.perf_counter()
        lowered.compile()
    return between - began, time.perf_counter() - between


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.compilation", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--model", choices=["slide", "rec"], default="rec")
    parser.add_argument("--tpu", help="a TPU topology to compile for, such as v5e:2x2")
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
