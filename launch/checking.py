"""What a run's command would meet on its workers, found out here before anything is paid for."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from block_recurrent.errors import UserError
from block_recurrent.prices import dollars
from launch import repository
from launch.jobs import Job

HINT = "; --unchecked sends it as it is"


def check_runs(runs: Iterable[Job]) -> Iterator[str]:
    """Parses each run's arguments with the code of its commit and plans it for its slice; says what it found."""
    folder, commit = None, None
    with tempfile.TemporaryDirectory(prefix="launch-") as scratch:
        for run in runs:
            if run.commit != commit:
                commit, folder = run.commit, Path(scratch) / run.commit
                repository.export(commit, folder)
            yield f"{run.name}: {check(run, folder)}"


def check(run: Job, code: Path) -> str:
    """Refuses what would fail on a worker: unknown flags and names, files and data not there, a slice too small."""
    gin, others = split_arguments(run.arguments)
    for file in (Path(each.partition("=")[2]) for each in gin if each.startswith("--gin_file=")):
        if not (code / file).is_file() or (file.is_absolute() and not run.shared_disk):
            raise UserError(f"workers have no {file}: it is not in commit {run.commit[:12]}; commit and push it{HINT}")
    check_flags(others, code)
    check_source(others, run.shared_disk)
    document = plan(gin, run.slice, code)
    (report,) = document["plans"]
    if report["problems"]:
        raise UserError(f"{run.name} does not fit {run.slice}: {report['problems'][0]}{HINT}")
    check_store(document.get("store"), run.shared_disk)
    low, high = report["estimate"].get("hours_range") or [report["estimate"]["hours"]] * 2
    cost = f", {dollars(low * run.per_hour)} to {dollars(high * run.per_hour)}" if run.per_hour else ""
    return f"commit {run.commit[:12]} fits {run.slice} by shapes; estimate: {low:,.1f} to {high:,.1f} h{cost}"


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Training's arguments that are gin's, those of two words as one, and the others."""
    gin, others, words = [], [], iter(arguments)
    for word in words:
        if word == "--gin_file":
            gin.append(f"--gin_file={next(words, '')}")
        elif word.startswith(("--gin_file=", "--gin.")):
            gin.append(word)
        else:
            others.append(word)
    if not any(word.startswith("--gin_file=") for word in gin):
        raise UserError("the arguments of block_recurrent.train have no --gin_file: give one after --")
    return gin, others


def check_flags(arguments: list[str], code: Path) -> None:
    """Refuses flags that training does not have, and values that it does not take."""
    done = module(code, "train", *arguments, "--help")
    if done.returncode:
        raise UserError(complaint(done))
    known = set(re.findall(r"--[\w-]+", done.stdout))
    for flag in (word.partition("=")[0] for word in arguments if word.startswith("--")):
        if not any(name.startswith(flag) for name in known):
            raise UserError(f"block_recurrent.train has no {flag}: python -m block_recurrent.train --help")


def plan(gin: list[str], where: str, code: Path) -> dict:
    done = module(code, "plan", "--fast", "--json", f"--slice={where}", *gin)
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise UserError(complaint(done)) from None


def module(code: Path, command: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs a command of the checked-out code."""
    words = [sys.executable, "-m", f"block_recurrent.{command}", *arguments]
    return subprocess.run(words, cwd=code, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def complaint(done: subprocess.CompletedProcess) -> str:
    """What a command said is wrong; where it said nothing to the point, that it could not be asked."""
    lines = done.stderr.strip().splitlines() or ["it said nothing"]
    if lines[-1].startswith("error: "):
        return lines[-1].removeprefix("error: ")
    return f"the config cannot be checked here ({lines[-1].strip()}){HINT}"


def check_source(arguments: list[str], shared_disk: bool) -> None:
    """Refuses a warm start from a run that is on this machine alone."""
    for word, after in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, equals, place = word.partition("=")
        place = place if equals else after
        if flag == "--from" and not is_reached(place, shared_disk):
            raise UserError(
                f"workers have no run {place}: copy it into a bucket and give --from=gs://BUCKET/FOLDER, or an "
                f"absolute path and --shared-disk{HINT}"
            )


def is_reached(place: str, shared_disk: bool) -> bool:
    """Whether workers find a place: in a bucket, or on a disk that they share."""
    return "://" in place or (shared_disk and place.startswith("/"))


def check_store(store: object, shared_disk: bool) -> None:
    """Refuses data that is on this machine alone."""
    if not isinstance(store, str) or is_reached(store, shared_disk):
        return
    raise UserError(
        f"workers have no data {store}: prepare it into a bucket (--output=gs://BUCKET/FOLDER) and give that as STORE, "
        f"or an absolute path and --shared-disk{HINT}"
    )
