"""Money: what a slice costs an hour, for how long it was there, and when that is enough.

Time counts while the slice is ACTIVE, over all slices that a job has had, from look to look; it is kept in the job's
file.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

from block_recurrent.errors import UserError
from block_recurrent.prices import Prices, dollars, read_prices
from launch.jobs import Job, Jobs

REACHED = 43  # the exit code where a limit ended a run


def prices_of(job: Job) -> Prices:
    return read_prices(Path(job.prices) if job.prices else None)


def priced(job: Job) -> Job:
    """The job with what its slices cost an hour, 0 where that is not known."""
    prices = prices_of(job)
    per_hour = prices.per_hour(job.tpus, job.spot) or 0.0
    if job.max_cost and not per_hour:
        raise UserError(f"--max-cost: {prices.file} has no price of {job.slice}{' --spot' if job.spot else ''}")
    return replace(job, per_hour=per_hour)


def cost(job: Job) -> str:
    """What a booking costs an hour and what ends it, in words."""
    booking = f"{job.slice}, {'spot' if job.spot else 'on demand'}"
    if not job.per_hour:
        return f"{booking}: its price is not known ({prices_of(job)})"
    limits = [f"--max-hours={job.max_hours:g}"] if job.max_hours else []
    limits += [f"--max-cost={job.max_cost:g}"] if job.max_cost else []
    ends = f"until {' or '.join(limits)}" if limits else "with no --max-hours and no --max-cost"
    return f"{booking}: about {dollars(job.per_hour)} an hour, {ends} ({prices_of(job)})"


def ask(job: Job, yes: bool, dry: bool = False) -> None:
    """Says what a booking costs an hour and goes on if the answer is yes."""
    if reason := reached(job):
        raise UserError(f"{reason}: to book again, give a higher limit")
    if dry:
        print(f"# it asks first: {cost(job)}")
        return
    if not yes and not sys.stdin.isatty():
        raise UserError(f"{cost(job)}: give --yes to book it, as there is no terminal to ask at")
    print(cost(job))
    if yes:
        return
    try:
        answer = input("Book it? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError("nothing was booked")


def unaccounted(job: Job) -> float:
    """Seconds since the slice was last seen ACTIVE; 0 while there is none."""
    return max(0.0, time.time() - job.seen_active) if job.seen_active else 0.0


def account(jobs: Jobs, job: Job, active: bool) -> Job:
    """Adds the time since the last look to the job's, if the slice was ACTIVE then."""
    seconds = unaccounted(job)
    return jobs.change(
        job.name,
        active_seconds=job.active_seconds + seconds,
        spent=job.spent + seconds / 3600 * job.per_hour,
        seen_active=time.time() if active else 0.0,
    )


def reached(job: Job) -> str | None:
    """Which limit a job has come to, if it has."""
    seconds = unaccounted(job)
    hours, spent = (job.active_seconds + seconds) / 3600, job.spent + seconds / 3600 * job.per_hour
    if job.max_hours and hours >= job.max_hours:
        return f"--max-hours={job.max_hours:g} is reached: {job.name} had a slice for {hours:,.1f} hours"
    if job.max_cost and spent >= job.max_cost:
        return f"--max-cost={job.max_cost:g} is reached: {job.name} has cost about {dollars(spent)}"
    return None
