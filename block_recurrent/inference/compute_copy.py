"""Parameters cast once to the type that a program computes in, where it would cast them at every call."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

VIEWS = {
    "reshape",
    "transpose",
    "squeeze",
    "slice",
    "dynamic_slice",
    "gather",
    "copy",
    "sharding_constraint",
    "stop_gradient",
}
LOOPS = {"scan", "while"}
SAME_OPERANDS = {"jit", "pjit", "closed_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}


def compute_copy(program: Callable, params: Any, *others: Any) -> Any:
    """The parameters of `program(params, *others)`, cast as the program casts them.

    A parameter that is only ever looked at in one smaller floating type, whole or in parts, is cast to it; the others
    stay as they are. The program computes the same bits from either.
    """
    jaxpr = jax.make_jaxpr(program)(params, *others).jaxpr
    leaves, tree = jax.tree.flatten(params)
    types = [type_in_use(jaxpr, var) for var in jaxpr.invars[: len(leaves)]]

    def cast(leaves):
        return [leaf.astype(dtype) for leaf, dtype in zip(leaves, types, strict=True)]

    return jax.tree.unflatten(tree, jax.jit(cast)(leaves))


def type_in_use(jaxpr: Jaxpr, parameter: Var) -> jnp.dtype:
    """The one smaller floating type that the parameter is always cast to, or its own."""
    own = parameter.aval.dtype
    uses = set(types_of_uses(jaxpr, parameter)[0])
    if not jnp.issubdtype(own, jnp.floating) or len(uses) != 1:
        return own
    (used,) = uses
    return used if jnp.issubdtype(used, jnp.floating) and used.itemsize < own.itemsize else own


def types_of_uses(jaxpr: Jaxpr, var: Var) -> tuple[list[jnp.dtype], list[int]]:
    """The types in which computations read a variable or views of it, and which outputs are such views."""
    views, types = {var}, []
    for equation in jaxpr.eqns:
        places = [
            i for i, operand in enumerate(equation.invars) if not isinstance(operand, Literal) and operand in views
        ]
        if not places:
            continue
        name = equation.primitive.name
        if name == "convert_element_type":
            types.append(jnp.dtype(equation.params["new_dtype"]))
        elif name in VIEWS and places == [0]:
            views.update(equation.outvars)
        elif (inner := inner_jaxpr(equation)) is not None:
            for place in places:
                if place >= len(inner[1]) or inner[1][place] is None:
                    types.append(var.aval.dtype)
                    continue
                found, outputs = types_of_uses(inner[0], inner[1][place])
                types += found
                if outputs and name in LOOPS:  # as its carry the next turn may read it in any type
                    types.append(var.aval.dtype)
                views.update(equation.outvars[i] for i in outputs)
        else:
            types.append(var.aval.dtype)
    return types, [i for i, output in enumerate(jaxpr.outvars) if not isinstance(output, Literal) and output in views]


def inner_jaxpr(equation: Any) -> tuple[Jaxpr, list[Var | None]] | None:
    """The program inside an equation, and which of its inputs each operand is; None for one that may change it."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        inner = jaxpr_of(params["jaxpr"])
        constants = params["num_consts"]
        return inner, [*inner.invars[:constants], *[None] * (len(equation.invars) - constants)]
    if name == "while":
        inner = jaxpr_of(params["body_jaxpr"])
        before, constants = params["cond_nconsts"], params["body_nconsts"]
        return inner, [
            *[None] * before,
            *inner.invars[:constants],
            *[None] * (len(equation.invars) - before - constants),
        ]
    if name in SAME_OPERANDS:
        inner = next(jaxprs_in(params), None)
        return None if inner is None or len(inner.invars) != len(equation.invars) else (inner, list(inner.invars))
    return None


def jaxprs_in(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if isinstance(params.get(name), ClosedJaxpr | Jaxpr):
            yield jaxpr_of(params[name])


def jaxpr_of(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
