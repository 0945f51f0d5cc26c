"""One device and eight, any mesh: the same losses."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import AbstractMesh

from block_recurrent.errors import UserError
from block_recurrent.training.sharding import check_rows, make_mesh
from tests.training.test_processes import free_port

PROGRAM = """
import json, sys, jax
from block_recurrent.training import processes
store, devices, names, *several = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", int(devices))
if several:
    processes.join(several[0], 2, int(several[1]))
from jax.sharding import AxisType
from block_recurrent.data.store import open_store
from block_recurrent.layers import products
from block_recurrent.layers.adaptive import Adaptive
from block_recurrent.training.sharding import make_mesh
from models.feedback import feedback_stack
from tests.training.test_step import losses

corpus = open_store(store)
models = {
    "recurrent": {"spec": "rec"},
    "feedback": {"spec": "slide rec", "build": feedback_stack},
    "memorizing": {"spec": "slide mem"},
    "recurrences": {"spec": "qrnn sru srupp lrn atr"},
    "adaptive": {"spec": "slide", "head": Adaptive(cutoffs=(60, 120), div_value=2), "loss_chunk": 8},
}
elementwise = {"spec": "qrnn"}
found, steps = {}, 8 if several else 20  # what processes exchange over loopback is slow
for name in names.split(","):
    sizes = [int(size) for size in name.split("x")]
    few = jax.devices()[:1] if name == "1x1x1" else None
    mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3, devices=few)
    for model, options in models.items():
        if model in ("memorizing", "recurrences", "adaptive") and (name in ("8x1x1", "1x8x1") or several):
            model, options = "elementwise", elementwise  # the many layers of the others on one mesh alone
        if f"{model} on {name}" in found:
            continue
        processes.meet(f"{model} on {name}")
        found[f"{model} on {name}"] = losses(corpus, mesh=mesh, steps=steps, **options)[0]
    if name == "2x2x2" and not several:
        with products.forced("plain"):  # as on a TPU
            found[f"recurrent with plain products on {name}"] = losses(corpus, mesh=mesh, steps=steps, spec="rec")[0]
    if name == "1x1x1":
        found[f"elementwise on {name}"] = losses(corpus, mesh=mesh, steps=steps, **elementwise)[0]
if jax.process_index() == 0:
    print(json.dumps(found))
"""


def run_program(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=Path(__file__).parents[2],
        # The partitioner's warnings are looked at below: they must be shown, and the program must be compiled.
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0", "JAX_ENABLE_COMPILATION_CACHE": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses_of(*processes: subprocess.Popen) -> dict[str, list[float]]:
    """What the first of a run's processes found."""
    with ThreadPoolExecutor() as readers:  # of all at once: none waits for room in its pipe
        ended = list(readers.map(lambda process: process.communicate(timeout=900), processes))
    for process, (_, errors) in zip(processes, ended, strict=True):
        assert process.returncode == 0, errors
        assert "rematerialization" not in errors, "the partitioner had to replicate an activation"
    return json.loads(ended[0][0].splitlines()[-1])


@pytest.mark.slow
def test_devices_meshes_and_processes_give_the_same_losses(corpus):
    """Law 9: every kind of model, twenty steps: one device, meshes of eight; eight: two processes of four each."""
    found = losses_of(run_program(corpus.folder, "8", "1x1x1,8x1x1,1x8x1,2x2x2"))
    coordinator = f"127.0.0.1:{free_port()}"
    together = losses_of(*[run_program(corpus.folder, "4", "2x2x2", coordinator, str(i)) for i in range(2)])
    assert {name.partition(" ")[0] for name in together} == {"recurrent", "feedback", "elementwise"}
    for place, each in (("one process", found), ("two processes", together)):
        for name, seen in each.items():
            alone = found[f"{name.partition(' ')[0]} on 1x1x1"]
            np.testing.assert_allclose(seen, alone[: len(seen)], rtol=1e-4, err_msg=f"{name} of {place}")


def test_rows_that_do_not_divide_over_the_mesh_are_told():
    mesh = AbstractMesh((2, 4, 1), ("data", "fsdp", "tensor"))
    check_rows(16, mesh, accumulate=2)
    with pytest.raises(UserError, match="12 rows do not divide over data x fsdp = 8: take a multiple of 8"):
        check_rows(12, mesh)


@pytest.mark.parametrize("sizes", [(2, 1, 1), (-1, -1, 1), (0, 1, 1)])
def test_a_mesh_that_does_not_fit_the_devices_is_told(sizes):
    with pytest.raises(UserError, match="mesh"):
        make_mesh(*sizes)
