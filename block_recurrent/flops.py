"""Counting a traced program: FLOPs of its matrix products, with and without recomputation, and its serial chain.

The compiler's own count takes the body of a loop once; here a scan counts as often as it runs.
"""

from collections.abc import Callable

import jax
import jax.extend
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr


def product_flops(jaxpr: Jaxpr) -> float:
    """FLOPs of matrix products and convolutions, those in a scan times its length."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = np.prod([equation.invars[0].aval.shape[axis] for axis in contracted])
            total += 2.0 * np.prod(equation.outvars[0].aval.shape) * depth
        elif equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            out_axis = equation.params["dimension_numbers"].rhs_spec[0]
            total += 2.0 * np.prod(equation.outvars[0].aval.shape) * np.prod(np.delete(kernel, out_axis))
        inner = [product_flops(part) for part in jax.extend.core.jaxprs_in_params(equation.params)]
        if equation.primitive.name == "cond":
            total += max(inner)
        else:
            total += sum(inner) * equation.params.get("length", 1)
    return total


def serial_iterations(jaxpr: Jaxpr) -> int:
    """Iterations of scans, one after another, those inside others times these; a kernel's own loop is not counted."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            continue
        inner = [serial_iterations(part) for part in jax.extend.core.jaxprs_in_params(equation.params)]
        if equation.primitive.name == "scan":
            total += equation.params["length"] * max(1, sum(inner))
        elif equation.primitive.name == "cond":
            total += max(inner)
        else:
            total += sum(inner)
    return total


def training_flops(loss: Callable, params, *others) -> float:
    """FLOPs of the products of a loss (the first that `loss` gives) and its gradient, nothing computed twice."""
    traced = jax.make_jaxpr(loss)(params, *others)
    remembered = jax.extend.core.jaxpr_as_fun(ClosedJaxpr(remember_everything(traced.jaxpr), traced.consts))
    weights, rest = jax.tree.leaves(params), jax.tree.leaves(others)
    gradient = jax.grad(lambda weights, rest: remembered(*weights, *rest)[0])
    return product_flops(jax.make_jaxpr(gradient)(weights, rest).jaxpr)


def remember_everything(jaxpr: Jaxpr) -> Jaxpr:
    """The same program, in which what was to be computed anew by the backward pass is kept instead."""

    def rewritten(value):
        if isinstance(value, ClosedJaxpr):
            return ClosedJaxpr(remember_everything(value.jaxpr), value.consts)
        if isinstance(value, Jaxpr):
            return remember_everything(value)
        if isinstance(value, tuple) and any(isinstance(part, ClosedJaxpr | Jaxpr) for part in value):
            return tuple(map(rewritten, value))
        return value

    def with_memory(equation):
        # A function with a backward pass of its own computes what it says, and is no place to look into.
        if equation.primitive.name.startswith("custom_"):
            return equation
        params = {name: rewritten(value) for name, value in equation.params.items()}
        if equation.primitive.name in ("checkpoint", "remat2"):
            params["policy"] = jax.checkpoint_policies.everything_saveable
        return equation.replace(params=params)

    return jaxpr.replace(eqns=list(map(with_memory, jaxpr.eqns)))
