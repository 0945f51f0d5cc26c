"""A training run that is killed in its middle: python -m tests.training.killed STEP SIGNAL [train's arguments]."""

import os
import sys

from block_recurrent import train
from block_recurrent.errors import run_command
from block_recurrent.training.step import Trainer


def kill_before_step(step: int, signal_number: int) -> None:
    """Sends this process a signal when it is about to take its `step`-th training step."""
    take, steps = Trainer.step, []

    def take_or_die(trainer, *arguments):
        steps.append(step)
        if len(steps) == step:
            os.kill(os.getpid(), signal_number)
        return take(trainer, *arguments)

    Trainer.step = take_or_die


if __name__ == "__main__":
    kill_before_step(int(sys.argv[1]), int(sys.argv[2]))
    run_command(train.main, sys.argv[3:])
