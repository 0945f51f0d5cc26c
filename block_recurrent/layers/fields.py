"""Checks of the fields of modules, when a model is built and before anything is computed from them."""

import dataclasses
import inspect
import types
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.ranges import DROPOUT, FINITE, WHOLE_0, WHOLE_1, Range

DTYPES = ("float32", "bfloat16", "float16", "float64")
OWN_RANGES = {"recall_target": Range(above=0, most=1)}


def check_layer(layer: nn.Module) -> None:
    """Refuses what is no layer, and a layer with a field out of range."""
    if not isinstance(layer, nn.Module):
        raise UserError(f"a stack has {layer!r} for a layer: give flax modules, such as @SlidingWindowLayer()")
    for name in ("block", "initial_state"):
        if not hasattr(layer, name):
            raise UserError(
                f"{type(layer).__name__} has no {name}: a layer of a stack has `block`, `initial_state(batch)` and "
                "`__call__(x, state, start)`, which returns (y, next state)"
            )
    WHOLE_1.check(f"{type(layer).__name__}.block", layer.block)
    try:
        inspect.signature(layer.initial_state).bind(1)
    except TypeError as error:
        raise UserError(
            f"{type(layer).__name__}.initial_state takes no batch ({error}): it is initial_state(batch)"
        ) from error
    check_fields(layer)


def check_fields(module: nn.Module) -> None:
    """Refuses a module whose numbers, switches or type of numbers are out of range, by the types of its fields."""
    for field in dataclasses.fields(module):
        check_field(f"{type(module).__name__}.{field.name}", field, getattr(module, field.name))


def check_field(name: str, field: dataclasses.Field, value: Any) -> None:
    kinds = get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
    if value is None and types.NoneType in kinds:
        return
    if field.name == "dtype":
        check_dtype(name, value)
    elif field.type is bool and not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}: give True or False")
    elif (allowed := range_of(field, kinds)) is not None:
        allowed.check(name, value)


def range_of(field: dataclasses.Field, kinds: tuple[type, ...]) -> Range | None:
    """The range of a field: of sizes 1 or more (0 or more where 0 is the default), of dropout below 1."""
    if field.name in OWN_RANGES:
        return OWN_RANGES[field.name]
    if kinds[0] is int:
        return WHOLE_0 if field.default == 0 else WHOLE_1
    if kinds[0] is not float:
        return None
    return DROPOUT if field.name.endswith(("dropout", "zoneout")) else FINITE


def check_dtype(name: str, value: Any) -> None:
    """Refuses what is no type of floating point, or one that jax would replace by another."""
    try:
        known = jnp.dtype(value).name in DTYPES
    except TypeError:
        known = False
    if not known:
        raise UserError(f"{name} is {value!r}: give one of {', '.join(map(repr, DTYPES))}")
    if jax.dtypes.canonicalize_dtype(value) != jnp.dtype(value):
        raise UserError(f"{name} is {value!r}, which jax has switched off: set JAX_ENABLE_X64=1, or give 'float32'")
