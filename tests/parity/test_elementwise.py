"""Law 8 for SRU, SRU++, QRNN and the LRN family: the authors' outputs, states and gradients, by converted weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from block_recurrent.convert import convert
from block_recurrent.layers.stack import stack
from models.lrn import UNITS, ATRLayer, LRNLayer
from models.qrnn import QRNNLayer
from models.sru import SRUEncoderLayer, SRULayer, SRUppLayer
from tests.parity.fast import assert_close, assert_params_close, batch_major, settings_of, under
from tests.parity.golden import fixture_files, load


def sru_norm(settings):
    return {True: "post", False: "pre"}[settings.get("normalize_after", False)] if settings.get("layer_norm") else None


def widths(settings, layers):
    ways = 2 if settings.get("bidirectional") else 1
    width = settings["hidden_size"] * ways
    return [(settings["input_size"] if i == 0 else width, width) for i in range(layers)]


def sru_layers(settings, cls, **more):
    common = {
        "highway": "input" if settings.get("has_skip_term", True) else None,
        "highway_bias": settings.get("highway_bias", 0.0),
        "rescale": settings.get("rescale", False),
        "tanh": settings.get("use_tanh", False),
        "norm": sru_norm(settings),
        "projection": settings.get("projection_size") or None,
        **more,
    }
    return [cls(*sizes, **common) for sizes in widths(settings, settings["num_layers"])]


def check_one_segment(arrays, layers, package, first, last, names=lambda name: name, **settings):
    """Outputs, last carries (`out/LAST`) and gradients of layers run one after another from carries `in/FIRST`."""
    params, grads = (
        convert(package, {names(name): a for name, a in under(arrays, prefix).items()}, **settings)
        for prefix in ("param/", "grad/param/")
    )
    start = np.zeros(arrays["in/x"].shape[:2], bool).T

    def run(params, x, carries):
        y, after, ends = batch_major(x), [], []
        for i, (layer, carry) in enumerate(zip(layers, carries, strict=True)):
            y, state = layer.apply({"params": params[f"layers_{i}"]}, y, {"carry": carry}, start)
            after.append(state["carry"])
            ends.append(y[:, -1])
        return {"h": batch_major(y), "hT": jnp.stack(ends), last: jnp.stack(after)}

    def total(*inputs):
        outputs = run(*inputs)
        return sum(jnp.sum(outputs[name] * cot) for name, cot in under(arrays, "cot/").items())

    inputs = (params, arrays["in/x"], arrays[f"in/{first}"])
    outputs = jax.jit(run)(*inputs)
    for name, expected in under(arrays, "out/").items():
        assert_close(outputs[name], expected, name)
    of_params, of_x, of_carries = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*inputs)
    assert_params_close(of_params, grads)
    assert_close(of_x, arrays["grad/in/x"], "gradient of the input")
    assert_close(of_carries, arrays[f"grad/in/{first}"], "gradient of the first carries")


@pytest.mark.parametrize("file", fixture_files("fast", "sru_[hnlrpt]*", "sru2_*", "medium_sru_*"))
def test_sru_equals_authors_code(file):
    arrays, _ = load(file)
    check_one_segment(arrays, sru_layers(settings_of(file), SRULayer), "sru", "c0", "c")


@pytest.mark.parametrize("file", fixture_files("fast", "sru_bidirectional", "sru_maskpad"))
def test_sru_encoder_equals_authors_code(file):
    """Both directions, and padding inside the sequences."""
    arrays, _ = load(file)
    settings = settings_of(file)
    layers = sru_layers(settings, SRUEncoderLayer, bidirectional=settings["bidirectional"])
    params, grads = (convert("sru", under(arrays, prefix)) for prefix in ("param/", "grad/param/"))
    x = batch_major(arrays["in/x"])
    padding = batch_major(arrays["in/mask"]).astype(bool) if "in/mask" in arrays else np.zeros(x.shape[:2], bool)

    def run(params, x, carries):
        after = []
        for i, (layer, carry) in enumerate(zip(layers, carries, strict=True)):
            x, last = layer.apply({"params": params[f"layers_{i}"]}, x, padding, carry)
            after.append(last)
        return x, jnp.stack(after)

    def total(params, x, carries):
        y, after = run(params, x, carries)
        return jnp.sum(y * batch_major(arrays["cot/h"])) + jnp.sum(after * arrays["cot/c"])

    y, after = jax.jit(run)(params, x, arrays["in/c0"])
    assert_close(y, batch_major(arrays["out/h"]), "outputs")
    assert_close(after, arrays["out/c"], "carries")
    of_params, of_x, of_carries = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(params, x, arrays["in/c0"])
    assert_params_close(of_params, grads)
    assert_close(of_x, batch_major(arrays["grad/in/x"]), "gradient of the input")
    assert_close(of_carries, arrays["grad/in/c0"], "gradient of the first carry")


def srupp_layers(settings, context):
    every = settings.get("attention_every_n_layers", 1)
    norm = sru_norm(settings)
    return [
        SRUppLayer(
            *sizes,
            projection=settings["proj_size"],
            heads=settings["num_heads"],
            context=context,
            attention=(i + 1) % every == 0,
            attention_norm=settings.get("attn_layer_norm", True),
            highway_bias=settings["highway_bias"],
            norm=norm,
            raw_memory=norm == "pre",
        )
        for i, sizes in enumerate(widths(settings, settings["num_layers"]))
    ]


@pytest.mark.parametrize("file", fixture_files("fast", "srupp_*", "medium_srupp*"))
def test_srupp_equals_authors_code(file):
    """Two segments, gradients cut between them; or a decoder, whose memory is the encoder's output."""
    arrays, _ = load(file)
    settings = settings_of(file)
    segments = ["seg0/", "seg1/"] if "in/seg0/x" in arrays else [""]
    masks = [arrays[f"in/const/{segment}attn_mask"] for segment in segments]
    context = int(np.max(np.sum(masks[-1] > -1.0, axis=1)))  # the most that any token sees
    layers = srupp_layers(settings, context)
    model = stack(layers, scan_depth=False)
    params = convert("sru", under(arrays, "param/"))
    batch = arrays["in/c0"].shape[1]

    def remembered(memory):
        """A layer's memory from rows [m b d] that came before."""
        rows = batch_major(memory)[:, -context:]
        return jnp.pad(rows, ((0, 0), (context - rows.shape[1], 0), (0, 0)))

    def run(params, inputs):
        state = tuple({**s, "carry": c} for s, c in zip(model.initial_state(batch), inputs["c0"], strict=True))
        if "src" in inputs:
            there = 1.0 - arrays["in/mask"][..., None]
            state = tuple({**s, "memory": remembered(inputs["src"] * there)} for s in state)
        outputs = {}
        for segment in segments:
            x = batch_major(inputs[f"{segment}x"])
            rngs = {"dropout": jax.random.key(0)}
            y, state = model.apply({"params": params}, x, state, np.zeros(x.shape[:2], bool), rngs=rngs)
            outputs[f"{segment}h"] = batch_major(y)
            outputs[f"{segment}c"] = jnp.stack([s["carry"] for s in state])
            for level, s in enumerate(state):
                if "memory" in s:
                    outputs[f"{segment}memory{level}"] = batch_major(s["memory"])
            state = jax.lax.stop_gradient(state)
        return outputs

    def total(params, inputs):
        outputs = run(params, inputs)
        return sum(jnp.sum(outputs[name] * cot) for name, cot in under(arrays, "cot/").items())

    inputs = {name: a for name, a in under(arrays, "in/").items() if not name.startswith(("const", "mask"))}
    outputs = jax.jit(run)(params, inputs)
    for name, expected in under(arrays, "out/").items():
        if name in outputs:
            actual = outputs[name][-len(expected) :] if "memory" in name else outputs[name]
            expected = expected[-len(actual) :] if "memory" in name else expected
            assert_close(actual, expected, name)
    of_params, of_inputs = jax.jit(jax.grad(total, argnums=(0, 1)))(params, inputs)
    grads = convert("sru", under(arrays, "grad/param/"))
    assert_params_close(of_params, grads)
    for name, expected in under(arrays, "grad/in/").items():
        assert_close(of_inputs[name], expected, f"gradient of {name}")


@pytest.mark.parametrize("file", fixture_files("fast", "qrnn_*", "medium_qrnn*"))
def test_qrnn_equals_authors_code(file):
    """Two segments, the last inputs of the first carried into the second as constants."""
    arrays, _ = load(file)
    settings = settings_of(file)
    gates = {"output_gate": settings["output_gate"]}
    layers = [
        QRNNLayer(
            *sizes,
            window=settings["window"],
            pooling="fo" if settings["output_gate"] else "f",
            zoneout=settings.get("zoneout", 0.0),
        )
        for sizes in widths(settings, settings["num_layers"])
    ]
    model = stack(layers, scan_depth=False)
    params = convert("torchqrnn", under(arrays, "param/"), **gates)
    segments = ["seg0/", "seg1/"] if "in/seg0/x" in arrays else [""]
    hidden = next(name for name in arrays if name.startswith("in/") and not name.endswith("x"))

    def run(params, inputs, cut):
        carries = inputs[hidden.removeprefix("in/")]
        state = tuple({**s, "carry": c} for s, c in zip(model.initial_state(carries.shape[1]), carries, strict=True))
        outputs = {}
        for segment in segments:
            x = batch_major(inputs[f"{segment}x"])
            y, state = model.apply({"params": params}, x, state, np.zeros(x.shape[:2], bool))
            outputs[f"{segment}h"] = batch_major(y)
            outputs[f"{segment}hidden"] = jnp.stack([s["carry"] for s in state])
            kept = jax.lax.stop_gradient(state)
            state = kept if cut else tuple({**s, "tail": k["tail"]} for s, k in zip(state, kept, strict=True))
        return outputs

    inputs = under(arrays, "in/")
    outputs = jax.jit(run, static_argnums=2)(params, inputs, True)
    for name, expected in under(arrays, "out/").items():
        assert_close(outputs[name], expected, name)
    for kind, cut in (("grad/", True), ("gradfull/", False)):
        if not under(arrays, f"{kind}param/"):
            continue

        def total(params, inputs, cut=cut):
            outputs = run(params, inputs, cut)
            return sum(jnp.sum(outputs[name] * cot) for name, cot in under(arrays, "cot/").items())

        of_params, of_inputs = jax.jit(jax.grad(total, argnums=(0, 1)))(params, inputs)
        assert_params_close(of_params, convert("torchqrnn", under(arrays, f"{kind}param/"), **gates))
        for name, expected in under(arrays, f"{kind}in/").items():
            assert_close(of_inputs[name], expected, f"gradient of {name}")


@pytest.mark.parametrize(
    "file", fixture_files("fast", "lrnrepo_lrn", "lrnrepo_atr", "lrnrepo_sru", "medium_lrn", "eq_*")
)
def test_lrn_family_equals_authors_code(file):
    arrays, _ = load(file)
    settings = settings_of(file)
    width, depth = arrays["in/h0"].shape[-1], len(arrays["in/h0"])
    sizes = [(arrays["in/x"].shape[-1] if i == 0 else width, width) for i in range(depth)]
    if "atr" in file.stem:
        check_one_segment(arrays, [ATRLayer(*size) for size in sizes], "lrn", "h0", "hT")
    elif "sru" in file.stem:
        layers = [SRULayer(*size, highway="projected", biased=True) for size in sizes]
        check_one_segment(arrays, layers, "lrn", "c0", "cT")
    else:
        unit = settings.get("kind", "lrn")
        activation = None if unit == "olrn" else settings.get("act")  # eq. 11 is what UNIT='olrn' alone gives
        layers = [LRNLayer(*size, unit=unit, activation=activation) for size in sizes]

        def name_in_package(name):
            """Of a fixture written from the equations, W0 and b0 for cell_0._W and cell_0._W_b."""
            return f"cell_{name[1:]}.{'_W' if name[0] == 'W' else '_W_b'}" if "kind" in settings else name

        check_one_segment(arrays, layers, "lrn", "h0", "hT", name_in_package, gates=UNITS[unit][1])
