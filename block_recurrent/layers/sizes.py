"""Sizes are looked at when a model is built, before anything is divided by them."""

import dataclasses

from flax import linen as nn

from block_recurrent.errors import UserError


def check_sizes(module: nn.Module) -> None:
    """Refuses a module with a size, a whole number that it must be given, below 1."""
    for field in dataclasses.fields(module):
        size = getattr(module, field.name)
        given = field.type is int and field.default is dataclasses.MISSING
        if given and (not isinstance(size, int) or size < 1):
            raise UserError(f"{type(module).__name__}.{field.name} is {size!r}: give a whole number, 1 or more")
