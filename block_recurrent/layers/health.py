"""What shows whether a recurrent state works: sown into the collection "health" where the caller asks for it.

A model that ignores its states (Hutchins et al. 2022, 3.5) has a `state_share` that falls to zero; states that have
collapsed into one (3.3) have a `state_similarity` of one; states that never change have no `state_drift`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

COLLECTION = "health"


def watched(module: nn.Module) -> bool:
    """Whether the caller asks for health: `apply(..., mutable=[health.COLLECTION])`."""
    return module.is_mutable_collection(COLLECTION) and not module.is_initializing()


def sow(module: nn.Module, **measures: jax.Array) -> None:
    """Leaves measures, scalars in float32, under their names."""
    for name, value in measures.items():
        module.sow(COLLECTION, name, jnp.float32(value), reduce_fn=lambda _, new: new, init_fn=lambda: None)


def of_states(before: jax.Array, after: jax.Array) -> dict[str, jax.Array]:
    """Of one update of the states [b s d]: their size, how far they move, and how alike those of a row are."""
    before, after = before.astype(jnp.float32), after.astype(jnp.float32)
    size = jnp.linalg.norm(after, axis=-1)  # [b s]
    s, d = after.shape[1:]
    unit = after / jnp.maximum(size, 1e-6)[..., None]
    # The mean cosine over all pairs is the squared length of the mean direction; a vector with itself does not count.
    pairs = jnp.sum(jnp.square(jnp.mean(unit, axis=1)), axis=-1)
    return {
        "state_norm": jnp.mean(size) * d**-0.5,
        "state_drift": jnp.mean(jnp.linalg.norm(after - before, axis=-1) / jnp.maximum(size, 1e-6)),
        "state_similarity": jnp.mean(s * pairs - 1.0) / max(s - 1, 1),
    }


def share_of_states(attended: jax.Array, output_kernel: jax.Array) -> jax.Array:
    """How much of what attention adds to the residual stream comes from the states: 0 none, 1 all.

    Heads [b n 2hk], those of the window first, each half with a softmax of its own: so mass is weighed after the
    output projection [2hk d], where the two meet.
    """
    half = attended.shape[-1] // 2
    from_window, from_states = (
        jnp.linalg.norm((part @ kernel).astype(jnp.float32), axis=-1)
        for part, kernel in zip(jnp.split(attended, [half], -1), jnp.split(output_kernel, [half], 0), strict=True)
    )
    return jnp.mean(from_states / jnp.maximum(from_window + from_states, 1e-6))


def measures_of(sown: Any, into_memory: Any, start: jax.Array) -> dict[str, jax.Array]:
    """What a training step tells: "health/LAYER/MEASURE", from the sown measures and the carried state's gradient.

    `state_gradient` is the norm of the loss's gradient by the states that a segment begins with, so one that has come
    back through every block of it: per row, over those rows that go on with a document (`start` [b n]).
    """
    found = {}
    for path, value in jax.tree_util.tree_leaves_with_path(sown.get(COLLECTION, {})):
        *_, layer, measure = (key.key for key in path)
        found[f"health/{layer}/{measure}"] = jnp.mean(value)  # a run of equal layers tells their mean
    rows = start.shape[0]
    goes_on = jnp.maximum(jnp.sum(~start[:, 0]), 1)
    for path, gradient in jax.tree_util.tree_leaves_with_path(into_memory):
        if getattr(path[-1], "key", None) == "recurrent":
            norm = rows * jnp.sqrt(jnp.sum(jnp.square(gradient.astype(jnp.float32))) / goes_on)
            found[f"health/layers_{path[0].idx}/state_gradient"] = norm
    return found
