"""Elementwise recurrences: ours against PyTorch's, back end against back end, and twice the length against once.

python -m benchmarks.recurrences                   # from pre-activations to outputs
python -m benchmarks.recurrences --part=layers     # projections included, and their share; also LSTM and GRU
python -m benchmarks.recurrences --part=lengths    # does twice the length take twice the time?

One JSON line for each case and size, medians of repetitions that take turns. PyTorch's side needs
pip install -r requirements-benchmarks.txt, and is left out with a message where it is absent. What was measured, and
what was chosen by it, is in benchmarks/recurrences.md.
"""

import argparse
import functools
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks import torch_recurrences
from benchmarks.interleaved import medians
from block_recurrent.kept_memory import keep_memory
from block_recurrent.layers.recurrence import linear, recur
from block_recurrent.ranges import WHOLE_1
from models import lrn, qrnn, rnn, sru

SIZES = ((16, 512, 512), (4, 2048, 512), (1, 8192, 256))  # batch, length, width

sigmoid, tanh = jax.nn.sigmoid, jnp.tanh


@linear
def qrnn_cell(c, inputs):
    """fo-pooling from pre-activations, as the others."""
    z, f, o = inputs
    return qrnn.fo_pooling(c, (tanh(z), sigmoid(f), sigmoid(o)))


# Name: the cell, its inputs, its shared vectors, and its nonlinearities, each once for every token and channel.
CELLS = {
    "QRNN": (qrnn_cell, 3, 0, (tanh, sigmoid, sigmoid)),
    "SRU": (functools.partial(sru.sru_cell, lambda c: c), 4, 4, (sigmoid, sigmoid)),
    "LRN": (functools.partial(lrn.lrn, tanh), 3, 0, (sigmoid, sigmoid, tanh)),
    "oLRN": (functools.partial(lrn.olrn, lambda c: c), 4, 0, (sigmoid, sigmoid, sigmoid)),
    "gLRN": (functools.partial(lrn.glrn, tanh), 2, 0, (sigmoid, tanh)),
    "eLRN": (functools.partial(lrn.elrn, tanh), 1, 0, (sigmoid, tanh)),
}


def layer_cases(width: int) -> dict[str, nn.Module]:
    return {
        "QRNN": qrnn.QRNNLayer(width, width, window=2),
        "SRU": sru.SRULayer(width, width),
        "LRN": lrn.LRNLayer(width, width),
        "oLRN": lrn.LRNLayer(width, width, unit="olrn"),
        "gLRN": lrn.LRNLayer(width, width, unit="glrn"),
        "eLRN": lrn.LRNLayer(width, width, unit="elrn"),
        "ATR": lrn.ATRLayer(width, width),
        "LSTM": rnn.RNNLayer(width, width),
        "GRU": rnn.RNNLayer(width, width, cell="gru"),
        "SRU++": sru.SRUppLayer(width, width, projection=width // 4, context=256),
    }


def timed(run: Callable, *arguments) -> dict[str, Callable[[], None]]:
    """`run` as it is, and with gradients of a sum of its outputs by all its arguments."""
    cotangent = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), jax.eval_shape(run, *arguments))

    def gradient(*arguments):
        _, pull = jax.vjp(run, *arguments)
        return pull(cotangent)

    def ready(function):
        compiled = jax.jit(function)
        return lambda: jax.block_until_ready(compiled(*arguments))

    return {"forward": ready(run), "forward_backward": ready(gradient)}


def recurrence(name: str, size: tuple[int, int, int], backend: str | None) -> dict[str, Callable[[], None]]:
    """A cell over pre-activations; `backend` None gives its nonlinearities alone on the same arrays."""
    batch, length, width = size
    cell, gates, vectors, nonlinearities = CELLS[name]
    keys = iter(jax.random.split(jax.random.key(0), gates + vectors))
    inputs = tuple(jax.random.normal(next(keys), (batch, length, width)) for _ in range(gates))
    shared = tuple(jax.random.uniform(next(keys), (width,), minval=-1.0) for _ in range(vectors))
    if backend is None:
        applied = (inputs * len(nonlinearities))[: len(nonlinearities)]
        return timed(lambda *xs: tuple(f(x) for f, x in zip(nonlinearities, xs, strict=True)), *applied)
    carry, starts = jnp.zeros((batch, width)), jnp.zeros((batch, length), bool)
    return timed(lambda inputs, shared: recur(cell, carry, inputs, starts, shared, backend)[1], inputs, shared)


def layer(module: nn.Module, size: tuple[int, int, int]) -> dict[str, Callable[[], None]]:
    batch, length, width = size
    x = jax.random.normal(jax.random.key(0), (batch, length, width))
    state, start = module.initial_state(batch), jnp.zeros((batch, length), bool)
    params = nn.unbox(jax.jit(module.init)(jax.random.key(1), x, state, start))
    return timed(lambda params, x: module.apply(params, x, state, start)[0], params, x)


def product(kernel_shape: tuple[int, ...], size: tuple[int, int, int]) -> dict[str, Callable[[], None]]:
    """The input projection alone."""
    batch, length, _ = size
    x = jax.random.normal(jax.random.key(0), (batch, length, kernel_shape[0]))
    weights = jax.random.normal(jax.random.key(1), kernel_shape).reshape(kernel_shape[0], -1)
    return timed(lambda x, weights: x @ weights, x, weights)


def compare(size: tuple[int, int, int], cases: dict[str, dict], repetitions: int) -> dict[str, dict[str, float]]:
    """Median seconds of every case, forward and forward_backward."""
    seconds: dict[str, dict[str, float]] = {name: {} for name in cases}
    for pass_ in ("forward", "forward_backward"):
        found = medians({name: case[pass_] for name, case in cases.items()}, repetitions)
        for name, value in found.items():
            seconds[name][pass_] = value
    return seconds


def report(size, name: str, seconds: dict[str, float], **others: dict[str, float]) -> None:
    """A line: our milliseconds, and how many times those the others take."""
    line = {"size": size, "case": name}
    for pass_, value in seconds.items():
        line[f"{pass_}_ms"] = round(1e3 * value, 1)
        for other, theirs in others.items():
            line[f"{pass_}_{other}"] = round(theirs[pass_] / value, 2)
    print(json.dumps(line), flush=True)


def recurrences(size: tuple[int, int, int], repetitions: int) -> None:
    theirs = torch_recurrences.recurrences(*size) or {}
    for name, (cell, *_) in CELLS.items():
        cases = {"scan": recurrence(name, size, "scan"), "nonlinearities": recurrence(name, size, None)}
        if getattr(cell, "linear", False):
            cases["associative"] = recurrence(name, size, "associative")
        if name in theirs:
            cases["pytorch"] = theirs[name]
        seconds = compare(size, cases, repetitions)
        report(size, name, seconds.pop("scan"), **seconds)


def layers(size: tuple[int, int, int], repetitions: int, chosen: list[str] | None = None) -> None:
    theirs = torch_recurrences.layers(*size) or {}
    width = size[-1]
    products = {"QRNN": (2 * width, 3, width), "SRU": (width, 3, width), "LRN": (width, 3, width)}
    for name, module in layer_cases(width).items():
        if chosen and name not in chosen:
            continue
        cases = {"ours": layer(module, size)}
        if name in products:
            cases["projection"] = product(products[name], size)
        if name in theirs:
            cases["pytorch"] = theirs[name]
        if "LSTM" in theirs and name != "LSTM":
            cases["pytorch_lstm"] = theirs["LSTM"]
        seconds = compare(size, cases, repetitions)
        report(size, name, seconds.pop("ours"), **seconds)


def lengths(size: tuple[int, int, int], repetitions: int) -> None:
    batch, length, width = size
    for name, module in layer_cases(width).items():
        cases = {"once": layer(module, size), "twice": layer(module, (batch, 2 * length, width))}
        seconds = compare(size, cases, repetitions)
        report(size, name, seconds["once"], twice=seconds["twice"])


PARTS = {"recurrences": recurrences, "layers": layers, "lengths": lengths}


def size_of(text: str) -> tuple[int, ...]:
    sizes = tuple(int(WHOLE_1(size)) for size in text.split(","))
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is no batch,length,width")
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.recurrences", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, default="recurrences")
    parser.add_argument("--size", type=size_of, help="batch,length,width; otherwise the three of the table")
    parser.add_argument("--layer", action="append", choices=layer_cases(8), help="with --part=layers, these alone")
    parser.add_argument("--repetitions", type=WHOLE_1, default=7)
    options = parser.parse_args()
    sizes = [options.size] if options.size else SIZES
    for size in sizes:
        more = {"chosen": options.layer} if options.part == "layers" else {}
        PARTS[options.part](size, options.repetitions, **more)


if __name__ == "__main__":
    keep_memory()
    main()
