"""Matrix products in both of their forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from block_recurrent.layers.products import FORMS, forced, form_in_use, inner_products, product, weights_gradient

SHAPES = {
    "one matrix": (product, (2, 5, 7), (7, 3)),
    "one wide matrix": (product, (2, 5, 3), (3, 11)),
    "a matrix for each head": (product, (2, 3, 5, 4), (2, 3, 4, 6)),
    "one token": (product, (1, 1, 7), (7, 3)),
    "keys of each head": (inner_products, (2, 3, 5, 4), (2, 3, 6, 4)),
    "few queries": (inner_products, (2, 1, 4), (2, 6, 4)),
}


def values_and_gradients(function, x, y, form):
    def total(x, y):
        found = function(x, y)
        return jnp.sum(jnp.sin(found.astype(jnp.float32))), found

    with forced(form):
        (_, found), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(x, y)
    return found, *gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SHAPES)
def test_both_forms_give_the_same_values_and_gradients(case, dtype):
    function, *shapes = SHAPES[case]
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    plain, transposed = (values_and_gradients(function, x, y, form) for form in FORMS)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for one, other in zip(plain, transposed, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (one, other)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_have_the_types_of_their_operands(form):
    _, into_x, into_y = values_and_gradients(product, jnp.ones((3, 4), jnp.bfloat16), jnp.ones((4, 5)), form)
    assert (into_x.dtype, into_y.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_weights_are_summed_in_float32(form):
    """512 terms of one, which bfloat16 would add up to 256."""
    ones = jnp.ones((512, 3), jnp.bfloat16)
    with forced(form):
        found = jax.jit(weights_gradient)(ones, ones[:, :2])
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.full((3, 2), 512.0))


def test_the_form_is_that_of_the_target():
    """Also of a TPU that the program is compiled for on this machine."""
    assert form_in_use() == "transposed"
    device = AbstractDevice(device_kind="TPU v4", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("data",), abstract_device=device)):
        assert form_in_use() == "plain"
        with forced("transposed"):
            assert form_in_use() == "transposed"


@pytest.mark.parametrize("form", FORMS)
def test_only_the_transposed_form_lays_an_operand_out_anew(form):
    x, y = jnp.ones((8, 4)), jnp.ones((4, 16))
    with forced(form):
        text = str(jax.make_jaxpr(jax.grad(lambda y: jnp.sum(product(x, y))))(y))
    assert ("optimization_barrier" in text) == (form == "transposed")
