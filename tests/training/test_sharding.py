"""One device and eight, any mesh: the same losses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import AbstractMesh

from block_recurrent.errors import UserError
from block_recurrent.training.sharding import check_rows, make_mesh

PROGRAM = """
import json, sys, jax
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import AxisType
from block_recurrent.data.rows import RowStream
from block_recurrent.data.store import open_store
from block_recurrent.layers.adaptive import Adaptive
from block_recurrent.training.sharding import make_mesh
from block_recurrent.training.step import Trainer
from models.feedback import feedback_stack
from tests.training.test_step import losses

one = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3, devices=jax.devices()[:1])
meshes = {"one": one, "1x8x1": make_mesh(1, 8, 1), "2x2x2": make_mesh(2, 2, 2)}
corpus = open_store(sys.argv[1])
found = {"slide": {name: losses(corpus, mesh=mesh)[0] for name, mesh in meshes.items()}}
del meshes["1x8x1"]
others = {
    "recurrent": {"spec": "slide rec"},
    "feedback": {"spec": "2*slide rec", "build": feedback_stack},
    "recurrences": {"spec": "qrnn sru srupp lrn atr"},
    "adaptive": {"spec": "slide", "head": Adaptive(cutoffs=(60, 120), div_value=2), "loss_chunk": 8},
}
for model, options in others.items():
    found[model] = {name: losses(corpus, mesh=mesh, **options)[0] for name, mesh in meshes.items()}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_meshes_give_the_same_losses(corpus):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(corpus.folder)],
        cwd=Path(__file__).parents[2],
        # The partitioner's warnings are looked at below: they must be shown, and the program must be compiled.
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0", "JAX_ENABLE_COMPILATION_CACHE": "false"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "rematerialization" not in run.stderr, "the partitioner had to replicate an activation"
    for model, losses in json.loads(run.stdout.splitlines()[-1]).items():
        for name, seen in losses.items():
            np.testing.assert_allclose(seen, losses["one"], rtol=1e-5, err_msg=f"{model} on {name}")


def test_rows_that_do_not_divide_over_the_mesh_are_told():
    mesh = AbstractMesh((2, 4, 1), ("data", "fsdp", "tensor"))
    check_rows(16, mesh, accumulate=2)
    with pytest.raises(UserError, match="12 rows do not divide over data x fsdp = 8: take a multiple of 8"):
        check_rows(12, mesh)


@pytest.mark.parametrize("sizes", [(2, 1, 1), (-1, -1, 1), (0, 1, 1)])
def test_a_mesh_that_does_not_fit_the_devices_is_told(sizes):
    with pytest.raises(UserError, match="mesh"):
        make_mesh(*sizes)
