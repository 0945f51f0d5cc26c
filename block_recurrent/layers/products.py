"""Matrix products, differentiated in the form that the platform's kernels are fast at.

Both forms compute the same numbers up to rounding. The gradient of a weight matrix, x^T g, is a product whose operands
both have the summed axis first. On CPU the compiler hands such a product to a library that takes two to three times as
long as for one operand transposed by a copy of its own, so there the narrower operand is copied ("transposed");
elsewhere the product is left to the compiler as it is ("plain").
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from block_recurrent.layers.target import platform

FORMS = ("plain", "transposed")
FORCED: contextvars.ContextVar[str | None] = contextvars.ContextVar("form of products", default=None)


@contextlib.contextmanager
def forced(form: str) -> Iterator[None]:
    """Programs that are traced inside use this form, whatever their platform."""
    assert form in FORMS, form
    token = FORCED.set(form)
    try:
        yield
    finally:
        FORCED.reset(token)


def form_in_use() -> str:
    return FORCED.get() or ("transposed" if platform() == "cpu" else "plain")


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x [... n d] times y [... d f], or x [... d] times one matrix y [d f]."""
    return transposed_gradient_product(x, y) if form_in_use() == "transposed" else x @ y


def inner_products(x: jax.Array, y: jax.Array) -> jax.Array:
    """Inner products of the vectors x [... n d] with the vectors y [... m d]: [... n m] in float32."""
    return transposed_gradient_inner(x, y) if form_in_use() == "transposed" else all_pairs(x, y)


def weights_gradient(x: jax.Array, into: jax.Array) -> jax.Array:
    """x^T into, the gradient of the weights [d f] of a product, in float32: x [n d], cotangent [n f]."""
    if form_in_use() == "transposed":
        return transposed_product(x, into, jnp.float32)
    return jnp.matmul(x.T, into, preferred_element_type=jnp.float32)


def all_pairs(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum("...nd,...md->...nm", x, y, preferred_element_type=jnp.float32)


@jax.custom_vjp
def transposed_gradient_product(x: jax.Array, y: jax.Array) -> jax.Array:
    return x @ y


def product_forward(x, y):
    return x @ y, (x, y)


def product_backward(saved, into):
    x, y = saved
    into_x = (into @ y.swapaxes(-1, -2)).astype(x.dtype)
    if y.ndim == 2:
        x, into = x.reshape(-1, x.shape[-1]), into.reshape(-1, into.shape[-1])
    return into_x, transposed_product(x, into).astype(y.dtype)


transposed_gradient_product.defvjp(product_forward, product_backward)


@jax.custom_vjp
def transposed_gradient_inner(x: jax.Array, y: jax.Array) -> jax.Array:
    return all_pairs(x, y)


def inner_forward(x, y):
    return all_pairs(x, y), (x, y)


def inner_backward(saved, into):
    x, y = saved
    return (into @ y).astype(x.dtype), transposed_product(into, x).astype(y.dtype)


transposed_gradient_inner.defvjp(inner_forward, inner_backward)


def transposed_product(x: jax.Array, y: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """x^T y for x [... n d] and y [... n f], the narrower of the two transposed by a copy.

    The barriers keep the compiler from folding the copy back into the product.
    """
    apart = jax.lax.optimization_barrier
    if x.shape[-1] <= y.shape[-1]:
        return jnp.matmul(apart(x.swapaxes(-1, -2)), y, preferred_element_type=dtype)
    return apart(jnp.matmul(apart(y.swapaxes(-1, -2)), x, preferred_element_type=dtype)).swapaxes(-1, -2)
