"""The fast part of a plan: from shapes alone, without devices and without a compiler."""

import math
from dataclasses import dataclass

from flax import linen as nn
from jax.sharding import AbstractDevice, AbstractMesh

from block_recurrent.device_memory import bytes_per_device
from block_recurrent.errors import UserError
from block_recurrent.flops import product_flops, serial_iterations
from block_recurrent.slices import Slice
from block_recurrent.training.optimizers import Optimizer
from block_recurrent.training.overview import parameter_counts
from block_recurrent.training.sharding import AXES, AXIS_TYPES, check_rows, indivisible, mesh_sizes
from block_recurrent.training.step import Trainer, boxed_params
from block_recurrent.training.utilisation import model_flops

# Assumed, not measured: what an iteration of a compiled loop costs on an accelerator however little is in it.
SECONDS_PER_ITERATION = 5e-6


@dataclass(frozen=True)
class Training:
    """What a config says of a run, as far as it has a cost; `mesh` holds what it gives make_mesh."""

    model: nn.Module
    optimizer: Optimizer
    steps: int
    rows: int
    segment: int
    accumulate: int
    health: bool
    mesh: dict[str, int]

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.segment

    def trainer(self, mesh) -> Trainer:
        return Trainer(self.model, self.optimizer, mesh, self.rows, self.accumulate, self.health)


@dataclass(frozen=True)
class Work:
    """What a step computes, on however many devices."""

    model_flops: float  # products of the loss and its gradient, each computed once
    hardware_flops: float  # products of the whole step, those computed anew in the backward pass included
    serial_iterations: int


def count_work(training: Training, kind: str) -> Work:
    """Traces the step as for one accelerator of a kind: "tpu" or "gpu"."""
    alone = abstract_mesh((1, 1, 1), kind)
    trainer = training.trainer(alone)
    state, batch = trainer.abstract_state(), trainer.abstract_batch(training.segment)
    step = trainer.trace(state, batch).jaxpr.jaxpr
    return Work(model_flops(trainer, training.segment), product_flops(step), serial_iterations(step))


def abstract_mesh(sizes: tuple[int, int, int], kind: str) -> AbstractMesh:
    """A mesh of devices that are not here: layers may choose by their kind."""
    return AbstractMesh(sizes, AXES, axis_types=AXIS_TYPES, abstract_device=AbstractDevice(kind, None, kind))


def plan_of_shapes(training: Training, where: Slice, work: Work, tokens: int, utilisation: float) -> dict:
    """Sizes, FLOPs, problems and an estimate of time for one slice; ready for JSON."""
    parameters, outside = parameter_counts(nn.unbox(boxed_params(training.model)))
    report = {
        "slice": where.name,
        "kind": where.kind,
        "devices": where.devices,
        "hosts": where.hosts * where.slices,
        "mesh": None,
        "parameters": parameters,
        "parameters_without_embedding": outside,
        "tokens_per_step": training.tokens_per_step,
        "rows_per_device": None,
        "accumulate": training.accumulate,
        "model_flops_per_token": work.model_flops / training.tokens_per_step,
        "hardware_flops_per_token": work.hardware_flops / training.tokens_per_step,
        "serial_iterations_per_step": work.serial_iterations,
        "bytes_per_device": None,
        "hbm_bytes": where.hbm_bytes,
        "problems": [],
        "utilisation": utilisation,
        "estimate": None,
    }
    try:
        sizes = mesh_sizes(where.devices, where.slices, **training.mesh)
    except UserError as error:
        return report | {"problems": [str(error).replace(" here", f" of {where.name}")]}
    mesh = abstract_mesh(sizes, where.kind)
    problems = indivisible(boxed_params(training.model), mesh)
    try:
        check_rows(training.rows, mesh, training.accumulate)
    except UserError as error:
        problems.append(str(error))
    report |= {"mesh": dict(zip(AXES, sizes, strict=True)), "problems": problems}
    if problems:
        return report
    trainer = training.trainer(mesh)
    state = trainer.abstract_state()
    sizes = {
        "parameters": bytes_per_device(state.params),
        "optimizer": bytes_per_device(state.optimizer),
        "carried_state": bytes_per_device(state.memory),
        "batch": bytes_per_device(trainer.abstract_batch(training.segment)),
    }
    sizes["total"] = sum(sizes.values())
    if sizes["total"] > where.hbm_bytes:
        problems.append(
            f"{where.name} has {where.hbm_bytes:,} bytes a device, the train state alone is {sizes['total']:,}"
        )
    return report | {
        "rows_per_device": training.rows // (mesh.shape["data"] * mesh.shape["fsdp"]),
        "bytes_per_device": sizes,
        "estimate": estimate(training, where, work, sizes["total"], tokens, utilisation),
    }


def estimate(training: Training, where: Slice, work: Work, state_bytes: int, tokens: int, utilisation: float) -> dict:
    """Steps and time for a budget of tokens, if the products of the model alone run at `utilisation` of the peak.

    The range of hours ends where they run at half of it.
    """
    seconds, slow = (step_seconds(where, work, state_bytes, share) for share in (utilisation, utilisation / 2))
    bound = max(seconds, key=seconds.get)
    steps = math.ceil(tokens / training.tokens_per_step)
    return {
        "tokens": tokens,
        "steps": steps,
        "seconds_per_step": seconds[bound],
        "bound_by": bound,
        "tokens_per_second": training.tokens_per_step / seconds[bound],
        "hours": steps * seconds[bound] / 3600,
        "hours_range": [steps * max(each.values()) / 3600 for each in (seconds, slow)],
        "chip_hours": steps * seconds[bound] / 3600 * where.devices,
    }


def step_seconds(where: Slice, work: Work, state_bytes: int, utilisation: float) -> dict[str, float]:
    """Seconds of a step by what may bound it; the longest counts. What the devices exchange is not among them."""
    peak = where.devices * where.peak_flops
    return {
        "arithmetic": max(work.model_flops / (peak * utilisation), work.hardware_flops / peak),
        "memory": 2 * state_bytes / where.bandwidth,  # all of the state is read and written
        "latency": max(1, work.serial_iterations) * SECONDS_PER_ITERATION,
    }
