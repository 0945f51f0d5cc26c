"""Kills a training run with -9 again and again, each time followed at once by the same command, and compares its end.

python -m tests.training.killed_often --kills=100 --folder=/tmp/killed_often

No start may be refused, and the last checkpoint is, bit for bit, that of a run that nobody disturbed. Not part of the
suite: a hundred kills take a quarter of an hour.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import tests.conftest  # noqa: F401 (what compiles quickly, and once)
from block_recurrent.commandline import command_parser
from block_recurrent.errors import UserError, run_command
from block_recurrent.prepare import prepare
from block_recurrent.ranges import POSITIVE, SEED, WHOLE_1
from tests.training.test_runs import TINY, assert_bit_identical, saved

ROOT = Path(__file__).parents[2]
EVERY = 100  # steps between checkpoints


def main(arguments: list[str]) -> None:
    parser = command_parser("killed_often", __doc__)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder for the data and the two runs")
    parser.add_argument("--kills", type=WHOLE_1, default=100)
    parser.add_argument("--longest", type=POSITIVE, default=20.0, help="seconds that a process may live (%(default)s)")
    parser.add_argument("--seed", type=SEED, default=0, help="of the times at which it is killed")
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    texts = options.folder / "texts"
    texts.mkdir(parents=True)
    for i in range(30):
        (texts / f"{i}.txt").write_text(" ".join(draw.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(500)))
    store, _ = prepare("text_files", options.folder / "store", input=str(texts))

    def start(run: str, steps: int) -> subprocess.Popen:
        command = [sys.executable, "-m", "block_recurrent.train", f"--gin_file={TINY}", f"--gin.STEPS={steps}"]
        command += [f"--workdir={options.folder / run}", f"--gin.STORE='{Path(store.folder).absolute()}'"]
        command += [f"--gin.train.{name}_every={EVERY}" for name in ("checkpoint", "evaluate", "log")]
        log = open(options.folder / f"{run}.log", "a")  # noqa: SIM115 (the process has it)
        return subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=log, stderr=log)

    def last_step() -> int:
        folder = options.folder / "killed" / "checkpoints"
        steps = [int(place.name) for place in folder.iterdir() if place.name.isdigit()] if folder.exists() else []
        return max(steps, default=0)

    reached, moved = 0, 0
    for kill in range(1, options.kills + 1):
        process = start("killed", 10_000_000)
        time.sleep(draw.uniform(0.0, options.longest))
        if process.poll() is not None:
            raise UserError(f"start {kill} ended by itself with {process.returncode}: see {options.folder}/killed.log")
        process.kill()  # and the next start is at once, before the kernel has cleared it away
        before, reached = reached, last_step()
        moved += reached > before
        print(f"kill {kill}: at step {reached}", flush=True)
    print(f"{moved} of {options.kills} came after a new checkpoint; the others at a start, or on the way to one")
    steps = reached + EVERY
    for run in ("killed", "whole"):
        if code := start(run, steps).wait():
            raise UserError(f"{run} ended with {code}: see {options.folder}/{run}.log")
    log = (options.folder / "killed.log").read_text()
    if refused := [line for line in log.splitlines() if line.startswith("error: ")]:  # and then killed, unnoticed
        raise UserError(f"{len(refused)} starts were refused, the first of them so: {refused[0]}")
    assert_bit_identical(saved(options.folder / "killed", steps), saved(options.folder / "whole", steps))
    print(f"after {options.kills} kills: the checkpoint of step {steps:,} is that of an undisturbed run, bit for bit")


if __name__ == "__main__":
    run_command(main)
