"""Compiles the paper's training steps at full size for TPU slices, without a TPU, and writes a table of them.

make plan-paper  # minutes a line, one after another; what was compiled before is not compiled again

It needs the TPU compiler: pip install -r requirements-plan.txt.
"""

import argparse
import datetime
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from block_recurrent.errors import MISTAKE
from block_recurrent.planning.compiling import MISSING, libtpu_version
from block_recurrent.planning.tables import size
from block_recurrent.writing import write_text

SLICES, LARGE_SLICES = ("v4-64", "v5litepod-32"), ("v4-256", "v5litepod-128")  # one row of 4096 tokens a chip
CONFIGS = {
    "rec_fixed_skip": SLICES,
    "feedback_fixed_skip": SLICES,
    "slide_13l": SLICES,
    "rec_fixed_skip_large": LARGE_SLICES,
    "memorizing": SLICES,
}

HEADING = """# The paper's training steps, compiled for TPUs

Made by `make plan-paper`: 131,072 tokens a step (32 segments of 4096; the Memorizing Transformer has 256 of 512, and a
memory of 32,768 tokens in one layer; the large model has 128 of 4096, 524,288 tokens), bfloat16, compiled by the TPU's
own compiler on a machine without one; nothing was run on a TPU. HBM is what a device needs for a step, arguments +
outputs + temporaries - aliased. State is parameters + optimizer + carried state per device, as `plan` computes it from
shapes, and how far that is from what the compiler lays out, the worst of the three. Exchanged is the sum of the
collectives of a step on one device. Compile seconds are those of two cores that others used too.
"""
COLUMNS = ("config", "slice", "mesh", "HBM per device", "of", "fits", "state", "to the compiler's", "exchanged")
COLUMNS += ("GFLOPs per token, model / hardware", "compile seconds", "compiled on")


def plan(config: str, where: str) -> dict:
    """One plan, made by the command in a process of its own."""
    command = [sys.executable, "-m", "block_recurrent.plan", f"--gin_file=configs/pg19/{config}.gin"]
    made = subprocess.run([*command, f"--slice={where}", "--json"], stdout=subprocess.PIPE, text=True)
    if made.returncode not in (0, MISTAKE) or not made.stdout:  # a plan that does not fit is a plan
        sys.exit(made.returncode)
    return json.loads(made.stdout)["plans"][0]


def cells(config: str, found: dict) -> list[str]:
    compiled, shapes = found["compiled"], found["bytes_per_device"]
    if compiled is None:
        return [config, found["slice"], *["-"] * 5, "; ".join(found["problems"])]
    state = compiled.get("state")
    apart = max((shapes[part] / state[part] - 1 for part in state), key=abs) if state else None
    collectives = compiled.get("collectives", {})
    exchanged = sum(each["bytes"] for each in collectives.values() if isinstance(each, dict))
    return [
        config,
        found["slice"],
        " x ".join(map(str, found["mesh"].values())),
        size(compiled["used_bytes"]),
        size(found["hbm_bytes"]),
        "yes" if compiled["fits"] else f"no, by {size(compiled['over_bytes'])}",
        size(shapes["parameters"] + shapes["optimizer"] + shapes["carried_state"]),
        "-" if apart is None else f"{apart:+.1%}",
        size(exchanged) if collectives else "-",
        f"{found['model_flops_per_token'] / 1e9:.2f} / {found['hardware_flops_per_token'] / 1e9:.2f}",
        f"{compiled['compile_seconds']:.0f}",
        f"{compiled['date']}, libtpu {compiled['libtpu']}, jax {compiled['jax']}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.plan_paper", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/plan_paper.md"))
    parser.add_argument("--config", action="append", choices=CONFIGS, help="only these")
    parser.add_argument("--slice", action="append", help="only these")
    options = parser.parse_args()
    if libtpu_version() is None:
        sys.exit(f"error: {MISSING}")
    lines = ["", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    made = f"Table of {datetime.date.today()}, flax {version('flax')}, optax {version('optax')}."
    for config in options.config or CONFIGS:
        for where in options.slice or CONFIGS[config]:
            lines.append(f"| {' | '.join(cells(config, plan(config, where)))} |")
            print(lines[-1], flush=True)
            write_text(options.output, "\n".join([HEADING.rstrip(), *lines, "", made, ""]))


if __name__ == "__main__":
    main()
