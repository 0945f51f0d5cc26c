"""Gates in place of residuals: how a recurrent state takes up what is new (Hutchins et al. 2022, 3.4)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.layers.axes import partitioned
from block_recurrent.layers.products import product

GATES = ("fixed", "lstm")

bias_init = nn.initializers.normal(0.1)
kernel_init = nn.initializers.variance_scaling(0.1, "fan_in", "truncated_normal")  # 3.5: small, and not zero


def gate_parameters(module: nn.Module, name: str, kind: str, hidden: int, dim: int) -> dict[str, jax.Array]:
    """What a gate over `dim` features learns; an lstm gate looks at `hidden` features."""

    def vector(suffix):
        return module.param(f"{name}_{suffix}", partitioned(bias_init, None), (dim,), jnp.float32)

    def kernel(suffix):
        init = partitioned(kernel_init, "mlp", "embed")
        return module.param(f"{name}_{suffix}", init, (hidden, dim), jnp.float32)

    if kind == "fixed":
        return {"bias": vector("bias")}
    return {
        "input_kernel": kernel("input_kernel"),
        "input_bias": vector("input_bias"),
        "forget_kernel": kernel("forget_kernel"),
        "forget_bias": vector("forget_bias"),
    }


def gate(
    parameters: Mapping[str, jax.Array], old: jax.Array, new: jax.Array, hidden: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`old` and `new` [... d] mixed, how much of the old is kept, and how much of the new is taken.

    An lstm gate looks at `hidden` [... f].
    """
    p = {name: value.astype(old.dtype) for name, value in parameters.items()}
    if "bias" in p:
        kept = jax.nn.sigmoid(p["bias"])  # eq. 2
        taken = 1 - kept
    else:
        taken = jax.nn.sigmoid(product(hidden, p["input_kernel"]) + p["input_bias"] - 1)  # eq. 5
        kept = jax.nn.sigmoid(product(hidden, p["forget_kernel"]) + p["forget_bias"] + 1)  # eq. 6
    return old * kept + new * taken, kept, taken  # eq. 3, eq. 7
