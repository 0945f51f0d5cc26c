"""Elementwise recurrences by lax.scan: the loop makes the carries, everything else is done for all tokens at once.

The gradient is made the same way for every cell, from the cell alone: since channels do not mix, the derivative of the
next carry by the carry is one number a channel, and all of them are known once the carries are. What is left for the
backward loop is a multiplication and an addition a token.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scan(cell: Callable, carry: Any, inputs: Any, starts: jax.Array, shared: tuple) -> tuple[Any, Any]:
    """The last carry [b d] and the outputs [b n d] of a cell (carry, inputs, start, shared) -> (carry, y)."""
    return forward(cell, carry, inputs, starts, shared)[0]


def over_tokens(step: Callable, carry: Any, inputs: Any, length: int, reverse: bool = False) -> tuple[Any, Any]:
    """The last carry of a loop over the second axis, and every carry that a token left, [b n ...].

    In reverse, from the last token to the first, those are the carries that it met. Tokens are read and carries written
    where they lie, rows first: nothing is transposed, which saves a quarter to a half of the time.
    """

    def body(i, so_far):
        carry, carries = so_far
        t = length - 1 - i if reverse else i
        now = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, t, axis=1, keepdims=False), inputs)
        after = step(carry, now)
        written = carry if reverse else after
        carries = jax.tree.map(lambda a, c: jax.lax.dynamic_update_index_in_dim(a, c, t, axis=1), carries, written)
        return after, carries

    empty = jax.tree.map(lambda c: jnp.zeros((c.shape[0], length, *c.shape[1:]), c.dtype), carry)
    return jax.lax.fori_loop(0, length, body, (carry, empty))  # of known length: a lax.scan


def forward(cell: Callable, carry: Any, inputs: Any, starts: jax.Array, shared: tuple):
    if cell.linear:
        terms = linear_terms(cell, carry, inputs, starts, shared)

        def advance(carry, terms):
            return jax.tree.map(lambda a, c, b: a * c + b, terms[0], carry, terms[1])
    else:
        terms = (inputs, starts)

        def advance(carry, now):
            return cell(carry, *now, shared)[0]  # the output is not used here, so it is not computed here

    last, afters = over_tokens(advance, carry, terms, starts.shape[1])
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
        return [
            sum(a * g for a, g in zip(row, into_after, strict=True)) + b for row, b in zip(decays, direct, strict=True)
        ]

    into_carry, into_afters = over_tokens(
        retreat, jax.tree.leaves(into_last), (decays, direct), starts.shape[1], reverse=True
    )
    # Shared vectors count once for every token; XLA:CPU sums over rows far faster by a product than by a reduction.
    tokens = math.prod(starts.shape)
    spread = jax.tree.map(lambda v: jnp.broadcast_to(v, leaves[0].shape), shared)
    _, pull = jax.vjp(lambda inputs, shared: cell(befores, inputs, starts, shared), inputs, spread)
    into_inputs, into_spread = pull((jax.tree.unflatten(tree, into_afters), into_ys))
    into_shared = jax.tree.map(lambda v: jnp.ones(tokens) @ v.reshape(tokens, -1), into_spread)
    return jax.tree.unflatten(tree, into_carry), into_inputs, None, into_shared


scan.defvjp(forward, backward)


def linear_terms(cell: Callable, carry: Any, inputs: Any, starts: jax.Array, shared: tuple) -> tuple[Any, Any]:
    """decay and increment [b n d] of a linear cell, carry' = decay * carry + increment, leaf by leaf."""
    length = starts.shape[1]
    zeros = jax.tree.map(lambda c: jnp.zeros((c.shape[0], length, *c.shape[1:]), c.dtype), carry)
    ones = jax.tree.map(jnp.ones_like, zeros)
    increment, decay = jax.jvp(lambda c: cell(c, inputs, starts, shared)[0], (zeros,), (ones,))
    return decay, increment


def carries_before(carry: Any, afters: Any) -> Any:
    """The carries that the tokens met, from the first carry and those that they left."""
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[:, None], rest[:, :-1]], axis=1), carry, afters)


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
