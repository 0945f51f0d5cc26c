"""What the laws do not say of QRNN, SRU, SRU++ and LRN."""

import jax
import numpy as np
import pytest
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers import inspection
from models.lrn import ATRLayer, LRNLayer
from models.qrnn import QRNNLayer, qrnn_layers
from models.sru import SRULayer, SRUppLayer

ROWS, LENGTH, DIM = 2, 12, 6


def applied(layer, **rngs):
    x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, DIM)).astype(np.float32)
    start = np.zeros((ROWS, LENGTH), bool)
    start[1, 5] = True
    params = layer.init(jax.random.key(0), x, layer.initial_state(ROWS), start)
    params = jax.tree.map(lambda p: p + 0.3, nn.unbox(params))
    _, state = layer.apply(params, x, layer.initial_state(ROWS), start)
    return layer.apply(params, -x, state, start, rngs={name: jax.random.key(seed) for name, seed in rngs.items()})


@pytest.mark.parametrize("norm", [None, "pre"])
def test_training_makes_the_same_keys_from_the_memory(norm):
    """SRU++: in training keys and values come from remembered inputs, elsewhere they are remembered themselves."""
    layer = SRUppLayer(DIM, DIM, projection=4, context=5, norm=norm)
    in_training, elsewhere = applied(layer, dropout=1), applied(layer)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), in_training, elsewhere)


def test_alpha_starts_at_zero():
    """SRU++ begins as an SRU with a projection: attention is not heard."""
    layer = SRUppLayer(DIM, DIM, projection=4, context=5)
    x, start = np.ones((1, 3, DIM), np.float32), np.zeros((1, 3), bool)
    params = nn.unbox(layer.init(jax.random.key(0), x, layer.initial_state(1), start))["params"]
    assert params["alpha"] == 0.0


def test_srupp_starts_from_the_weights_of_the_authors_code():
    """Xavier's uniform init of all three matrices, the last of them times sqrt(1 - dropout)."""
    layer = SRUppLayer(64, 64, projection=16, context=4, dropout=0.36)
    x, start = np.ones((1, 3, 64), np.float32), np.zeros((1, 3), bool)
    params = nn.unbox(jax.jit(layer.init)(jax.random.key(0), x, layer.initial_state(1), start))["params"]
    limits = {"projection_kernel": 80, "keys_values": 16 + 2 * 16, "kernel": (16 + 3 * 64) / (1.0 - 0.36)}
    for name, both_sides in limits.items():
        weights = np.abs(params[name])
        np.testing.assert_allclose([2 * weights.mean(), weights.max()], (6 / both_sides) ** 0.5, rtol=0.1)


@pytest.mark.parametrize("rates", [{"dropout": 0.5, "cell_dropout": 0.0}, {"cell_dropout": 0.5}, {"dropout": 0.5}])
def test_srupp_drops_what_the_authors_code_drops(rates):
    """Each number before the last projection, and channels of a row in the cell: here all tokens are the same."""
    layer = SRUppLayer(DIM, DIM, projection=8, attention=False, **rates)
    given = (np.full((2, 6, DIM), 0.3, np.float32), layer.initial_state(2), np.ones((2, 6), bool))
    params = jax.tree.map(lambda p: p + 0.3, nn.unbox(jax.jit(layer.init)(jax.random.key(0), *given)))
    y, _ = jax.jit(layer.apply)(params, *given, rngs={"dropout": jax.random.key(1)})
    heard = y - given[0]  # beside the highway
    assert (np.ptp(heard, axis=1).max() > 1e-3) == ("dropout" in rates)
    silent = np.all(heard == 0.0, axis=1)
    assert silent.any() == (rates.get("cell_dropout", 0.5) > 0.0) and not silent.all()
    assert np.array_equal(silent[0], silent[1]) == (not silent.any()), "rows have masks of their own"


def test_zoneout_keeps_channels_for_a_token_and_does_not_rescale():
    """In training a forget gate is one or what it would have been; elsewhere it is the mean of both."""
    x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, DIM)).astype(np.float32)
    start = np.zeros((ROWS, LENGTH), bool)
    layer = QRNNLayer(DIM, 50, zoneout=0.3)
    params = layer.init(jax.random.key(0), x, layer.initial_state(ROWS), start)

    def forget_gate(layer, **rngs):
        given = (x, layer.initial_state(ROWS), start)
        _, shown = layer.apply(params, *given, rngs=rngs, mutable=[inspection.COLLECTION])
        return np.asarray(shown[inspection.COLLECTION]["forget_gate"])

    usual = forget_gate(layer.clone(zoneout=0.0))
    trained = forget_gate(layer, dropout=jax.random.key(1))
    kept = trained == 1.0
    assert 0.25 < kept.mean() < 0.35
    np.testing.assert_array_equal(trained[~kept], usual[~kept])
    np.testing.assert_allclose(forget_gate(layer), 0.3 + 0.7 * usual, rtol=1e-5)


@pytest.mark.parametrize("rate", ["dropout", "weight_dropout"])
def test_dropout_is_on_if_and_only_if_its_rng_is_given(rate):
    layer = LRNLayer(DIM, DIM, **{rate: 0.5})
    plain, _ = applied(layer)
    assert np.array_equal(plain, applied(LRNLayer(DIM, DIM))[0])
    assert not np.allclose(plain, applied(layer, dropout=1)[0])


def test_dense_layers_see_all_before_them():
    layers = qrnn_layers(8, 5, 3, first_window=4, dense=True, pooling="ifo")
    assert [(layer.dim, layer.window, layer.dense) for layer in layers] == [(8, 4, True), (13, 2, True), (18, 2, False)]


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: QRNNLayer(4, 4, pooling="o"), "pooling 'o' is not one of f, fo, ifo"),
        (lambda: QRNNLayer(4, 4, window=0), "QRNNLayer.window is 0"),
        (lambda: SRULayer(4, 4, highway="yes"), "highway 'yes' is not one of input, projected, None"),
        (lambda: SRULayer(4, 4, norm="layer"), "norm 'layer' is not one of None, pre, post"),
        (lambda: SRUppLayer(4, 4, projection=6, heads=4, context=3), "projection 6 does not divide into 4 heads"),
        (lambda: SRUppLayer(4, 4, projection=4), "context 0: attention sees one token at least"),
        (lambda: LRNLayer(4, 4, unit="xlrn"), "unit 'xlrn' is not one of lrn, olrn, glrn, elrn"),
        (lambda: ATRLayer(4, 4, activation="relu"), "activation 'relu' is not one of None, tanh, identity"),
    ],
)
def test_mistakes_are_told(build, told):
    with pytest.raises(UserError, match=told):
        build()


@pytest.mark.parametrize("length", [1, 4, 6, 9, 12])
def test_attention_dropout_of_srupp_takes_any_length(length):
    """Shorter than the context, a multiple of it, and neither; what is dropped changes the outputs, not the state."""
    layer = SRUppLayer(DIM, DIM, projection=4, context=6, attention_dropout=0.5)
    x = np.random.default_rng(0).normal(size=(ROWS, length, DIM)).astype(np.float32)
    given = (x, layer.initial_state(ROWS), np.zeros((ROWS, length), bool))
    params = jax.tree.map(lambda p: p + 0.3, nn.unbox(jax.jit(layer.init)(jax.random.key(0), *given)))
    apply = jax.jit(layer.apply)
    plain, state = apply(params, *given)
    dropped, after = apply(params, *given, rngs={"dropout": jax.random.key(3)})
    assert np.all(np.isfinite(dropped)) and not np.allclose(plain, dropped)
    np.testing.assert_allclose(after["keys"], state["keys"], rtol=1e-6)
