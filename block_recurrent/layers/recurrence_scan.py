"""Elementwise recurrences by lax.scan: the loop makes the carries, everything else is done for all tokens at once.

The gradient is made the same way for every cell, from the cell alone: since channels do not mix, the derivative of the
next carry by the carry is one number a channel, and all of them are known once the carries are. What is left for the
backward loop is a multiplication and an addition a token.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scan(cell: Callable, carry: Any, inputs: Any, starts: jax.Array, shared: tuple) -> tuple[Any, Any]:
    """The last carry [b d] and the outputs [n b d] of a cell (carry, inputs, start, shared) -> (carry, y)."""
    return forward(cell, carry, inputs, starts, shared)[0]


def forward(cell: Callable, carry: Any, inputs: Any, starts: jax.Array, shared: tuple):
    if cell.linear:
        decay, increment = linear_terms(cell, carry, inputs, starts, shared)

        def advance(carry, terms):
            after = jax.tree.map(lambda a, c, b: a * c + b, terms[0], carry, terms[1])
            return after, after

        last, afters = jax.lax.scan(advance, carry, (decay, increment))
    else:

        def advance(carry, now):
            after, _ = cell(carry, *now, shared)  # the output is not used here, so it is not computed here
            return after, after

        last, afters = jax.lax.scan(advance, carry, (inputs, starts))
    ys = outputs(cell, carries_before(carry, afters), afters, inputs, starts, shared)
    return (last, ys), (carry, afters, inputs, starts, shared)


def backward(cell: Callable, residuals: tuple, cotangents: tuple):
    carry, afters, inputs, starts, shared = residuals
    into_last, into_ys = cotangents
    befores = carries_before(carry, afters)
    leaves, tree = jax.tree.flatten(befores)

    def step_of_leaves(*leaves):
        return cell(jax.tree.unflatten(tree, leaves), inputs, starts, shared)

    # decays[i][j]: derivative of leaf j of the next carry by leaf i of the carry; direct[i]: what leaf i gets from y.
    decays, direct = [], []
    for i in range(len(leaves)):
        one = [jnp.ones_like(leaf) if j == i else jnp.zeros_like(leaf) for j, leaf in enumerate(leaves)]
        _, (into_after, into_y) = jax.jvp(step_of_leaves, leaves, one)
        decays.append(jax.tree.leaves(into_after))
        products = jax.tree.map(lambda t, g: t.astype(jnp.float32) * g.astype(jnp.float32), into_y, into_ys)
        direct.append(functools.reduce(jnp.add, jax.tree.leaves(products)))

    def retreat(into_after, now):
        decays, direct = now
        into_before = [
            sum(a * g for a, g in zip(row, into_after, strict=True)) + b for row, b in zip(decays, direct, strict=True)
        ]
        return into_before, into_after

    into_carry, into_afters = jax.lax.scan(retreat, jax.tree.leaves(into_last), (decays, direct), reverse=True)
    _, pull = jax.vjp(lambda inputs, shared: cell(befores, inputs, starts, shared), inputs, shared)
    into_inputs, into_shared = pull((jax.tree.unflatten(tree, into_afters), into_ys))
    return jax.tree.unflatten(tree, into_carry), into_inputs, None, into_shared


scan.defvjp(forward, backward)


def linear_terms(cell: Callable, carry: Any, inputs: Any, starts: jax.Array, shared: tuple) -> tuple[Any, Any]:
    """decay and increment [n b d] of a linear cell, carry' = decay * carry + increment, leaf by leaf."""
    length = starts.shape[0]
    zeros = jax.tree.map(lambda c: jnp.zeros((length, *c.shape), c.dtype), carry)
    ones = jax.tree.map(jnp.ones_like, zeros)
    increment, decay = jax.jvp(lambda c: cell(c, inputs, starts, shared)[0], (zeros,), (ones,))
    return decay, increment


def carries_before(carry: Any, afters: Any) -> Any:
    """The carries that the tokens met, from the first carry and those that they left."""
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest[:-1]]), carry, afters)


def outputs(cell: Callable, befores: Any, afters: Any, inputs: Any, starts: jax.Array, shared: tuple) -> Any:
    """The cell's outputs for all tokens at once; its next carries are known and not computed again."""
    arguments = (befores, inputs, starts, shared)
    program, (_, y) = jax.make_jaxpr(cell, return_shape=True)(*arguments)
    jaxpr, afters = program.jaxpr, jax.tree.leaves(afters)
    carries, ys = jaxpr.outvars[: len(afters)], jaxpr.outvars[len(afters) :]
    computed = {var for equation in jaxpr.eqns for var in equation.outvars}
    known = {var: after for var, after in zip(carries, afters, strict=True) if var in computed}
    given_carries = jax.extend.core.Jaxpr(
        constvars=jaxpr.constvars,
        invars=[*jaxpr.invars, *known],
        outvars=ys,
        eqns=[equation for equation in jaxpr.eqns if not set(equation.outvars) <= set(known)],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    run = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(given_carries, program.consts))
    return jax.tree.unflatten(jax.tree.structure(y), run(*jax.tree.leaves(arguments), *known.values()))
