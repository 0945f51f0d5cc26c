"""Keeps a job running until it is done: a slice that was taken away is replaced, a run that failed is tried again."""

import time
from dataclasses import dataclass

from block_recurrent.errors import PREEMPTED, UserError
from launch.cloud import ACTIVE, GONE, LOST, Cloud, CloudError
from launch.jobs import Job, Jobs
from launch.running import DIED, Worker, create, highest_step, look, release, say, start, stop, tails, worker

TRIES = 3


@dataclass(frozen=True)
class Pace:
    """Seconds between looks, seconds that workers have to follow one that has ended, looks that may go unanswered."""

    interval: float = 30.0
    grace: float = 180.0
    patience: int = 10


def verdict(workers: list[Worker], expected: int) -> tuple[str, int]:
    """What the workers' answers come to: missing, running, done, ending or ended, and the run's exit code.

    One worker's 42 is the run's: the others may have died of its leaving. Those that a run which is done has left
    behind are ending too.
    """
    if len(workers) < expected:
        return "missing", 0
    codes = [each.code for each in workers]
    if codes.count(None) == len(codes):
        return "running", 0
    failed = [code for code in codes if code]
    if not failed:
        return ("ending" if None in codes else "done"), 0
    return ("ending" if None in codes else "ended"), PREEMPTED if PREEMPTED in failed else failed[0]


class Watch:
    """One job's watch: `turn` looks once and acts; the run's exit code comes back when there is nothing left to do."""

    def __init__(self, jobs: Jobs, cloud: Cloud, name: str, pace: Pace):
        self.jobs, self.cloud, self.name, self.pace = jobs, cloud, name, pace
        self.failures = 0  # since the last progress
        self.best: int | None = None
        self.unanswered = 0
        self.ending_since: float | None = None
        self.last_told = ""

    def __call__(self) -> int:
        with self.jobs.watching(self.name):
            while True:
                try:
                    code = self.turn(self.jobs.load(self.name))
                except CloudError as error:  # a network that is away for a while, or an ssh key that is not there yet
                    self.tell(str(error))
                    code = None
                if code is not None:
                    return code
                time.sleep(self.pace.interval)

    def tell(self, text: str) -> None:
        if text != self.last_told:
            say(text)
        self.last_told = text

    def turn(self, job: Job) -> int | None:
        if job.stopped and not job.started:
            return self.stopped(job)
        found = self.cloud.describe(job, job.created[-1]) if job.created else None
        state = found.state if found else GONE
        if state != ACTIVE:
            self.tell(f"{job.resource} is {state}")
            if state not in LOST:
                return None
            if job.stopped:
                return self.stopped(job)
            if job.created and not job.started and state == "FAILED":
                self.count_failure(
                    job, f"{job.resource} FAILED before it was there: {found.reason or 'no reason given'}"
                )
            return self.replace(job)
        if not job.started:
            return self.begin(job)
        return self.judge(job, look(self.cloud, job))

    def judge(self, job: Job, workers: list[Worker]) -> int | None:
        state, code = verdict(workers, job.tpus.hosts * job.tpus.slices)
        self.unanswered = self.unanswered + 1 if state == "missing" else 0
        if state == "missing":
            self.tell(f"{len(workers)} of {job.tpus.hosts * job.tpus.slices} workers answer")
            if self.unanswered < self.pace.patience:
                return None
            self.unanswered = 0
            self.count_failure(job, "workers do not answer")
            return self.replace(job)
        if state in ("ending", "ended"):
            return self.ended(job, workers, state, code)
        self.ending_since = None
        if state == "done":
            say(f"{self.name} is done, at step {highest_step(self.cloud, job, workers)}")
            return 0
        if self.best is None:
            self.best = highest_step(self.cloud, job, workers)
        self.tell("running")
        return None

    def ended(self, job: Job, workers: list[Worker], state: str, code: int) -> int | None:
        now = time.monotonic()
        self.ending_since = self.ending_since or now
        if state == "ending" and now - self.ending_since < self.pace.grace:
            self.tell(f"a worker has exited with code {code}; the others are given {self.pace.grace:.0f} s")
            return None
        self.ending_since = None
        if state == "ending":
            say("workers that hang are killed")
            self.cloud.ssh(job, worker(job, "kill", job.name))
            code = code or DIED  # some were done, these were not
        if job.stopped:
            return self.stopped(job)
        if code == PREEMPTED:
            say(f"{self.name} was preempted and has saved")
            return self.replace(job)
        state = self.cloud.describe(job, job.created[-1]).state  # a machine on its way down fails before it is said
        if state != ACTIVE:
            return None  # the next turn sees to it
        step = highest_step(self.cloud, job, workers)
        given_up = self.failed_again(step)
        say(f"{self.name} failed with code {code} at step {step}: {self.failures} of {TRIES} tries without progress")
        if given_up:
            print(tails(self.cloud, job))
            say(f"given up; the slice is still there: python -m launch down {self.name}")
            return code
        return self.begin(job)

    def failed_again(self, step: int) -> bool:
        """Counts a failure, unless there was progress since the last; whether it was one too many."""
        self.failures = 0 if step > (self.best or 0) else self.failures + 1
        self.best = max(step, self.best or 0)
        return self.failures >= TRIES

    def count_failure(self, job: Job, why: str) -> None:
        """A failure of which no worker can tell."""
        if self.failed_again(highest_step(self.cloud, job, [])):
            raise UserError(f"{why}; given up after {TRIES} tries: python -m launch down {job.name} clears away")

    def replace(self, job: Job) -> int | None:
        """Deletes what this job created, and asks for it again, unless it was stopped meanwhile."""
        release(self.jobs, self.cloud, job)
        job = self.jobs.load(self.name)
        if job.stopped:
            return self.stopped(job)
        try:
            create(self.jobs, self.cloud, job)
        except CloudError as error:
            self.count_failure(job, str(error))
            raise
        return None

    def begin(self, job: Job) -> None:
        """Starts the run; a slice that has just come up may not let ssh in yet."""
        self.jobs.change(self.name, started=False)
        try:
            job = start(self.jobs, self.cloud, job, "restart")
        except CloudError:
            self.unanswered += 1
            if self.unanswered >= self.pace.patience:
                self.unanswered = 0
                self.count_failure(job, "the run cannot be started")
            raise
        self.unanswered = 0
        if job.stopped:  # while it was being started
            stop(self.jobs, self.cloud, job)

    def stopped(self, job: Job) -> int:
        say(f"{self.name} was stopped; python -m launch run {self.name} goes on, down {self.name} deletes the slice")
        return PREEMPTED
