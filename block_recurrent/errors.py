"""Mistakes a person can mend: one line that says what is wrong, where, and what to do."""

import errno
import os
import sys
import traceback
from collections.abc import Callable

MISTAKE = 2
PREEMPTED = 42


class UserError(Exception):
    """Bad input. Commands print the message as one line and exit with code 2."""


class Preempted(Exception):
    """The run was told to stop and has saved its state; commands exit with code 42."""


def run_command(main: Callable[[list[str]], None], arguments: list[str] | None = None) -> None:
    """Runs a command's main on the command line and exits: a mistake is one line, not a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow would report at length that it has no GPU
    try:
        main([argument for argument in arguments if argument != "--debug"])
    except UserError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {first_line(error)}", file=sys.stderr)
        sys.exit(MISTAKE)
    except Preempted as stop:
        print(first_line(stop), file=sys.stderr)
        sys.exit(PREEMPTED)
    except BrokenPipeError:  # `... | head` closed the pipe
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.ENOSPC or debug:
            raise
        print(f"error: the disk is full ({error.filename or first_line(error)}): free some space", file=sys.stderr)
        sys.exit(MISTAKE)
    except KeyboardInterrupt:
        sys.exit(130)


def first_line(error: Exception) -> str:
    """An error's message without what gin adds below it, or the error's name where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
