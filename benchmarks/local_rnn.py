"""LocalRNN against PyTorch with all windows materialised, as its authors write it; and what its gradient keeps.

python -m benchmarks.local_rnn                       # batch 16, length 512, width 512, windows of 7
python -m benchmarks.local_rnn --part=memory         # compiled, not run: lengths from 512 to 4096

One JSON line for each case, medians of repetitions that take turns. PyTorch's side needs
pip install -r requirements-benchmarks.txt, and is left out with a message where it is absent.
"""

import argparse
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks import torch_recurrences
from benchmarks.interleaved import medians
from benchmarks.recurrences import timed
from block_recurrent.kept_memory import keep_memory
from block_recurrent.ranges import WHOLE_1
from models import r_transformer

LENGTHS = (512, 1024, 2048, 4096)


class LocalRNN(r_transformer.RTransformerLayer):
    """The LocalRNN of an R-Transformer's block, alone."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        b, n, d = x.shape
        return self.local_rnn("local_0_", x, jnp.zeros((b, self.window - 1, d)), jnp.zeros((b, n), bool))[0]


def ours(batch: int, length: int, width: int, window: int, cell: str) -> tuple[Callable, dict, jax.Array]:
    """What runs it, its parameters, and its input."""
    module = LocalRNN(width, heads=1, context=1, window=window, cell=cell)
    x = jax.random.normal(jax.random.key(0), (batch, length, width))
    params = nn.unbox(jax.jit(module.init)(jax.random.key(1), x))
    return module.apply, params, x


def theirs(batch: int, length: int, width: int, window: int, cell: str) -> torch_recurrences.Case | None:
    """Every window laid out, [b*n window d], through torch.nn's own network; None without PyTorch."""
    torch = torch_recurrences.pytorch()
    if not torch:
        return None
    torch.manual_seed(0)
    network = getattr(torch.nn, cell.upper())(width, width, batch_first=True)
    at = torch.arange(length)[:, None] + torch.arange(window)  # [n window]

    def run(x):
        padded = torch.nn.functional.pad(x, (0, 0, window - 1, 0))
        windows = padded[:, at].reshape(-1, window, width)
        return network(windows)[0][:, -1].reshape(batch, length, width)

    return torch_recurrences.case(run, [torch.randn(batch, length, width)], network.parameters())


def speed(size: dict, repetitions: int) -> None:
    """Milliseconds of ours, and how many times those PyTorch's take."""
    cases = {"ours": timed(*ours(**size))}
    if (case := theirs(**size)) is not None:
        cases["pytorch"] = case
    line = dict(size)
    for way in ("forward", "forward_backward"):
        seconds = medians({name: case[way] for name, case in cases.items()}, repetitions)
        line[f"{way}_ms"] = round(1e3 * seconds["ours"], 1)
        if "pytorch" in seconds:
            line[f"{way}_pytorch"] = round(seconds["pytorch"] / seconds["ours"], 2)
    print(json.dumps(line), flush=True)


def memory(size: dict) -> None:
    """MiB that a gradient needs besides its arguments and results, at several lengths; also if it kept all steps."""
    limit = r_transformer.KEPT
    for length in LENGTHS:
        run, params, x = ours(**{**size, "length": length})
        line = {**size, "length": length, "input_mib": x.nbytes >> 20}
        for name, r_transformer.KEPT in (("mib", limit), ("mib_all_kept", 2**60)):

            def gradient(params, x, run=run):
                return jax.grad(lambda params, x: jnp.sum(run(params, x) ** 2), (0, 1))(params, x)

            found = jax.jit(gradient).lower(params, x).compile().memory_analysis()
            line[name] = found.temp_size_in_bytes >> 20
        print(json.dumps(line), flush=True)
    r_transformer.KEPT = limit


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.local_rnn", description=__doc__.splitlines()[0])
    for name, default in (("batch", 16), ("length", 512), ("width", 512), ("window", 7), ("repetitions", 5)):
        parser.add_argument(f"--{name}", type=WHOLE_1, default=default)
    parser.add_argument("--cell", default="gru", choices=["gru", "lstm", "rnn"])
    parser.add_argument("--part", choices=["speed", "memory"], default="speed")
    options = parser.parse_args()
    size = {name: getattr(options, name) for name in ("batch", "length", "width", "window", "cell")}
    if options.part == "memory":
        memory(size)
    else:
        speed(size, options.repetitions)


if __name__ == "__main__":
    keep_memory()
    main()
