"""Mistakes a person can mend: one line that says what is wrong, where, and what to do."""

import errno
import sys
import traceback
from collections.abc import Callable

MISTAKE = 2
PREEMPTED = 42


class UserError(Exception):
    """Bad input. Commands print the message as one line and exit with code 2."""


class Preempted(Exception):
    """The run was told to stop, and all that it has done is saved; commands exit with code 42."""


def run_command(main: Callable[[list[str]], None], arguments: list[str] | None = None) -> None:
    """Runs a command's main on the command line and exits: a mistake is one line, not a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    end = arguments.index("--") if "--" in arguments else len(arguments)  # what follows is another command's
    debug = "--debug" in arguments[:end]
    try:
        main([argument for argument in arguments[:end] if argument != "--debug"] + arguments[end:])
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
    except Exception as error:
        told = known_trouble(error)
        if debug or told is None:
            raise
        print(f"error: {told}", file=sys.stderr)
        sys.exit(MISTAKE)
    except KeyboardInterrupt:
        sys.exit(130)


def known_trouble(error: BaseException) -> str | None:
    """What a storage error means to the person at the terminal; None for what must be a mistake in the code."""
    reason = error
    while reason is not None:  # libraries, gin among them, raise errors of their own over the one that tells
        if getattr(reason, "errno", None) == errno.EFBIG:
            return "a file would grow larger than may be written here: see ulimit -f, then give the same command again"
        if getattr(reason, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(reason):
            return "the disk is full: free some space and give the same command again"
        if isinstance(error, OSError) and isinstance(reason, OSError) and reason.filename is not None:
            return f"{reason.filename}: {reason.strerror}"
        reason = reason.__cause__ or reason.__context__
    return None


def first_line(error: Exception) -> str:
    """An error's message without what gin adds below it, or the error's name where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
