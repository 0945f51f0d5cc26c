"""Model FLOPs utilisation: how much of its devices' published peak a run's own matrix products take."""

import jax
import jax.numpy as jnp

from block_recurrent.flops import training_flops
from block_recurrent.slices import GPUS, TPUS
from block_recurrent.training.sharding import in_mesh
from block_recurrent.training.step import Trainer, make_loss

# JAX's `device_kind`, and the generation in block_recurrent/slices.py; others, such as H100 PCIe, have another peak.
GENERATIONS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA L4": "l4",
}


def peak_flops(device_kind: str) -> float | None:
    """Returns the published peak of a device in bfloat16, or None where it is not known, as of a CPU."""
    generation = GENERATIONS.get(device_kind)
    if generation in TPUS:
        return TPUS[generation].peak_flops
    return GPUS[generation][1] if generation else None


def model_flops(trainer: Trainer, segment: int) -> float:
    """Counts the FLOPs of a step's matrix products, from shapes: the loss and its gradient, nothing computed twice."""
    state, batch = trainer.abstract_state(), trainer.abstract_batch(segment)
    with in_mesh(trainer.mesh):
        key, total = jax.eval_shape(lambda: (jax.random.key(0), jnp.zeros(())))
        return training_flops(make_loss(trainer.model, False), state.params, state.memory, batch, key, total)


def seconds_at_peak(trainer: Trainer, segment: int) -> float | None:
    """Returns the seconds that a token would take if all devices ran at their peak, or None where it is not known."""
    peak = peak_flops(jax.devices()[0].device_kind)
    if peak is None:
        return None
    return model_flops(trainer, segment) / (trainer.rows * segment) / (peak * trainer.mesh.size)
