"""Ours beside the two public implementations of the Block-Recurrent Transformer: training steps and generation on CPU.

python -m benchmarks.peers                                    # a training step of size small
python -m benchmarks.peers --meliad=FOLDER --meliad_python=PYTHON   # the authors' code too, from a checkout
python -m benchmarks.peers --part=generation --rows=8
python -m benchmarks.peers --against=FOLDER                   # and another checkout of this project, an older one say
python -m benchmarks.peers --part=layers --against=FOLDER     # every layer, forward and backward, beside it

Every contender is a process of its own, under the memory settings that training gives itself; they take turns, and one
at a time runs. A JSON line for each: median seconds, tokens a second, ours over its as the median of the ratios within
a turn, and the most memory that its process has had. lucidrains' package needs
pip install -r requirements-benchmarks.txt, meliad a Python of its own (benchmarks/contenders/meliad.py). Run it on a
quiet machine; what was measured is in benchmarks/peers.md.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.contenders.layers import layers as layers_of
from benchmarks.generation import report
from benchmarks.recurrences import size_of
from benchmarks.torch_recurrences import package
from block_recurrent.errors import UserError, run_command
from block_recurrent.kept_memory import TUNABLES
from block_recurrent.ranges import WHOLE_1

ROOT = Path(__file__).parents[1]
CONTENDERS = ROOT / "benchmarks" / "contenders"


class Contender:
    """A process that runs once whenever it is asked to."""

    def __init__(self, name: str, process: subprocess.Popen):
        self.name, self.process = name, process
        self.seconds: list[float] = []
        self.facts = self.answer()

    def answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise UserError(f"{self.name} has stopped with code {self.process.wait()}: what it said is above")
        return json.loads(line)

    def run(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # its answer says that it has stopped
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        self.facts |= (answer := self.answer())
        self.seconds.append(answer["seconds"])


@contextmanager
def contender(name: str, script: str, arguments: list[str], python: str, tree: Path, cores: int) -> Iterator[Contender]:
    """Starts a script of contenders/ with a source tree on its path, on so many cores."""
    tunables = ":".join(f"{key}={value}" for key, value in TUNABLES.items())
    environment = {**os.environ, "PYTHONPATH": str(tree), "GLIBC_TUNABLES": tunables, "JAX_PLATFORMS": "cpu"}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": str(cores)}
    command = [python, str(CONTENDERS / script), *arguments, f"--threads={cores}"]
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    ) as process:
        try:
            yield Contender(name, process)
        finally:
            process.terminate()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def in_turns(contenders: list[Contender], repetitions: int) -> None:
    """Every contender once in each turn; the first turn is not counted."""
    for turn in range(repetitions + 1):
        for each in contenders:
            each.run()
            if not turn:
                each.seconds.clear()


def compared(options: argparse.Namespace, part: str, arguments: list[str], **labels) -> None:
    """A line for each contender of one comparison."""
    with ExitStack() as running:

        def enter(name: str, script: str, arguments: list[str], python: str = sys.executable, tree: Path = ROOT):
            entered.append(
                running.enter_context(contender(name, script, [part, *arguments], python, tree, options.cores))
            )

        entered: list[Contender] = []
        enter("ours", "ours.py", arguments)
        if options.against:
            enter("against", "ours.py", arguments, tree=options.against)
        peers = part == "step" or (part == "generation" and not options.uneven)
        if peers and options.model == "rec" and package("block_recurrent_transformer_pytorch"):
            enter("lucidrains", "lucidrains.py", [a for a in arguments if "--model" not in a])
        if part == "step" and options.meliad:
            enter("meliad", "meliad.py", arguments, options.meliad_python, options.meliad)
        in_turns(entered, options.repetitions)
    mine = entered[0].seconds
    for each in entered:
        per_token = each.facts["amount"] / entered[0].facts["amount"]
        ratio = statistics.median(own / (its / per_token) for own, its in zip(mine, each.seconds, strict=True))
        seconds = statistics.median(each.seconds)
        facts = {"parameters": each.facts["parameters"]} if each.facts["parameters"] else {}
        report(
            **labels,
            cores=options.cores,
            name=each.name,
            seconds=seconds,
            tokens_per_second=each.facts["amount"] / seconds,
            ours_to_its=ratio,
            peak_megabytes=each.facts["peak_megabytes"],
            **facts,
        )


def step(options: argparse.Namespace) -> None:
    arguments = [f"--size={options.size}", f"--model={options.model}"]
    compared(options, "step", arguments, size=options.size, model=options.model)


def generation(options: argparse.Namespace) -> None:
    arguments = [f"--rows={options.rows}", f"--model={options.model}", *(["--uneven"] if options.uneven else [])]
    compared(options, "generation", arguments, model=options.model, rows=options.rows, uneven=options.uneven)


def layers(options: argparse.Namespace) -> None:
    shape = ",".join(map(str, options.shape))
    for name in options.layer or layers_of(256):
        compared(options, "layer", [f"--layer={name}", f"--shape={shape}"], layer=name)


PARTS = {"step": step, "generation": generation, "layers": layers}


def folder(value: str) -> Path:
    if not Path(value).is_dir():
        raise argparse.ArgumentTypeError(f"{value} is not a folder: give a checkout")
    return Path(value).resolve()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, default="step")
    parser.add_argument("--size", choices=["small", "base"], default="small")
    parser.add_argument("--model", choices=["rec", "slide"], default="rec")
    parser.add_argument("--rows", type=WHOLE_1, default=1, help="texts generated at once")
    parser.add_argument("--uneven", action="store_true", help="prompts of different lengths; ours alone")
    parser.add_argument("--layer", nargs="+", choices=layers_of(256), help="by default every one")
    parser.add_argument("--shape", type=size_of, default=(4, 512, 256), help="of a layer's input: batch,length,width")
    parser.add_argument("--against", type=folder, help="another checkout of this project")
    parser.add_argument("--meliad", type=folder, help="a checkout of the authors' code")
    parser.add_argument("--meliad_python", default="python3.12", help="with what that code imports")
    parser.add_argument("--cores", type=WHOLE_1, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repetitions", type=WHOLE_1, default=9)
    options = parser.parse_args(arguments)
    PARTS[options.part](options)


if __name__ == "__main__":
    run_command(main)
