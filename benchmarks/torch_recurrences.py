"""PyTorch's recurrent layers on CPU: what people would use instead, as functions to time beside ours.

pip install -r requirements-benchmarks.txt
python -m benchmarks.torch_recurrences --batch=16 --length=512 --width=512
python -m benchmarks.torch_recurrences --batch=16 --length=512 --width=512 --part=recurrences

`torch.nn.LSTM`, `torch.nn.GRU` and the SRU authors' package `sru` are run as they come. QRNN (Bradbury et al., 2017)
and LRN (Zhang and Sennrich, 2019) have no package of their authors' on PyPI: they are written here from the papers'
equations, as a Python loop over time, which is the manner of their authors' code on CPU. Everything is time-major,
[n b d], in float32.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType

from benchmarks.interleaved import medians
from block_recurrent.kept_memory import keep_memory
from block_recurrent.ranges import WHOLE_1

# For a quiet machine: where other work had a core, one pass of LRN's loop over 2048 tokens took 8 s with two threads in
# place of 0.06, with one thread 0.05 to 0.13.
THREADS = 2

Case = dict[str, Callable[[], None]]  # "forward" and "forward_backward"


@functools.cache
def package(name: str) -> ModuleType | None:
    """An imported package; None, told in one line, where it is not installed or cannot be used."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        reason = "is not installed"
    except (ImportError, OSError, RuntimeError) as error:
        reason = f"cannot be used ({str(error).strip().splitlines()[0]})"
    print(f"{name} {reason}: pip install -r requirements-benchmarks.txt", file=sys.stderr)
    return None


def pytorch() -> ModuleType | None:
    torch = package("torch")
    if torch:
        torch.set_num_threads(THREADS)
    return torch


@functools.cache
def authors_sru() -> ModuleType | None:
    """The package `sru`, whose C++ is compiled when it is first imported: about a minute, kept in PyTorch's cache."""
    if not pytorch():
        return None
    with contextlib.suppress(ModuleNotFoundError):  # an environment that is not activated has its ninja off the path
        os.environ["PATH"] = os.pathsep.join([importlib.import_module("ninja").BIN_DIR, os.environ["PATH"]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no CUDA to compile for
        imported = package("sru")
    warnings.filterwarnings("ignore", message="Running SRU on CPU with grad_enabled")
    return imported


def qrnn_pooling(z, f, o):
    """c = f z + (1 - f) c, h = o c, the gates' nonlinearities included: a loop over time, c begins at zero.

    Written here, in the manner of the authors' CPU path: f z at once, then one line per token. f is their update gate,
    which is 1 - f of the paper.
    """
    import torch

    f = f.sigmoid()
    c, cells = torch.zeros_like(f[0]), []
    for new, update in zip((f * z.tanh()).unbind(0), f.unbind(0), strict=True):
        c = new + (1 - update) * c
        cells.append(c)
    return o.sigmoid() * torch.stack(cells)


def qrnn(x, weight, bias, window: int):
    """QRNN with fo-pooling; a token's features are its own and those of the window - 1 before it, in one product."""
    import torch
    from torch.nn import functional

    shifted = [x] + [functional.pad(x, (0, 0, 0, 0, back, 0))[: len(x)] for back in range(1, window)]
    features = torch.cat(shifted, -1) if window > 1 else x
    return qrnn_pooling(*functional.linear(features, weight, bias).chunk(3, -1))


def lrn_step(p, q, r, h):
    return ((p + h).sigmoid() * r + (q - h).sigmoid() * h).tanh()


def lrn_states(p, q, r):
    """h = tanh(sigmoid(p + h) r + sigmoid(q - h) h): written here as a loop over time, h begins at zero."""
    import torch

    h, states = torch.zeros_like(p[0]), []
    for inputs in zip(p.unbind(0), q.unbind(0), r.unbind(0), strict=True):
        h = lrn_step(*inputs, h)
        states.append(h)
    return torch.stack(states)


def lrn(x, weight, bias):
    """LRN with all tokens projected at once, which the recurrence allows."""
    from torch.nn import functional

    return lrn_states(*functional.linear(x, weight, bias).chunk(3, -1))


def lrn_projecting_in_loop(x, weight, bias):
    """LRN with each token projected in the loop: the manner of the authors' code (their mask by length left out)."""
    import torch
    from torch.nn import functional

    h, states = x.new_zeros(x.shape[1], len(bias) // 3), []
    for token in x.unbind(0):
        h = lrn_step(*functional.linear(token, weight, bias).chunk(3, -1), h)
        states.append(h)
    return torch.stack(states)


def case(run: Callable, inputs: Iterable, parameters: Iterable = ()) -> Case:
    """`run(*inputs)` without gradients, and with those of the inputs and parameters for one fixed cotangent."""
    import torch

    inputs = [tensor.requires_grad_() for tensor in inputs]
    wanted = [*inputs, *parameters]
    with torch.no_grad():
        cotangent = torch.randn_like(run(*inputs))

    def forward() -> None:
        with torch.no_grad():
            run(*inputs)

    def forward_backward() -> None:
        torch.autograd.grad(run(*inputs), wanted, cotangent)

    return {"forward": forward, "forward_backward": forward_backward}


def layers(batch: int, length: int, width: int, window: int = 2) -> dict[str, Case] | None:
    """One layer of each kind, input and hidden width equal, projections included; `window` is QRNN's.

    None without PyTorch, and no SRU without the package. With gradients, `sru` has no kernel for CPU and runs its own
    Python loop; without them, its C++.
    """
    torch = pytorch()
    if not torch:
        return None
    torch.manual_seed(0)
    x = torch.randn(length, batch, width)  # [n b d]
    modules = {"LSTM": torch.nn.LSTM(width, width), "GRU": torch.nn.GRU(width, width)}
    if sru := authors_sru():
        modules["SRU"] = sru.SRU(width, width, num_layers=1)

    def outputs(module) -> Callable:
        return lambda x: module(x)[0]

    cases = {name: case(outputs(module), [x], module.parameters()) for name, module in modules.items()}
    functions = {
        "QRNN": (functools.partial(qrnn, window=window), window),
        "LRN": (lrn, 1),
        "LRN, projecting in the loop": (lrn_projecting_in_loop, 1),
    }
    for name, (function, tokens) in functions.items():
        linear = torch.nn.Linear(tokens * width, 3 * width)
        cases[name] = case(function, [x, linear.weight, linear.bias])
    return cases


def recurrences(batch: int, length: int, width: int) -> dict[str, Case] | None:
    """The recurrence alone, from pre-activations to outputs; LSTM's and GRU's cannot be had without their projections.

    None without PyTorch, and no SRU without the package.
    """
    torch = pytorch()
    if not torch:
        return None
    torch.manual_seed(0)
    gates = [torch.randn(length, batch, width) for _ in range(3)]  # [n b d] each
    cases = {"QRNN": case(qrnn_pooling, gates), "LRN": case(lrn_states, gates)}
    if authors_sru():
        elementwise = importlib.import_module("sru.ops").elementwise_recurrence_naive
        c = torch.zeros(batch, width)

        def run(u, x, v, bias):
            return elementwise(u, x, v, bias, c, 0, width, bidirectional=False, has_skip_term=True)[0]

        u, x = torch.randn(length, batch, 3 * width), torch.randn(length, batch, width)  # u's last axis: [d 3]
        cases["SRU"] = case(run, [u, x, torch.rand(2 * width) * 2 - 1, torch.zeros(2 * width)])
    return cases


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.torch_recurrences", description=__doc__.splitlines()[0])
    for name, default in (("batch", 16), ("length", 512), ("width", 512), ("repetitions", 3)):
        parser.add_argument(f"--{name}", type=WHOLE_1, default=default)
    parser.add_argument("--part", choices=["layers", "recurrences"], default="layers")
    options = parser.parse_args()
    size = {name: getattr(options, name) for name in ("batch", "length", "width")}
    built = {"layers": layers, "recurrences": recurrences}[options.part](**size)
    if built is None:
        sys.exit(1)
    runs = {(name, way): run for name, ways in built.items() for way, run in ways.items()}
    seconds = medians(runs, options.repetitions)
    for name in built:
        line = {way: round(seconds[name, way], 5) for way in built[name]}
        print(json.dumps({"model": f"{name} (PyTorch)", "part": options.part, **size, **line}), flush=True)


if __name__ == "__main__":
    keep_memory()
    main()
