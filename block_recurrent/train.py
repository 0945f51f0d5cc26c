"""Trains a model from a gin config, or goes on with a run that was stopped.

python -m block_recurrent.train --gin_file=configs/quickstart.gin --workdir=runs/quickstart
python -m block_recurrent.train --gin_file=... --gin.STEPS=2000 --gin.train.seed=1 --workdir=...
"""

import shlex
from pathlib import Path

from block_recurrent.commandline import command_parser, gin_bindings
from block_recurrent.errors import run_command
from block_recurrent.kept_memory import keep_memory


def main(arguments: list[str]) -> None:
    parser = command_parser("train", __doc__)
    parser.add_argument("--gin_file", action="append", required=True, help="a gin config; may be given several times")
    parser.add_argument("--workdir", required=True, type=Path, help="the run's folder; one that was stopped goes on")
    options, bindings = gin_bindings(parser, arguments)

    import jax

    from block_recurrent import config
    from block_recurrent.inference.run import save_run
    from block_recurrent.training.loop import train

    config.parse(options.gin_file, bindings)

    def started(store) -> None:
        if jax.process_index() == 0:
            config.save_config(options.workdir)
            save_run(options.workdir, store, shlex.join(arguments))

    config.configured(train, workdir=str(options.workdir), started=started)()
    print(f"\nThe run is in {options.workdir}; python -m block_recurrent.report {options.workdir} sums it up.")


if __name__ == "__main__":
    keep_memory()
    run_command(main)
