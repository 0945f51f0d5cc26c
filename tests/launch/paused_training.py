"""Training that waits before its fifth step until a preemption has come, once: python paused_training.py ARGUMENTS.

MARKS is a folder for two files: `paused` says that the run waits, `signalled` that it was sent its signal.
"""

import os
import sys
import time
from pathlib import Path

from block_recurrent import train
from block_recurrent.errors import run_command
from block_recurrent.training.step import Trainer

marks, take, taken = Path(os.environ["MARKS"]), Trainer.step, []


def take_or_wait(trainer, *arguments):
    taken.append(1)
    if len(taken) == 5 and not (marks / "paused").exists():
        (marks / "paused").touch()
        while not (marks / "signalled").exists():
            time.sleep(0.02)
        time.sleep(0.1)
    return take(trainer, *arguments)


if __name__ == "__main__":
    Trainer.step = take_or_wait
    run_command(train.main, sys.argv[1:])
