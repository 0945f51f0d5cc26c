"""Gates and carries for those who look inside: sown where `apply` is called with mutable=[inspection.COLLECTION]."""

import jax
from flax import linen as nn

COLLECTION = "inspection"


def looked_at(module: nn.Module) -> bool:
    return module.is_mutable_collection(COLLECTION) and not module.is_initializing()


def show(module: nn.Module, **arrays: jax.Array) -> None:
    """Leaves arrays [b n ...] under their names."""
    for name, array in arrays.items():
        module.sow(COLLECTION, name, array, reduce_fn=lambda _, new: new, init_fn=lambda: None)
