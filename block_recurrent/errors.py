"""Mistakes a person can mend: one line that says what is wrong, where, and what to do."""

import errno
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
PACKAGES = ("clu", "etils", "flax", "fsspec", "gin", "jax", "jaxlib", "numpy", "optax", "orbax", "rich", "tensorflow")
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
        fail(first_line(error))
    except Preempted as stop:
        print(first_line(stop), file=sys.stderr)
        sys.exit(PREEMPTED)
    except BrokenPipeError:  # `... | head` closed the pipe
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        told = missing_package(error) or known_trouble(error)
        if debug or told is None:
            raise
        fail(told)
    except KeyboardInterrupt:
        sys.exit(130)


def fail(message: str) -> NoReturn:
    """Prints one line and exits as for a mistake."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(MISTAKE)


def missing_package(error: BaseException) -> str | None:
    """What to do about a Python that lacks one of the packages that this project needs; None for any other error."""
    name = error.name.partition(".")[0] if isinstance(error, ImportError) and error.name else ""
    if name not in PACKAGES:
        return None
    mine = ROOT / ".venv" / "bin" / "python"
    is_there = mine.exists() and Path(sys.prefix) != mine.parents[1]
    install = f"{sys.executable} -m pip install -r {ROOT / 'requirements.txt'}"
    advice = f"use {mine}" if is_there else f"install what it needs with {install}"
    return f"this Python, {sys.executable}, has no {name}: {advice}"


def known_trouble(error: BaseException) -> str | None:
    """What an error of storage or memory means to a person; None for what must be a mistake in the code."""
    if type(error).__name__ == "JaxRuntimeError" and (short := re.search(r"RESOURCE_EXHAUSTED: (.*)", str(error))):
        return (
            f"the device has not enough memory ({short[1].rstrip('. ')}): take fewer rows, a smaller segment or model"
        )
    if isinstance(error, MemoryError):
        return f"this machine has not enough memory ({first_line(error).rstrip('. ')}): take something smaller"
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
