"""Trains a model from a gin config, or goes on with a run that was stopped.

python -m block_recurrent.train --gin_file=configs/quickstart.gin --workdir=runs/quickstart
python -m block_recurrent.train --gin_file=... --gin.STEPS=2000 --gin.train.seed=1 --workdir=...
python -m block_recurrent.train --gin_file=... --from=runs/quickstart@best --gin.train.segment=1024 --workdir=...
python -m block_recurrent.train --gin_file=... --names    # what --gin.NAME=VALUE can change
"""

import argparse
import shlex
from typing import TYPE_CHECKING

from block_recurrent.commandline import command_parser, gin_bindings
from block_recurrent.errors import UserError, run_command
from block_recurrent.kept_memory import keep_memory
from block_recurrent.ranges import POSITIVE, WHOLE_0, WHOLE_1

if TYPE_CHECKING:
    from etils import epath

    from block_recurrent.training.warm_start import WarmStart


def main(arguments: list[str]) -> None:
    parser = command_parser("train", __doc__)
    parser.add_argument("--gin_file", action="append", required=True, help="a gin config; may be given several times")
    parser.add_argument("--workdir", help="the run's folder, or gs://...; one that was stopped goes on")
    warm = parser.add_argument_group("a new run that begins with the parameters of another")
    warm.add_argument("--from", dest="source", metavar="RUN", help="its folder: the newest step, or RUN@best, RUN@STEP")
    warm.add_argument(
        "--from_fresh",
        action="append",
        default=[],
        metavar="PATTERN",
        help="parameters that start fresh all the same, such as '*/state_ids'; may be given several times",
    )
    parser.add_argument("--names", action="store_true", help="list what --gin.NAME=VALUE can change, and train nothing")
    several = parser.add_argument_group("several processes (on a TPU slice and under Slurm they find each other)")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    several.add_argument("--processes", type=WHOLE_1, help="how many there are")
    several.add_argument("--process", type=WHOLE_0, help="which of them this is, from 0")
    several.add_argument(
        "--patience", type=POSITIVE, default=120.0, help="seconds to wait for the others (default: 120)"
    )
    parser.add_argument("--skip_damaged", action="store_true", help="go on from the last checkpoint that can be read")
    parser.add_argument("--take_over", action="store_true", help="end another training in this workdir, and go on")
    parser.add_argument("--profile", action="store_true", help="trace a few steps: TensorBoard and Perfetto open it")
    options, bindings = gin_bindings(parser, arguments)
    if options.names:
        return show_names(options.gin_file, bindings)
    if options.workdir is None:
        parser.error("the following arguments are required: --workdir")
    if options.from_fresh and not options.source:
        raise UserError("--from_fresh is of a warm start: give --from=RUN too, or leave it away")

    import jax

    from block_recurrent import config
    from block_recurrent.data.files import require_contained
    from block_recurrent.data.store import open_store
    from block_recurrent.inference.run import run_folder, save_run
    from block_recurrent.training import processes
    from block_recurrent.training.loop import store_of_run, train
    from block_recurrent.training.ownership import own

    processes.join(options.coordinator, options.processes, options.process, options.patience)
    with processes.before_agreeing("start"):
        notes, workdir = config.parse(options.gin_file, bindings), run_folder(options.workdir)
        if workdir.exists():
            require_contained(workdir)
        config.fill_vocabulary(lambda store: open_store(store_of_run(workdir, store)).vocabulary_size)
        warm_start = warm_start_of(options, workdir)
        if processes.client() is not None:
            store = open_store(store_of_run(workdir, config.bindings_of(train, "store")["store"]))
            facts = {
                "version of jax": jax.__version__,
                "code": processes.code_version(),
                "config": config.fingerprint(),
                "data store": store.fingerprint(),
                "workdir": options.workdir,
                "warm start": str(warm_start and (options.source, options.from_fresh)),
            }
    if processes.client() is not None:
        processes.agree("start", facts, options.patience)

    if jax.process_index() == 0 and notes:
        print(*notes, sep="\n")
    owners = []

    def started(store) -> None:
        with processes.before_agreeing("workdir"):
            if jax.process_index() == 0:
                owners.append(own(workdir, options.take_over))
                config.save_config(workdir)
                save_run(workdir, store, shlex.join(arguments), warm_start and warm_start.note)
        processes.agree("workdir", {}, options.patience)

    def before_saving() -> None:
        for owner in owners:
            owner.require()

    try:
        config.configured(
            train,
            workdir=options.workdir,
            started=started,
            before_saving=before_saving,
            patience=options.patience,
            skip_damaged=options.skip_damaged,
            profile_steps=5 if options.profile else 0,
            warm_start=warm_start,
        )()
    finally:
        for owner in owners:
            owner.release()
    if jax.process_index() == 0:
        print(f"\nThe run is in {options.workdir}; python -m block_recurrent.report {options.workdir} sums it up.")


def warm_start_of(options: argparse.Namespace, workdir: "epath.Path") -> "WarmStart | None":
    """The warm start of a new run; None for one that goes on with its own parameters."""
    from block_recurrent import config
    from block_recurrent.inference.run import run_folder
    from block_recurrent.training.warm_start import WarmStart, read_source, require_begun_with

    if not options.source:
        return None
    if config.has_checkpoint(workdir):
        require_begun_with(workdir, options.source)
        return None
    place, step = read_source(options.source)
    differing = sorted(set(map(config.short_name, config.differences(run_folder(place)))))
    return WarmStart(place, step, tuple(options.from_fresh), tuple(differing))


def show_names(files: list[str], bindings: list[str]) -> None:
    """Prints what can be changed in a config."""
    from block_recurrent import config, config_names

    config.parse(files, bindings)
    print(*config_names.show(config_names.changeable(files)), sep="\n")


if __name__ == "__main__":
    keep_memory()
    run_command(main)
