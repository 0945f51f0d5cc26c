"""Trains a model from a gin config, or goes on with a run that was stopped.

python -m block_recurrent.train --gin_file=configs/quickstart.gin --workdir=runs/quickstart
python -m block_recurrent.train --gin_file=... --gin.STEPS=2000 --gin.train.seed=1 --workdir=...
python -m block_recurrent.train --gin_file=... --names    # what --gin.NAME=VALUE can change
"""

import shlex

from block_recurrent.commandline import command_parser, gin_bindings
from block_recurrent.errors import run_command
from block_recurrent.kept_memory import keep_memory


def main(arguments: list[str]) -> None:
    parser = command_parser("train", __doc__)
    parser.add_argument("--gin_file", action="append", required=True, help="a gin config; may be given several times")
    parser.add_argument("--workdir", help="the run's folder, or gs://...; one that was stopped goes on")
    parser.add_argument("--names", action="store_true", help="list what --gin.NAME=VALUE can change, and train nothing")
    several = parser.add_argument_group("several processes (on a TPU slice and under Slurm they find each other)")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    several.add_argument("--processes", type=int, help="how many there are")
    several.add_argument("--process", type=int, help="which of them this is, from 0")
    several.add_argument("--patience", type=float, default=120.0, help="seconds to wait for the others (default: 120)")
    parser.add_argument("--skip_damaged", action="store_true", help="go on from the last checkpoint that can be read")
    parser.add_argument("--take_over", action="store_true", help="end another training in this workdir, and go on")
    parser.add_argument("--profile", action="store_true", help="trace a few steps: TensorBoard and Perfetto open it")
    options, bindings = gin_bindings(parser, arguments)
    if options.names:
        return show_names(options.gin_file, bindings)
    if options.workdir is None:
        parser.error("the following arguments are required: --workdir")

    import jax
    from etils import epath

    from block_recurrent import config
    from block_recurrent.data.store import open_store
    from block_recurrent.inference.run import run_folder, save_run
    from block_recurrent.training import processes
    from block_recurrent.training.loop import store_of_run, train
    from block_recurrent.training.ownership import own

    processes.join(options.coordinator, options.processes, options.process, options.patience)
    with processes.before_agreeing("start"):
        notes = config.parse(options.gin_file, bindings)
        config.fill_vocabulary(
            lambda store: open_store(store_of_run(run_folder(options.workdir), store)).vocabulary_size
        )
        if processes.client() is not None:
            place = store_of_run(run_folder(options.workdir), config.bindings_of(train, "store")["store"])
            store = open_store(place)
            facts = {
                "version of jax": jax.__version__,
                "code": processes.code_version(),
                "config": config.fingerprint(),
                "data store": store.fingerprint(),
                "workdir": options.workdir,
            }
    if processes.client() is not None:
        processes.agree("start", facts, options.patience)

    if jax.process_index() == 0 and notes:
        print(*notes, sep="\n")
    workdir, owners = epath.Path(options.workdir), []

    def started(store) -> None:
        with processes.before_agreeing("workdir"):
            if jax.process_index() == 0:
                owners.append(own(workdir, options.take_over))
                config.save_config(workdir)
                save_run(workdir, store, shlex.join(arguments))
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
        )()
    finally:
        for owner in owners:
            owner.release()
    if jax.process_index() == 0:
        print(f"\nThe run is in {options.workdir}; python -m block_recurrent.report {options.workdir} sums it up.")


def show_names(files: list[str], bindings: list[str]) -> None:
    """Prints what can be changed in a config."""
    from block_recurrent import config, config_names

    config.parse(files, bindings)
    print(*config_names.show(config_names.changeable(files)), sep="\n")


if __name__ == "__main__":
    keep_memory()
    run_command(main)
