"""Trains configs on the same data and seeds, one after another, and sets them side by side.

python -m block_recurrent.compare configs/side_by_side/{sru,lrn}.gin --task=python_stdlib --tokens=1e6 --output=runs/two
python -m block_recurrent.compare ... --seeds=0,1,2 --gin.train.rows=8   # bindings are for every config
python -m block_recurrent.compare ... --table_only                       # of what is finished

Stopped or killed, the same command goes on; with more configs or seeds it does what is not done yet. Every run is one
of `train` in OUTPUT/CONFIG-seedSEED. A run's schedule ends with its tokens, so those of a comparison cannot be changed.
Without --tokens each config trains for its own steps. Where it keeps its best checkpoint, that is the one evaluated.
"""

import argparse
import math
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from block_recurrent.commandline import command_parser, gin_bindings
from block_recurrent.errors import PREEMPTED, Preempted, UserError, run_command
from block_recurrent.ranges import LARGE, SEED, Range

if TYPE_CHECKING:
    from block_recurrent.comparison import Contender, Run

# What the comparison binds itself, and from which of its options.
BOUND = {
    "STEPS": "--tokens",
    "train.steps": "--tokens",
    "STORE": "--store",
    "train.store": "--store",
    "train.seed": "--seeds",
}


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = command_parser("compare", __doc__)
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="gin configs; differences are to the first")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--task", help="train on this task's store, which is prepared first where that takes no --input")
    data.add_argument("--store", metavar="FOLDER", help="train on this prepared store")
    parser.add_argument(
        "--tokens",
        type=Range(least=1, most=LARGE),
        help="of training, the same for every config (default: each config's own steps)",
    )
    parser.add_argument("--seeds", type=seeds, default=[0], metavar="SEED,...", help="one run for each (default: 0)")
    parser.add_argument("--output", type=Path, required=True, help="the folder of all runs, the table and the plots")
    parser.add_argument("--split", default="test", help="to evaluate on: test (default) or validation")
    parser.add_argument("--skip_damaged", action="store_true", help="as in train")
    parser.add_argument("--trust", action="append", default=[], help="as in evaluate")
    parser.add_argument("--table_only", action="store_true", help="train nothing: the table and plots of what is there")
    options, bindings = gin_bindings(parser, arguments)
    for name in (binding.partition("=")[0].strip() for binding in bindings):
        if name in BOUND and (BOUND[name] != "--tokens" or options.tokens is not None):
            raise UserError(f"--gin.{name}: a comparison sets it by {BOUND[name]}")
    return options, bindings


def seeds(text: str) -> list[int]:
    """The value of --seeds: numbers with commas between them."""
    return sorted({int(SEED(seed)) for seed in text.split(",")})


def main(arguments: list[str]) -> None:
    options, bindings = parse(arguments)
    environment = dict(os.environ)
    # The accelerators are left to the runs: they may serve one process at a time.
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

    from block_recurrent.comparison import write
    from block_recurrent.data.files import require_contained
    from block_recurrent.measures import kind_of

    require_contained(options.output)
    contenders = [contender(name, file, bindings, options.tokens) for name, file in named(options.configs).items()]
    store = prepared_store(options, environment)
    runs = [planned(each, seed, bindings, store, options.output) for seed in options.seeds for each in contenders]
    failed = [] if options.table_only else finish(runs, options, environment)
    scores = {run: score for run in runs if (score := run.score(options.split)) is not None}
    if not scores:
        raise UserError("; ".join(failed) or f"{options.output} has no finished run yet: there is no table to make")
    about = {
        "tokens": None if options.tokens is None else int(options.tokens),
        "store": store.folder,
        "split": options.split,
        "bindings": bindings,
        "missing": [run.workdir.name for run in runs if run not in scores],
    }
    finished = {run.contender for run in scores}
    costs = {each: cost(each, bindings, store.vocabulary_size) for each in contenders if each in finished}
    write(options.output, about, scores, costs, kind_of(store.manifest))
    if failed:
        raise UserError(f"{len(failed)} of {len(runs)} runs failed, and the table is without them: {'; '.join(failed)}")


def named(files: Sequence[str]) -> dict[str, str]:
    """The configs by their files' names; one whose name is taken has its folder's before it."""
    if len({Path(file).resolve() for file in files}) < len(files):
        raise UserError("a config is given twice: bindings are for all, so what differs has to be in the gin files")
    found: dict[str, str] = {}
    for file in files:
        parts = Path(file).resolve().with_suffix("").parts
        names = ("-".join(parts[-count:]) for count in range(1, len(parts)))
        found[next(name for name in names if name not in found)] = file
    return found


def contender(name: str, file: str, bindings: list[str], tokens: float | None) -> "Contender":
    """A config, with the steps that the tokens take, or its own."""
    from block_recurrent import config
    from block_recurrent.comparison import Contender
    from block_recurrent.plan import configured_training

    config.parse([file], bindings, takes_files=False)
    training = configured_training(vocabulary_size=1)  # its tokens are counted, nothing else
    per_step = training.tokens_per_step
    if tokens is None:
        return Contender(name, file, per_step, training.steps)
    steps = math.ceil(tokens / per_step)
    if steps * per_step != tokens:
        print(f"{name}: {tokens:,.0f} tokens are rounded up to {steps:,} steps of {per_step:,}: {steps * per_step:,}")
    return Contender(name, file, per_step, steps)


def cost(contender: "Contender", bindings: list[str], vocabulary_size: int) -> dict[str, float]:
    """What a config's shapes tell: parameters, and FLOPs of training."""
    from flax import linen as nn

    from block_recurrent import config
    from block_recurrent.plan import configured_training
    from block_recurrent.planning.shapes import count_work
    from block_recurrent.training.overview import parameter_counts
    from block_recurrent.training.step import boxed_params

    config.parse([contender.config], bindings, takes_files=False)
    training = configured_training(vocabulary_size)
    work = count_work(training, "tpu")
    return {
        "parameters": parameter_counts(nn.unbox(boxed_params(training.model)))[0],
        "model_flops_per_token": work.model_flops / training.tokens_per_step,
        "hardware_flops_per_token": work.hardware_flops / training.tokens_per_step,
    }


def prepared_store(options: argparse.Namespace, environment: Mapping[str, str]):
    """The store to train on, that of the runs that have begun; a task's is made where that takes nothing but time."""
    from block_recurrent.data.registry import task
    from block_recurrent.data.store import is_store, open_store, place_of
    from block_recurrent.inference.run import RUN
    from block_recurrent.training.loop import store_of_run

    folder = options.store or f"data/{task(options.task).name}"
    for run in sorted(options.output.glob(f"*/{RUN}")):
        folder = store_of_run(run.parent, folder)
    if options.task and not options.table_only and not is_store(place_of(folder)):
        needs = task(options.task)
        if needs.options:
            raise UserError(
                f"no prepared data in {folder}: run python -m block_recurrent.prepare --task={needs.name} --input=... "
                f"first; it takes {needs.needs}"
            )
        call("prepare", [f"--task={needs.name}"], environment)
    store = open_store(folder)
    store.split(options.split)
    return store


def planned(contender: "Contender", seed: int, bindings: list[str], store, output: Path) -> "Run":
    """A contender's run with a seed; a workdir that holds another run is refused."""
    from block_recurrent import config
    from block_recurrent.comparison import Run
    from block_recurrent.data.store import contents
    from block_recurrent.inference.run import read_about
    from block_recurrent.training.loop import train

    config.parse([contender.config], bindings, takes_files=False)
    names = [macro if macro in config.defined_names() else f"train.{macro.lower()}" for macro in ("STEPS", "STORE")]
    own = [f"{names[0]}={contender.steps}", f"{names[1]}={store.folder!r}", f"train.seed={seed}"]
    config.parse([contender.config], [*bindings, *own], takes_files=False)
    config.fill_vocabulary(lambda _: store.vocabulary_size)
    workdir = output / f"{contender.name}-seed{seed}"
    if was_edited := config.edited(workdir):
        raise UserError(was_edited)
    if differing := config.differences(workdir):
        raise UserError(
            f"{workdir} holds a run of another config (first difference: {differing[0]}): choose another --output"
        )
    if config.differences(workdir, config.MAY_CHANGE - config.LENGTH):
        raise UserError(f"{workdir} holds a run of another number of tokens or steps: choose another --output")
    if config.has_checkpoint(workdir) and read_about(workdir)["splits"] != contents(store):
        raise UserError(f"{workdir} holds a run on other data than {store.folder}: choose another --output")
    keeps_best = "keep_best" in config.names_given_to(train) and config.bindings_of(train, "keep_best")["keep_best"]
    return Run(contender, seed, workdir, tuple(f"--gin.{binding}" for binding in (*bindings, *own)), keeps_best)


def finish(runs: Sequence["Run"], options: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """Trains and evaluates what is not done yet; what went wrong, a line for each run that failed."""
    failed = []
    with locked(options.output) as lock:
        for number, run in enumerate(runs, start=1):
            done = run.score(options.split) is not None
            print(
                f"[{number}/{len(runs)}] {run.workdir}: {'done' if done else f'{run.contender.steps:,} steps'}",
                flush=True,
            )
            if done:
                continue
            try:
                if not run.is_trained():
                    training = [f"--gin_file={run.contender.config}", f"--workdir={run.workdir}", *run.arguments]
                    training += ["--skip_damaged"] * options.skip_damaged
                    call("train", training, environment, [lock.fileno()])
                evaluation = [str(run.workdir), f"--split={options.split}", f"--step={run.evaluated_step}"]
                evaluation += [f"--trust={package}" for package in options.trust]
                call("evaluate", evaluation, environment, [lock.fileno()])
            except UserError as error:
                failed.append(f"{run.workdir} ({error})")
    return failed


@contextmanager
def locked(output: Path) -> Iterator[TextIO]:
    """One comparison at a time; a run whose comparison alone was killed holds the lock until it ends."""
    import fcntl

    output.mkdir(parents=True, exist_ok=True)
    with open(output / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"{output}: a comparison, or a run that one began, is at work there: wait for it"
            ) from error
        yield lock


def call(command: str, arguments: list[str], environment: Mapping[str, str], files: Collection[int] = ()) -> None:
    """Runs a command of this project; told to stop, it saves what it has before this process stops."""
    child = subprocess.Popen(
        [sys.executable, "-m", f"block_recurrent.{command}", *arguments], env=environment, pass_fds=files
    )
    # The terminal tells the child of Ctrl-C too.
    handlers = {signal.SIGTERM: lambda *_: child.terminate(), signal.SIGINT: lambda *_: None}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code in (PREEMPTED, 130, -signal.SIGTERM, -signal.SIGINT):
        raise Preempted(f"{command} was stopped; the same command goes on")
    if code:
        raise UserError(f"{command} ended with exit code {code}")


if __name__ == "__main__":
    run_command(main)
