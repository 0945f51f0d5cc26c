"""A sweep over gin values as a list of jobs."""

import itertools
import re
from dataclasses import replace

from block_recurrent.errors import UserError
from launch.jobs import Job


def expand(job: Job, sweeps: list[str]) -> list[Job]:
    """One job for each element of the product of sweeps (NAME=VALUE,VALUE...), each with a workdir of its own."""
    axes = [parse(text) for text in sweeps]
    if not axes:
        raise UserError("nothing to sweep over: give --sweep='train.seed=0,1,2'")
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise UserError("a name is swept over twice")
    runs = []
    for values in itertools.product(*(values for _, values in axes)):
        point = dict(zip(names, values, strict=True))
        label = "-".join(f"{name.rpartition('.')[2]}-{value}" for name, value in point.items())
        label = re.sub(r"[^a-z0-9]+", "-", label.lower().replace("_", "")).strip("-")
        runs.append(
            replace(
                job,
                name=f"{job.name}-{label}",
                workdir=f"{job.workdir.rstrip('/')}/{label}",
                arguments=[*job.arguments, *(f"--gin.{name}={value}" for name, value in point.items())],
            )
        )
    if len({run.name for run in runs}) < len(runs) or any(len(run.name) > 50 for run in runs):
        runs = [
            replace(run, name=f"{job.name}-{i}", workdir=f"{job.workdir.rstrip('/')}/{i}") for i, run in enumerate(runs)
        ]
    return runs


def parse(text: str) -> tuple[str, list[str]]:
    """`train.seed` and `["0", "1"]` of `train.seed=0,1`; commas in quotes and brackets divide nothing."""
    name, _, values = text.partition("=")
    if not re.fullmatch(r"[\w./]+", name) or not values:
        raise UserError(f"--sweep={text!r}: write NAME=VALUE,VALUE,...")
    parts, depth, quote = [""], 0, ""
    for letter in values:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    parts = [part.strip() for part in parts]
    if depth or quote or not all(parts):
        raise UserError(f"--sweep={text!r}: a value is empty, or a bracket or quote is not closed")
    return name, parts
