"""The full part of a plan: the real training step, compiled by the real TPU compiler for devices that are not here."""

import datetime
import hashlib
import importlib.metadata
import json
import os
import re
import time
from pathlib import Path

import jax

from block_recurrent.device_memory import bytes_per_device
from block_recurrent.errors import UserError, first_line
from block_recurrent.planning.programs import collectives, result_bytes
from block_recurrent.planning.shapes import Training
from block_recurrent.slices import Slice
from block_recurrent.training.sharding import make_mesh
from block_recurrent.training.step import TrainState

EDITION = 1  # of the reports in the cache: raise it when they are made in another way
MISSING = "HBM, compile time and collectives need the TPU compiler: pip install -r requirements-plan.txt"


def libtpu_version() -> str | None:
    """The version of the TPU compiler that is installed, if one is."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def slice_devices(where: Slice) -> list[jax.Device]:
    """The devices of TPU slices that need not be here, to compile for."""
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",  # there is no metadata server to ask
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE=where.accelerator_type,
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # nothing runs on a TPU, so several may compile at a time
    )
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        topology_name=where.topology,
        platform="tpu",
        chip_config_name=where.chip_config_name,
        chips_per_host_bounds=where.host_bounds,
        num_slices=where.slices,
    ).devices


def plan_of_compiler(training: Training, where: Slice) -> dict:
    """Memory, compile time and collectives of the step on a slice; ready for JSON, and kept for the next time."""
    mesh = make_mesh(**training.mesh, devices=slice_devices(where))
    trainer = training.trainer(mesh)
    state, batch = trainer.abstract_state(), trainer.abstract_batch(training.segment)
    lowered = trainer.trace(state, batch).lower()
    versions = {"libtpu": libtpu_version(), "jax": jax.__version__}
    kept = cache_file(lowered.as_text(), where.name, *versions.values())
    if report := kept_report(kept):
        return report | {"cached": True}
    began = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        found = out_of_memory(str(error), bytes_per_device((state, batch)))
        if found is None:
            raise UserError(f"the TPU compiler refuses the step for {where.name}: {first_line(error)}") from error
    else:
        found = measured(compiled, state)
    report = {**found, "compile_seconds": round(time.perf_counter() - began, 1), **versions}
    report["date"] = str(datetime.date.today())
    report |= {"hbm_bytes": where.hbm_bytes, "fits": found["fits"] and found["used_bytes"] <= where.hbm_bytes}
    report["over_bytes"] = 0 if report["fits"] else found["used_bytes"] - found.get("limit_bytes", where.hbm_bytes)
    keep(kept, report)
    return report | {"cached": False}


def measured(compiled: jax.stages.Compiled, state: TrainState) -> dict:
    """What the compiler says of a program that it made."""
    memory, program = compiled.memory_analysis(), compiled.as_text()
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }
    return {
        "fits": True,
        "used_bytes": parts["arguments"] + parts["outputs"] + parts["temporaries"] - parts["aliased"],
        "memory": parts,
        "state": state_by_part(result_bytes(program), state),
        "collectives": collectives(program),
    }


def state_by_part(results: list[int], state: TrainState) -> dict[str, int]:
    """Bytes of the train state that a step leaves on a device. (Among its arguments are only those that it reads.)"""
    rest = iter(results)  # the state's come first, in its own order; metrics follow

    def taken(part) -> int:
        return sum(next(rest) for _ in jax.tree.leaves(part))

    sizes = {"step": taken(state.step), "parameters": taken(state.params)}
    sizes |= {"optimizer": taken(state.optimizer), "carried_state": taken(state.memory)}
    return {name: sizes[name] for name in ("parameters", "optimizer", "carried_state")}


def out_of_memory(message: str, state_bytes: int) -> dict | None:
    """What the compiler says when a program does not fit; None for other errors."""
    amount = r"([\d.]+)([KMGT]?)"
    before = re.search(rf"temporaries \({amount}\) exceeds available HBM \({amount}\)", message)
    after = re.search(rf"[Uu]sed {amount} of {amount} hbm", message)
    told = before or after
    if "RESOURCE_EXHAUSTED" not in message or told is None:
        return None
    # Before it lays anything out the compiler adds up temporaries alone.
    used = bytes_of(told[1], told[2]) + (state_bytes if told is before else 0)
    return {"fits": False, "used_bytes": used, "limit_bytes": bytes_of(told[3], told[4])}


def bytes_of(number: str, unit: str) -> int:
    return int(float(number) * 1024 ** " KMGT".index(unit or " "))


def cache_file(program: str, *facts: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256("\0".join([program, str(EDITION), *facts]).encode()).hexdigest()
    return root / "block_recurrent" / "plan" / f"{key[:32]}.json"


def kept_report(file: Path) -> dict | None:
    """The report that was kept, if there is one that can be read."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def keep(file: Path, report: dict) -> None:
    """Keeps a report for the next time, if there is a place to keep it."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(report))
        partial.replace(file)
    except OSError:
        return


def advice(training: Training, shapes: dict) -> list[str]:
    """What to change where a step does not fit, the cheapest change first."""
    mesh, found = shapes["mesh"], []
    if shapes["problems"]:  # parameters and optimizer alone: nothing that is computed from them matters
        if mesh["data"] > 1:
            found.append("split parameters and optimizer over more devices: more of the mesh on fsdp, less on data")
        return [*found, "a larger slice, or a smaller model"]
    if not getattr(getattr(training.model, "stack", None), "remat", True):
        found.append("recompute activations in the backward pass: --gin.REMAT=True")
    if shapes["rows_per_device"] // training.accumulate > 1:
        parts = 2 * training.accumulate
        found.append(f"take the rows of a step in more parts: --gin.train.accumulate={parts}")
    if mesh["data"] > 1:
        found.append("split parameters and optimizer over more devices: more of the mesh on fsdp, less on data")
    found.append("a larger slice with as many rows, a shorter segment, or fewer rows")
    return found
