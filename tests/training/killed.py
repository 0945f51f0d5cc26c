"""A training run that is killed in its middle: python -m tests.training.killed STEP SIGNAL [train's arguments]."""

import os
import sys

from block_recurrent import train
from block_recurrent.data.rows import RowStream
from block_recurrent.errors import run_command


def kill_before_step(step: int, signal_number: int) -> None:
    """Sends this process a signal when it is about to read its `step`-th training batch."""
    read, reads = RowStream.read, []

    def read_or_die(stream, cursor):
        if stream.epochs is None:
            reads.append(cursor)
            if len(reads) == step:
                os.kill(os.getpid(), signal_number)
        return read(stream, cursor)

    RowStream.read = read_or_die


if __name__ == "__main__":
    kill_before_step(int(sys.argv[1]), int(sys.argv[2]))
    run_command(train.main, sys.argv[3:])
