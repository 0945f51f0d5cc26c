"""A job's life in single steps: create, start, look, stop, delete. `launch/watching.py` strings them together."""

import re
import shlex
import time
from dataclasses import dataclass

from block_recurrent.errors import UserError
from launch.budget import account
from launch.cloud import ACTIVE, GONE, LOST, Cloud, CloudError
from launch.jobs import Job, Jobs

DIED = 137  # what a shell says of a process that was killed; here: a run that left no exit code


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def create(jobs: Jobs, cloud: Cloud, job: Job) -> Job:
    """Asks for the job's slices. The name is written down first: a crash in between leaves nothing unknown."""
    name = job.next_resource
    created = jobs.change(job.name, created=[*job.created, name], attempts=job.attempts + 1, started=False)
    try:
        cloud.create(job)
    except CloudError as refused:
        try:
            owner = cloud.describe(job, name).owner
        except CloudError:
            raise refused from None  # not known, so it stays written down
        if owner != job.owner:  # nothing was made, or the name was someone else's
            jobs.change(job.name, created=job.created)
        raise
    if not cloud.dry:
        say(f"{name} was asked for: {job.slice}{', spot' if job.spot else ''}, in {job.zone}")
    return created


def wait_until_active(jobs: Jobs, cloud: Cloud, job: Job, interval: float) -> None:
    last = ""
    while True:
        found = cloud.describe(job, job.resource)
        if cloud.dry:
            return
        if found.state != last:
            say(f"{job.resource} is {found.state}")
        if found.state == ACTIVE:
            account(jobs, jobs.load(job.name), active=True)
            return
        if found.state in LOST:
            why = f" ({found.reason})" if found.reason else ""
            raise UserError(
                f"{job.resource} is {found.state}{why}: python -m launch down {job.name} clears it away, "
                "then try up again, elsewhere or without --spot"
            )
        last = found.state
        time.sleep(interval)


def release(jobs: Jobs, cloud: Cloud, job: Job) -> Job:
    """Deletes every queued resource that this job created and that is still there; nothing else."""
    for name in job.created:
        there = cloud.delete(job, name)
        left = [other for other in jobs.load(job.name).created if other != name]
        job = jobs.change(job.name, created=left, started=False)
        if not cloud.dry:
            say(f"{name} is deleted" if there else f"{name} was gone already")
    return account(jobs, jobs.load(job.name), active=False)


def start(jobs: Jobs, cloud: Cloud, job: Job, verb: str = "start") -> Job:
    """Starts the job's command on all workers, from its commit; with `restart`, whatever is left of it there."""
    told = cloud.ssh(job, start_command(job, verb))
    for line in re.findall(r"^worker=.*$", told, re.MULTILINE):
        say(line)
    # A stop that came while `watch` was starting the run still stands.
    return jobs.change(job.name, started=True, **({"stopped": False} if verb == "start" else {}))


def start_command(job: Job, verb: str) -> str:
    """Fetches the commit, in a folder of its own that is never changed again, and runs its worker.sh."""
    code = f'"$HOME"/block_recurrent/{job.commit}'
    clone = (
        f"rm -rf {code}.partial && git clone --quiet {shlex.quote(job.repository)} {code}.partial"
        f" && git -C {code}.partial checkout --quiet --detach {job.commit} && mv {code}.partial {code}"
    )
    return f"{{ test -d {code} || {{ {clone}; }}; }} && {worker(job, verb, job.name, job.workdir, *job.arguments)}"


def worker(job: Job, *arguments: str) -> str:
    return f'bash "$HOME"/block_recurrent/{job.commit}/launch/worker.sh {shlex.join(arguments)}'


@dataclass(frozen=True)
class Progress:
    """What a run wrote last of itself: its state, its step of so many, and how many seconds ago."""

    state: str
    step: int
    steps: int
    age: int

    def __str__(self) -> str:
        if not self.steps:
            return self.state
        return f"{self.state}, step {self.step:,} of {self.steps:,}"


@dataclass(frozen=True)
class Worker:
    """What a worker says of its run: exited with a code, or not yet; its last checkpoint, and its progress if it has a
    file of it."""

    host: str
    code: int | None
    step: int
    progress: Progress | None = None


STATUS = re.compile(
    r"^worker=(?P<host>\S+) state=(?P<state>running|exited code=(?P<code>\d+)|died|none) step=(?P<step>\d+)"
    r"(?: doing=(?P<doing>\w+) at=(?P<at>\d+) of=(?P<of>\d+) age=(?P<age>\d+))?$",
    re.MULTILINE,
)


def look(cloud: Cloud, job: Job, answer: float | None = None) -> list[Worker]:
    """Asks all workers; those that cannot be reached are missing in the answer."""
    try:
        told = cloud.ssh(job, worker(job, "status", job.name, job.workdir), answer=answer)
    except CloudError as error:
        say(str(error))
        return []
    return [parse_status(line) for line in STATUS.finditer(told)]


def parse_status(line: re.Match) -> Worker:
    """A worker of its line; commits from before there was progress have lines without it."""
    code = int(line["code"]) if line["code"] else {"running": None, "died": DIED, "none": DIED}[line["state"]]
    numbers = [int(line[name]) for name in ("at", "of", "age")] if line["doing"] else []
    return Worker(line["host"], code, int(line["step"]), Progress(line["doing"], *numbers) if numbers else None)


def newest_progress(workers: list[Worker]) -> Progress | None:
    """The progress that was written last: that of process 0, once it has begun."""
    return min((each.progress for each in workers if each.progress), key=lambda each: each.age, default=None)


def highest_step(cloud: Cloud, job: Job, workers: list[Worker]) -> int:
    """How far the run's checkpoints are; those in a bucket are listed from here."""
    if job.workdir.startswith("gs://"):
        # In a bucket, where nothing can be renamed, Orbax writes this file into a checkpoint that is complete.
        names = cloud.list_bucket(f"{job.workdir.rstrip('/')}/checkpoints/*/commit_success.txt")
        steps = [re.search(r"/(\d+)/commit_success\.txt$", name) for name in names]
        return max((int(step[1]) for step in steps if step), default=0)
    return max((worker.step for worker in workers), default=0)


def tails(cloud: Cloud, job: Job, lines: int = 20) -> str:
    """The end of every worker's log, worker by worker."""
    told = cloud.ssh(job, worker(job, "tail", job.name, str(lines))).splitlines()
    return "\n".join(sorted(told, key=lambda line: line.partition(": ")[0]))


def stop(jobs: Jobs, cloud: Cloud, job: Job) -> None:
    """Tells the run to save and exit; `watch` leaves it alone then."""
    jobs.change(job.name, stopped=True)
    if not cloud.dry:
        state = cloud.describe(job, job.resource).state if job.created else GONE
        if state != ACTIVE or not job.started:
            say(f"nothing runs: {job.resource} is {state}")
            return
    for line in cloud.ssh(job, worker(job, "stop", job.name)).splitlines():
        say(line)


def require_active(cloud: Cloud, job: Job) -> None:
    if not job.created and not (cloud.dry and not job.attempts):  # a rehearsal may begin with any command
        raise UserError(f"job {job.name} has no slice yet: python -m launch up {job.name}")
    state = cloud.describe(job, job.resource).state
    if state != ACTIVE:
        hint = f"down {job.name} clears it away, then up" if state in LOST else f"up {job.name} waits for it"
        raise UserError(f"{job.resource} is {'gone' if state == GONE else state}: python -m launch {hint}")
