"""Law 8 for LSTM, GRU, RNN, TCN and the R-Transformer: what torch and the authors compute, by converted weights."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from block_recurrent.convert import convert
from models.r_transformer import RTransformerLayer
from models.rnn import RNNEncoderLayer, RNNLayer
from models.tcn import TCNLayer
from tests.parity.fast import assert_close, assert_params_close, batch_major, settings_of, under
from tests.parity.golden import fixture_files, load


def gradients_of_biases(arrays):
    """Of two biases that add up one has a place here; only a GRU's candidate has both."""
    alone = {}
    for name, array in arrays.items():
        gates = (
            array.reshape(-1, arrays[name.replace("bias_hh", "weight_hh")].shape[-1]) if "bias_hh" in name else array
        )
        if "bias_hh" in name:
            gates = gates * (np.arange(len(gates))[:, None] == 2) * (len(gates) == 3)
        alone[name] = gates.reshape(array.shape)
    return alone


@pytest.mark.parametrize("file", fixture_files("fast", "torch_*", "lrnrepo_gru", "lrnrepo_lstm"))
def test_rnn_equals_torch(file):
    """LSTM, GRU and RNN, two layers, one direction or both; and those of the LRN authors' code."""
    arrays, _ = load(file)
    package, kind = ("torch", file.stem.split("_")[1]) if "torch" in file.stem else ("lrn", file.stem.split("_")[1])
    both = file.stem.endswith("_bi")
    params = convert(package, under(arrays, "param/"))
    grads = under(arrays, "grad/param/")
    grads = convert(package, gradients_of_biases(grads) if package == "torch" else grads)
    width, reset_first = arrays["in/h0"].shape[-1], file.stem == "lrnrepo_gru"
    sizes = [(params[f"layers_{i}"]["kernel"].shape[0], width) for i in range(2)]
    layers = [(RNNEncoderLayer if both else RNNLayer)(*size, cell=kind, reset_first=reset_first) for size in sizes]
    names = ["h0", "c0"][: len(layers[0].initial_state(1))]

    def run(params, x, first):
        y, after = batch_major(x), []
        for i, layer in enumerate(layers):
            own = {"params": params[f"layers_{i}"]}
            if both:
                y, last = layer.apply(
                    own, y, tuple(jnp.moveaxis(first[name][2 * i : 2 * i + 2], 0, 1) for name in names)
                )
                after += [[part[:, way] for part in last] for way in range(2)]
            else:
                state = dict(zip(layer.initial_state(1), (first[name][i] for name in names), strict=True))
                y, state = layer.apply(own, y, state, np.zeros(y.shape[:2], bool))
                after.append(list(state.values()))
        ends = {f"{name[0]}T": jnp.stack(parts) for name, parts in zip(names, zip(*after, strict=True), strict=True)}
        return {"h": batch_major(y), **ends}

    def total(*inputs):
        outputs = run(*inputs)
        return sum(jnp.sum(outputs[name] * cot) for name, cot in under(arrays, "cot/").items())

    inputs = (params, arrays["in/x"], {name: arrays[f"in/{name}"] for name in names})
    outputs = jax.jit(run)(*inputs)
    for name, expected in under(arrays, "out/").items():
        assert_close(outputs[name], expected, name)
    of_params, of_x, of_first = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*inputs)
    assert_params_close(of_params, grads)
    assert_close(of_x, arrays["grad/in/x"], "gradient of the input")
    for name in names:
        assert_close(of_first[name], arrays[f"grad/in/{name}"], f"gradient of {name}")


def check_stack(arrays, layers, package, x, outputs_of):
    """Outputs and gradients of layers run one after another on x [b n d]; `outputs_of` names what they gave."""
    params = convert(package, under(arrays, "param/"))
    start = np.zeros(x.shape[:2], bool)

    def run(params, x):
        given = []
        for i, layer in enumerate(layers):
            x, _ = layer.apply({"params": params[f"layers_{i}"]}, x, layer.initial_state(len(x)), start)
            given.append(x)
        return outputs_of(given)

    def total(params, x):
        outputs = run(params, x)
        return sum(jnp.sum(outputs[name] * arrays[f"cot/{name}"]) for name in outputs)

    for name, actual in jax.jit(run)(params, x).items():
        assert_close(actual, arrays[f"out/{name}"], name)
    return params, jax.jit(jax.grad(total, argnums=(0, 1)))(params, x)


@pytest.mark.parametrize("file", fixture_files("fast", "tcn_*"))
def test_tcn_equals_authors_code(file):
    arrays, _ = load(file)
    settings = settings_of(file)
    widths = [settings["num_inputs"], *settings["num_channels"]]
    layers = [TCNLayer(a, b, settings["kernel_size"], 2**i) for i, (a, b) in enumerate(itertools.pairwise(widths))]

    def outputs_of(given):
        return {"y": given[-1].swapaxes(1, 2)}

    _, (of_params, of_x) = check_stack(arrays, layers, "tcn", arrays["in/x"].swapaxes(1, 2), outputs_of)
    assert_params_close(of_params, convert("tcn", under(arrays, "grad/param/")))
    assert_close(of_x.swapaxes(1, 2), arrays["grad/in/x"], "gradient of the input")


@pytest.mark.parametrize("file", fixture_files("fast", "rtransformer_*"))
def test_r_transformer_equals_authors_code(file):
    """What a block gives, and what its sublayers do inside it: the fixture's loss has both."""
    arrays, _ = load(file)
    settings = settings_of(file)
    x = arrays["in/x"]
    layer = RTransformerLayer(
        settings["d_model"],
        heads=settings["h"],
        context=x.shape[1],
        window=settings["ksize"],
        cell=settings["rnn_type"].lower().removesuffix("_tanh"),
        local_layers=settings["n"],
    )

    class Blocks(RTransformerLayer):
        """A block that leaves the residual stream after each of its sublayers."""

        def sublayer(self, name, x, function):
            y = super().sublayer(name, x, function)
            self.sow("stream", name, y)
            return y

    params = convert("r_transformer", under(arrays, "param/"))
    blocks = Blocks(
        **{name: getattr(layer, name) for name in layer.__dataclass_fields__ if name not in ("parent", "name")}
    )
    start = np.zeros(x.shape[:2], bool)
    names = {"attention": "after_attention", "feed_forward": "after_ffn"}

    def run(params, x):
        outputs = {}
        for i in range(settings["n_level"]):
            own = {"params": params[f"layers_{i}"]}
            (x, _), sown = blocks.apply(own, x, blocks.initial_state(len(x)), start, mutable=["stream"])
            for name, (stream,) in sown["stream"].items():
                outputs[f"block{i}/{names.get(name, name.replace('local_', 'after_localrnn'))}"] = stream
        return {**outputs, "y": x}

    def total(params, x):
        outputs = run(params, x)
        return sum(jnp.sum(outputs[name] * cot) for name, cot in under(arrays, "cot/").items())

    outputs = jax.jit(run)(params, x)
    for name, expected in under(arrays, "out/").items():
        assert_close(outputs[name], expected, name)
    of_params, of_x = jax.jit(jax.grad(total, argnums=(0, 1)))(params, x)
    grads = under(arrays, "grad/param/")
    biases = {name: array for name, array in grads.items() if ".rnn." in name}
    assert_params_close(of_params, convert("r_transformer", {**grads, **gradients_of_biases(biases)}))
    assert_close(of_x, arrays["grad/in/x"], "gradient of the input")
