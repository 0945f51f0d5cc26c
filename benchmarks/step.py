"""The training step: time, memory, use of the machine and compilation, one JSON line per model.

python -m benchmarks.step --size=small                    # recurrent against sliding-window
python -m benchmarks.step --size=base --compare=segments  # a segment four times as long
python -m benchmarks.step --size=small --compare=health   # watched and not
python -m benchmarks.step --size=small --compare=feedback

It keeps its memory, as training does. Under GLIBC_TUNABLES=glibc.malloc.hugetlb=0 it gives memory back after every
step: then steps are slower, and the plain products that `utilisation` is measured by far more so.
"""

import argparse
import json
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.interleaved import medians
from block_recurrent.flops import product_flops
from block_recurrent.kept_memory import keep_memory
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.stack import pattern, stack
from block_recurrent.ranges import WHOLE_1
from block_recurrent.training.optimizers import adafactor, inverse_square_root
from block_recurrent.training.sharding import make_mesh
from block_recurrent.training.step import Trainer
from models.block_recurrent_transformer import BlockRecurrentLayer
from models.feedback import feedback_stack
from models.sliding_window import SlidingWindowLayer

SIZES = {
    "small": {"dim": 256, "heads": 4, "head_dim": 64, "window": 128, "segment": 1024, "rows": 2, "vocabulary": 256},
    "base": {"dim": 512, "heads": 8, "head_dim": 64, "window": 256, "segment": 2048, "rows": 1, "vocabulary": 32000},
}
LAYERS = {
    "small": {"slide": "4*slide", "rec": "2*slide rec slide"},
    "base": {"slide": "13*slide", "rec": "9*slide rec 2*slide"},
}


def make_trainer(spec: str, size: dict, mesh: Mesh, build: Callable = stack, scan_depth=True, health=False) -> Trainer:
    common = {name: size[name] for name in ("heads", "head_dim", "window")} | {"mlp_dim": 4 * size["dim"]}
    layers = {
        "slide": SlidingWindowLayer(**common),
        "rec": BlockRecurrentLayer(**common, states=size["window"], dim=size["dim"]),
    }
    model = LanguageModel(size["vocabulary"], size["dim"], build(pattern(spec, layers), scan_depth=scan_depth))
    return Trainer(model, adafactor(inverse_square_root()), mesh, size["rows"], health=health)


class Case:
    """A compiled step with its batch."""

    def __init__(self, spec: str, size: dict, build: Callable = stack, health: bool = False):
        self.trainer = make_trainer(spec, size, make_mesh(), build, health=health)
        self.segment = size["segment"]
        tokens = np.random.default_rng(0).integers(0, size["vocabulary"], (size["rows"], size["segment"] + 1), np.int32)
        start = np.zeros((size["rows"], size["segment"]), bool)
        self.batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "start": start}
        self.batch["weights"] = np.ones(start.shape, np.float32)
        self.state = self.trainer.init(0)
        traced = self.trainer.trace(self.state, self.batch)
        self.flops = product_flops(traced.jaxpr.jaxpr)
        began = time.perf_counter()
        compiled = traced.lower().compile()
        self.compile_seconds = time.perf_counter() - began
        memory = compiled.memory_analysis()
        self.peak_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes

    def run(self) -> None:
        self.state, metrics = self.trainer.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))


def matmul_rate(size: dict) -> dict:
    """Plain matrix products of the model's own shapes: a function to time, and its FLOPs."""
    tokens, d = size["rows"] * size["segment"], size["dim"]
    shapes = [(tokens, d, 4 * d), (tokens, 4 * d, d), (tokens, d, d), (d, tokens, 4 * d)]
    operands = [(np.ones((m, k), np.float32), np.ones((k, n), np.float32)) for m, k, n in shapes]
    multiply = jax.jit(lambda pairs: [a @ b for a, b in pairs])
    placed = jax.device_put(operands)
    return {
        "run": lambda: jax.block_until_ready(multiply(placed)),
        "flops": sum(2.0 * m * k * n for m, k, n in shapes),
    }


def cases_of(compare: str, name: str, size: dict) -> dict[str, Case]:
    """What is compared, the one that the others are measured by first."""
    slide, rec = LAYERS[name]["slide"], LAYERS[name]["rec"]
    if compare == "segments":
        lengths = (size["segment"], 4 * size["segment"])
        return {f"Rec:fixed:skip, segment {n}": Case(rec, {**size, "segment": n}) for n in lengths}
    if compare == "health":
        return {"Rec:fixed:skip": Case(rec, size), "Rec:fixed:skip, watched": Case(rec, size, health=True)}
    if compare == "feedback":
        return {"Rec:fixed:skip": Case(rec, size), "Feedback:fixed:skip": Case(rec, size, feedback_stack)}
    return {f"Slide:{slide.split('*')[0]}L": Case(slide, size), "Rec:fixed:skip": Case(rec, size)}


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.step", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--compare", choices=["models", "segments", "health", "feedback"], default="models")
    parser.add_argument("--repetitions", type=WHOLE_1, default=7)
    options = parser.parse_args()
    size = SIZES[options.size]
    cases = cases_of(options.compare, options.size, size)
    plain = matmul_rate(size)
    seconds = medians({**{name: case.run for name, case in cases.items()}, "matmul": plain["run"]}, options.repetitions)
    rate = plain["flops"] / seconds["matmul"]
    first = next(iter(cases))
    for name, case in cases.items():
        line = {
            "model": name,
            "segment": case.segment,
            "seconds": round(seconds[name], 4),
            "time_to_first": round(seconds[name] / seconds[first], 3),
            "memory_to_first": round(case.peak_bytes / cases[first].peak_bytes, 3),
            "peak_megabytes": round(case.peak_bytes / 2**20),
            "compile_seconds": round(case.compile_seconds, 1),
            "gflop": round(case.flops / 1e9, 1),
            "utilisation": round(case.flops / seconds[name] / rate, 3),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    keep_memory()
    main()
