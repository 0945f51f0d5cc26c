"""Keeps a job running until it is done: a slice that was taken away is replaced, a run that failed is tried again."""

import time
from contextlib import suppress
from dataclasses import dataclass

from block_recurrent.errors import PREEMPTED, UserError
from launch.budget import REACHED, account, reached
from launch.cloud import ACTIVE, GONE, LOST, Cloud, CloudError
from launch.jobs import Job, Jobs
from launch.running import (
    DIED,
    Progress,
    Worker,
    create,
    highest_step,
    look,
    newest_progress,
    release,
    say,
    start,
    stop,
    tails,
    worker,
)

TRIES = 3
NEWS = 600.0  # seconds after which a run that only goes on is worth another line
LAST_WORD = 60.0  # seconds that a slice at its limit may take to answer


@dataclass(frozen=True)
class Pace:
    """Seconds between looks, seconds that workers have to follow one that has ended, looks that may go unanswered.

    A run that has not moved for `stall` minutes is taken to hang.
    """

    interval: float = 30.0
    grace: float = 180.0
    patience: int = 10
    stall: float = 30.0


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
        self.limit_since: float | None = None
        self.last_told = self.last_topic = ""
        self.last_time = 0.0

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

    def tell(self, text: str, topic: str = "") -> None:
        """Says what is new: another topic, or other words on the same one after a while."""
        topic, now = topic or text, time.monotonic()
        if topic != self.last_topic or (text != self.last_told and now - self.last_time >= NEWS):
            say(text)
            self.last_told, self.last_topic, self.last_time = text, topic, now

    def turn(self, job: Job) -> int | None:
        reason = reached(job)
        if job.stopped and not job.started and not (reason and job.created):
            return self.stopped(job)
        if reason:
            return self.end_at_limit(job, reason)
        found = self.cloud.describe(job, job.created[-1]) if job.created else None
        state = found.state if found else GONE
        job = account(self.jobs, job, active=state == ACTIVE)
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
        progress = newest_progress(workers)
        if progress is None:  # a commit from before there was any
            self.tell(f"running, last checkpoint at step {highest_step(self.cloud, job, workers):,}", "running")
        elif progress.age >= self.pace.stall * 60:
            return self.stalled(job, workers, progress)
        else:
            self.tell(str(progress), progress.state)
        return None

    def stalled(self, job: Job, workers: list[Worker], progress: Progress) -> int | None:
        """Shows the end of a run that hangs, kills it and tries again."""
        say(f"{self.name} has not moved for {progress.age // 60} minutes ({progress}); it ends with:")
        print(tails(self.cloud, job))
        self.cloud.ssh(job, worker(job, "kill", job.name))
        return self.failed(job, workers, DIED, "stalled and was killed", shown=True)

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
        return self.failed(job, workers, code, f"failed with code {code}")

    def failed(self, job: Job, workers: list[Worker], code: int, why: str, shown: bool = False) -> int | None:
        """Tries a run again, or gives it up with its exit code."""
        step = highest_step(self.cloud, job, workers)
        given_up = self.failed_again(step)
        say(f"{self.name} {why} at step {step}: {self.failures} of {TRIES} tries without progress")
        if not given_up:
            return self.begin(job)
        if not shown:
            print(tails(self.cloud, job))
        say(f"given up; {self.leave(job)}")
        return code

    def leave(self, job: Job) -> str:
        """Deletes slices that have a limit, which nobody would keep any more; says what became of them."""
        if not (job.max_hours or job.max_cost):
            return f"the slice is still there: python -m launch down {self.name}"
        release(self.jobs, self.cloud, self.jobs.load(self.name))
        return "the slice is deleted, since no watch would keep its limit"

    def end_at_limit(self, job: Job, reason: str) -> int | None:
        """Lets the run save, for as long as workers are given to end, and deletes the slice."""
        now = time.monotonic()
        first = self.limit_since is None
        self.limit_since = self.limit_since or now
        self.jobs.change(self.name, stopped=True)  # nothing is booked again
        if job.created and job.started:
            if first:
                say(f"{reason}; it is told to save, and the slice is deleted in {self.pace.grace:.0f} s at most")
                with suppress(CloudError):
                    self.cloud.ssh(job, worker(job, "stop", job.name), answer=LAST_WORD)
            state, _ = verdict(look(self.cloud, job, LAST_WORD), job.tpus.hosts * job.tpus.slices)
            if state not in ("done", "ended") and now - self.limit_since < self.pace.grace:
                return None
        release(self.jobs, self.cloud, job)
        say(f"{reason}; the slice is deleted. What was saved is in {job.workdir}")
        return REACHED

    def failed_again(self, step: int) -> bool:
        """Counts a failure, unless there was progress since the last; whether it was one too many."""
        self.failures = 0 if step > (self.best or 0) else self.failures + 1
        self.best = max(step, self.best or 0)
        return self.failures >= TRIES

    def count_failure(self, job: Job, why: str) -> None:
        """A failure of which no worker can tell."""
        if self.failed_again(highest_step(self.cloud, job, [])):
            raise UserError(f"{why}; given up after {TRIES} tries: {self.leave(job)}")

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
