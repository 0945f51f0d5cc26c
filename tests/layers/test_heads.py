"""Each head of the language model: its loss in chunks, its probabilities, and a stack of any width before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers.adaptive import Adaptive
from block_recurrent.layers.heads import MixtureOfSoftmaxes, Tied, Untied
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.parameters import uniform
from tests.layers.test_language_model import shapes_in
from tests.reference import heads as reference

ROWS, LENGTH, VOCABULARY, DIM, WIDE = 3, 12, 29, 6, 10
HEADS = {
    "tied": Tied(),
    "tied_bias": Tied(scaled=False, bias=True),
    "untied": Untied(uniform(0.5)),
    "mixture_of_softmaxes": MixtureOfSoftmaxes(experts=3),
    "adaptive": Adaptive(cutoffs=(7, 15), div_value=2, tie_projections=False),
}
PARAMETERS = {
    "tied": {"projection"},
    "tied_bias": {"projection", "bias"},
    "untied": {"kernel", "bias"},
    "mixture_of_softmaxes": {"latents", "latents_bias", "prior", "bias"},
    "adaptive": {"clusters", "clusters_bias", *(f"{name}_{i}" for name in ("projection", "bias") for i in range(3))},
}


class Widen(nn.Module):
    """Stands for a stack whose output is of another width than its input; remembers nothing."""

    block = 1

    def initial_state(self, batch):
        return ()

    @nn.compact
    def __call__(self, x, state, start):
        kernel = self.param("kernel", nn.initializers.normal(0.5), (x.shape[-1], WIDE))
        return jnp.tanh(x @ kernel.astype(x.dtype)), state


def model(head, **options):
    return LanguageModel(VOCABULARY, DIM, Widen(), head=head, **{"embedding_init": uniform(1.0), **options})


@pytest.fixture(scope="module")
def tokens():
    # Every token is once a target and once an input, in each cluster.
    return np.random.default_rng(0).permutation(ROWS * (LENGTH + 1)).reshape(ROWS, LENGTH + 1) % VOCABULARY


def parameters(module, tokens):
    """Random everywhere: nothing stays at the constant it starts from."""
    rng = np.random.default_rng(1)
    params = nn.unbox(module.init(jax.random.key(0), tokens[:, :-1], (), np.zeros((ROWS, LENGTH), bool)))
    return jax.tree.map(lambda p: p + 0.2 * rng.normal(size=p.shape).astype(np.float32), params)


def logits(module, params, tokens, **rngs):
    return module.apply(params, tokens[:, :-1], (), np.zeros((ROWS, LENGTH), bool), rngs=rngs)[0]


def losses(module, params, tokens, **rngs):
    start = np.zeros((ROWS, LENGTH), bool)
    return module.apply(params, tokens[:, :-1], tokens[:, 1:], (), start, method="losses", rngs=rngs)[0]


def from_logits(module, params, tokens):
    found = jax.nn.log_softmax(logits(module, params, tokens))
    return -jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1)[..., 0]


@pytest.fixture(params=HEADS)
def name(request):
    return request.param


def test_parameters_are_those_of_the_head_and_the_embedding(name, tokens):
    params = parameters(model(HEADS[name]), tokens)["params"]
    assert set(params["head"]) == PARAMETERS[name]
    own = {key for key in params if key.startswith("embedding")}
    clusters = {f"{key}_{i}" for key in ("embedding", "embedding_projection") for i in range(3)}
    assert own == (clusters if name == "adaptive" else {"embedding"})


def test_every_parameter_names_its_axes(name, tokens):
    module = model(HEADS[name], embedding_dim=8)
    boxed = jax.eval_shape(module.init, jax.random.key(0), tokens[:, :-1], (), np.zeros((ROWS, LENGTH), bool))["params"]
    for leaf in jax.tree.leaves({**boxed, "stack": {}}, is_leaf=lambda p: isinstance(p, nn.Partitioned)):
        assert isinstance(leaf, nn.Partitioned) and len(leaf.names) == leaf.value.ndim


@pytest.mark.parametrize("chunk", [5, LENGTH])
def test_losses_are_those_of_all_logits(name, tokens, chunk):
    """Values and gradients of the loss in chunks; every parameter has a gradient."""
    module = model(HEADS[name], loss_chunk=chunk)
    params = parameters(module, tokens)
    np.testing.assert_allclose(losses(module, params, tokens), from_logits(module, params, tokens), rtol=1e-5)
    found, expected = (
        jax.grad(lambda params, of=of: jnp.sum(of(module, params, tokens)))(params) for of in (losses, from_logits)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    assert all(np.any(g != 0.0) for g in jax.tree.leaves(found))


def test_logits_equal_the_equations(name, tokens):
    module = model(HEADS[name], embedding_dim=8, final_norm=False)
    params = parameters(module, tokens)
    exact = jax.tree.map(lambda p: np.asarray(p, np.float64), params["params"])
    expected = [
        [
            reference.logits(module, exact, np.tanh(reference.embed(module, exact, token) @ exact["stack"]["kernel"]))
            for token in row
        ]
        for row in tokens[:, :-1]
    ]
    np.testing.assert_allclose(logits(module, params, tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["mixture_of_softmaxes", "adaptive"])
def test_probabilities_sum_to_one(name, tokens):
    module = model(HEADS[name])
    total = np.sum(np.exp(logits(module, parameters(module, tokens), tokens)), axis=-1)
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)


def test_the_adaptive_loss_never_holds_the_whole_vocabulary(tokens):
    """Of the logits of a chunk, those of one cluster at a time."""
    module = model(HEADS["adaptive"], loss_chunk=4)
    traced = jax.make_jaxpr(jax.grad(lambda params: jnp.sum(losses(module, params, tokens))))(
        parameters(module, tokens)
    )
    assert not any(VOCABULARY in shape for shape in shapes_in(traced.jaxpr))
    assert (ROWS, 4, VOCABULARY - 15) in set(shapes_in(traced.jaxpr))
    assert (ROWS, LENGTH, VOCABULARY - 15) not in set(shapes_in(traced.jaxpr))


def test_bfloat16_losses_are_float32_and_close(name, tokens):
    whole = model(HEADS[name], loss_chunk=4)
    params = parameters(whole, tokens)
    half = losses(model(HEADS[name], loss_chunk=4, dtype=jnp.bfloat16), params, tokens)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, losses(whole, params, tokens), atol=0.1)


@pytest.mark.parametrize(
    ("head", "options"),
    [
        (Tied(), {"embedding_dropout": 0.5}),
        (MixtureOfSoftmaxes(experts=3, dropout=0.5), {}),
        (Adaptive(cutoffs=(7, 15), tie_projections=False, dropout=0.5), {"embedding_dim": 16}),
    ],
    ids=["embedding", "mixture_of_softmaxes", "adaptive"],
)
def test_dropout_is_on_exactly_where_a_key_is_given(tokens, head, options):
    module = model(head, loss_chunk=4, **options)
    params = parameters(module, tokens)
    plain = losses(module, params, tokens)
    first, again, second = (losses(module, params, tokens, dropout=jax.random.key(i)) for i in (1, 1, 2))
    np.testing.assert_allclose(plain, from_logits(module, params, tokens), rtol=1e-5)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, plain) and not np.allclose(first, second)


def test_uniform_reaches_its_limits_and_no_further():
    drawn = uniform(0.3)(jax.random.key(0), (1000,))
    assert -0.3 <= drawn.min() < -0.29 and 0.29 < drawn.max() <= 0.3


@pytest.mark.parametrize("cutoffs", [(15, 7), (0, 7), (7, VOCABULARY), (1, 2, 3, 4)])
def test_impossible_cutoffs_are_told(tokens, cutoffs):
    with pytest.raises(UserError, match="cutoffs"):
        parameters(model(Adaptive(cutoffs=cutoffs)), tokens)


def test_tied_projections_of_another_width_are_told(tokens):
    with pytest.raises(UserError, match="tie_projections = False"):
        parameters(model(Adaptive(cutoffs=(7, 15), div_value=2)), tokens)
