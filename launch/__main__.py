"""Trains on Cloud TPU slices: books them, runs a commit there, and sees the run through preemptions.

python -m launch doctor mine --slice=v5litepod-16 --zone=ZONE --project=PROJECT --workdir=gs://BUCKET/mine
python -m launch up mine --slice=v5litepod-16 --zone=ZONE --project=PROJECT --spot
python -m launch run mine --workdir=gs://BUCKET/mine -- --gin_file=configs/pg19/rec_fixed_skip.gin
python -m launch watch mine
python -m launch logs mine --follow
python -m launch stop mine
python -m launch down mine
python -m launch sweep mine --sweep='train.seed=0,1,2' --workdir=... -- --gin_file=...
python -m launch jobset mine --slice=... --workdir=... -- --gin_file=...

What follows -- are arguments of block_recurrent.train. What a job was given once is remembered; --dry-run prints the
exact commands and does nothing. A booking says what it costs and asks; --max-hours and --max-cost end it.
"""

import argparse
import os
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from block_recurrent.commandline import Parser
from block_recurrent.errors import UserError, run_command
from block_recurrent.ranges import POSITIVE, RATE, WHOLE_0, WHOLE_1
from launch import repository, sweep
from launch.budget import REACHED, ask, priced
from launch.checking import check_runs
from launch.cloud import Cloud
from launch.doctor import doctor
from launch.jobs import FOLDER, HAPPENED, DryJobs, Job, Jobs, fresh, merged, require
from launch.jobset import render
from launch.running import (
    create,
    release,
    require_active,
    start,
    start_command,
    stop,
    tails,
    wait_until_active,
    worker,
)
from launch.watching import Pace, Watch

ABOUT = {
    "up": "book the slices and wait until they are there",
    "run": "start training on all workers, detached",
    "watch": "see the run through: replace slices that are taken away, resume, try failures again",
    "logs": "show what a worker has written",
    "stop": "tell the run to save and exit",
    "down": "delete what `up` has created, and nothing else",
    "doctor": "check gcloud, quota, bucket, ssh and versions before anything is created",
    "sweep": "expand a sweep over gin values into jobs",
    "jobset": "print the job as a JobSet for GKE",
}
PAID = ("up", "run", "watch", "sweep")  # commands that know of prices and limits


def parser() -> Parser:
    formatter = argparse.RawDescriptionHelpFormatter
    top = Parser("python -m launch", description=__doc__, formatter_class=formatter)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, about in ABOUT.items():
        one = commands.add_parser(command, help=about, description=about)
        one.add_argument("name", help="the job's name: small letters, digits, hyphens")
        one.add_argument("--slice", help="v5litepod-16, v4-32, 2xv5p-128, ...: block_recurrent/slices.py has them")
        one.add_argument("--zone")
        one.add_argument("--project")
        one.add_argument("--spot", action=argparse.BooleanOptionalAction, help="cheaper, and taken away at any time")
        one.add_argument(
            "--create-flag", action="append", dest="create_flags", help="one more flag for gcloud's create"
        )
        one.add_argument("--ssh-flag", action="append", dest="ssh_flags", help="one more flag for gcloud's ssh")
        one.add_argument("--workdir", help="the run's folder: gs://..., or a path and --shared-disk")
        one.add_argument("--repository", help="what workers clone; the remote origin by default")
        one.add_argument("--commit", help="what they check out; HEAD by default")
        one.add_argument(
            "--shared-disk",
            action=argparse.BooleanOptionalAction,
            help="workers see this machine's paths: workdir, repository and data may be such",
        )
        one.add_argument("--state", type=Path, default=FOLDER, help="the folder of job files (%(default)s)")
        one.add_argument("--gcloud", default="gcloud", help="the program")
        one.add_argument("--dry-run", action="store_true", help="print the exact commands and do nothing")
        one.add_argument("--debug", action="store_true", help="show the traceback of an error")
        add_flags_of(command, one)
    return top


def add_flags_of(command: str, one: argparse.ArgumentParser) -> None:
    """The flags that not all commands have."""
    if command in PAID:
        one.add_argument("--max-hours", type=POSITIVE, help="watch deletes the slices after so many, ACTIVE in all")
        one.add_argument("--max-cost", type=POSITIVE, help="the same, after so many dollars by the file of prices")
        one.add_argument("--prices", type=os.path.abspath, help="a file like block_recurrent/prices.toml")
    if command in ("up", "sweep"):
        one.add_argument("--yes", action="store_true", help="book without being asked")
    if command in ("up", "run", "sweep", "jobset"):
        one.add_argument("--unchecked", action="store_true", help="without parsing the config and planning it")
    if command in ("up", "watch", "sweep"):
        one.add_argument("--interval", type=POSITIVE, default=30.0, help="seconds between looks (%(default)s)")
    if command in ("watch", "sweep"):
        one.add_argument("--grace", type=RATE, default=180.0, help="seconds for workers to follow one that ended")
        one.add_argument("--patience", type=WHOLE_1, default=10, help="looks without an answer before a slice is lost")
        one.add_argument(
            "--stall", type=POSITIVE, default=30.0, help="minutes without a sign of a run before it is killed"
        )
    if command == "watch":
        one.add_argument("--down", action="store_true", help="delete the slices when the run is done")
    if command in ("run", "sweep", "jobset"):
        one.add_argument("--allow-dirty", action="store_true", help="run the commit though there are later changes")
    if command == "logs":
        one.add_argument("--worker", default="0", help="its number, counted over all slices, or all (%(default)s)")
        one.add_argument("--lines", type=WHOLE_0, default=100)
        one.add_argument("--follow", action="store_true")
    if command == "sweep":
        one.add_argument("--sweep", action="append", default=[], metavar="NAME=VALUE,VALUE", dest="sweeps")
        one.add_argument("--now", action="store_true", help="run them one after another on one booking")
    if command == "jobset":
        one.add_argument("--image", default="python:3.11", help="with git, curl and bash (%(default)s)")


def main(arguments: list[str]) -> None:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options, training = parser().parse_args(arguments[:at]), arguments[at + 1 :]
    jobs, cloud = (DryJobs if options.dry_run else Jobs)(options.state), Cloud(options.gcloud, options.dry_run)
    known = jobs.find(options.name)
    if options.command in ("watch", "logs", "stop", "down") and not (known or options.dry_run):
        jobs.load(options.name)  # tells which there are
    job = merged(known, options.name, {**vars(options), "arguments": training or None})
    booked = ("slice", "zone", "project", "spot")
    if known and known.created and any(getattr(known, each) != getattr(job, each) for each in booked):
        raise UserError(
            f"{job.name} has {known.slice} in {known.zone} of {known.project}: python -m launch down {job.name}"
            f"{' --dry-run' if cloud.dry else ''} first, or choose another name"
        )
    if job.slice:
        _ = job.tpus  # a name that is no TPU slice is told before anything is written
    if job.slice and options.command in PAID:
        job = priced(job)
    code = globals()[f"command_{options.command}"](jobs, cloud, job, options)
    if code:
        sys.exit(code)


def command_up(jobs: Jobs, cloud: Cloud, job: Job, options: argparse.Namespace) -> None:
    require(job, "slice", "zone", "project")
    if not job.created:
        if job.arguments:
            checked(options, [replace(job, commit=repository.resolve(job.commit or "HEAD"))])
        ask(job, options.yes, cloud.dry)
        remember(jobs, job)
        job = create(jobs, cloud, jobs.change(job.name, stopped=False))
    wait_until_active(jobs, cloud, job, options.interval)


def command_run(jobs: Jobs, cloud: Cloud, job: Job, options: argparse.Namespace) -> None:
    require(job, "slice", "zone", "project", "workdir")
    job = with_code(job, options)
    require_active(cloud, job)
    checked(options, [job])
    start(jobs, cloud, remember(jobs, job))


def command_watch(jobs: Jobs, cloud: Cloud, job: Job, options: argparse.Namespace) -> int:
    require(job, "slice", "zone", "project", "workdir")
    require_run(job)
    if cloud.dry:
        rehearse_watch(cloud, job, options)
        return 0
    limits = ("max_hours", "max_cost", "prices", "per_hour")
    jobs.change(job.name, **{name: getattr(job, name) for name in limits})
    code = Watch(jobs, cloud, job.name, pace(options))()
    if code == 0 and options.down:
        release(jobs, cloud, jobs.load(job.name))
    return code


def rehearse_watch(cloud: Cloud, job: Job, options: argparse.Namespace) -> None:
    """Prints what a watch would do; which of it depends on the run, so that nothing is remembered."""
    if not job.created:
        job = replace(job, created=[job.next_resource], attempts=job.attempts + 1)

    def delete() -> None:
        for name in job.created:
            cloud.delete(job, name)

    print("# every look:")
    require_active(cloud, job)
    cloud.ssh(job, worker(job, "status", job.name, job.workdir))
    print("# when the slice was taken away:")
    delete()
    cloud.create(job)
    cloud.ssh(replace(job, created=[job.next_resource]), start_command(job, "restart"))
    print(f"# when the run has not moved for {options.stall:g} minutes:")
    tails(cloud, job)
    cloud.ssh(job, worker(job, "kill", job.name))
    cloud.ssh(job, start_command(job, "restart"))
    if job.max_hours or job.max_cost:
        print("# at its limit:")
        cloud.ssh(job, worker(job, "stop", job.name))
        delete()
    if options.down:
        print("# when the run is done:")
        delete()


def command_logs(jobs: Jobs, cloud: Cloud, job: Job, options: argparse.Namespace) -> None:
    require_run(job)
    if options.worker == "all":
        if options.follow:
            raise UserError("one log can be followed at a time: give --worker=NUMBER")
        told = tails(cloud, job, options.lines)
        print(told, end="\n" if told else "")
        return
    if not options.worker.isdecimal() or int(options.worker) >= job.tpus.hosts * job.tpus.slices:
        raise UserError(
            f"--worker={options.worker}: {job.slice} has 0 to {job.tpus.hosts * job.tpus.slices - 1}, or all"
        )
    node, number = divmod(int(options.worker), job.tpus.hosts)
    verb = "follow" if options.follow else "tail"
    cloud.ssh(job, worker(job, verb, job.name, str(options.lines)), str(node), str(number), show=True)


def command_stop(jobs: Jobs, cloud: Cloud, job: Job, options: argparse.Namespace) -> None:
    require_run(job)
    stop(jobs, cloud, job)


def command_down(jobs: Jobs, cloud: Cloud, job: Job, options: argparse.Namespace) -> None:
    if not job.created:
        print(f"{job.name} has created nothing that is still there")
    jobs.change(job.name, stopped=True)  # a watch would take it for a preemption, and book again
    release(jobs, cloud, job)


def command_doctor(jobs: Jobs, cloud: Cloud, job: Job, options: argparse.Namespace) -> int:
    require(job, "slice")
    return 0 if doctor(cloud, job) else 1


def command_sweep(jobs: Jobs, cloud: Cloud, job: Job, options: argparse.Namespace) -> int:
    """Writes a job file a run; with --now, one booking is handed from run to run and deleted after the last."""
    require(job, "slice", "zone", "project", "workdir")
    runs = [fresh(run) for run in sweep.expand(with_code(job, options), options.sweeps)]
    for run in runs:
        if jobs.is_taken(run.name):
            raise UserError(f"there is a job {run.name} already: choose another name for the sweep")
    checked(options, runs)
    if options.now:
        ask(job, options.yes, cloud.dry)
    for run in runs:
        print(f"{run.name}: block_recurrent.train {shlex.join([f'--workdir={run.workdir}', *run.arguments])}")
        jobs.change(run.name, **asdict(run))
    if not options.now:
        return 0
    first = create(jobs, cloud, jobs.load(runs[0].name))
    if cloud.dry:
        for run in runs:
            cloud.ssh(replace(run, created=first.created), start_command(run, "restart"))
        release(jobs, cloud, first)
        return 0
    return run_in_turn(jobs, cloud, [run.name for run in runs], pace(options))


def run_in_turn(jobs: Jobs, cloud: Cloud, names: list[str], pace: Pace) -> int:
    """Sees one run after another through on the slices of the first, and deletes them; the first exit code but 0."""
    worst, before = 0, jobs.load(names[0])
    booking = ("created", "owner", "active_seconds", "spent", "seen_active")  # the owner is what allows to delete
    for name in names:
        if name != before.name:
            jobs.change(name, **{each: getattr(before, each) for each in booking})
            jobs.change(before.name, created=[], started=False, seen_active=0.0)
        code = Watch(jobs, cloud, name, pace)()
        print(f"{name}: exit code {code}")
        before, worst = jobs.load(name), code if code == REACHED else worst or code
        if before.stopped:
            break
    release(jobs, cloud, before)
    return worst


def command_jobset(jobs: Jobs, cloud: Cloud, job: Job, options: argparse.Namespace) -> None:
    require(job, "slice", "workdir")
    job = with_code(job, options)
    checked(options, [job], sys.stderr)
    print(render(job, options.image), end="")


def pace(options: argparse.Namespace) -> Pace:
    return Pace(options.interval, options.grace, options.patience, options.stall)


def checked(options: argparse.Namespace, runs: list[Job], output: TextIO | None = None) -> None:
    """Refuses runs that would fail on their workers, and says what was found of the others."""
    if not options.unchecked:
        for line in check_runs(runs):
            print(f"# {line}", file=output, flush=True)


def with_code(job: Job, options: argparse.Namespace) -> Job:
    """The job with the commit and repository that workers get, checked to be something that they can run."""
    if not job.arguments:
        raise UserError("nothing to run: give the arguments of block_recurrent.train after --")
    if any(argument.startswith("--workdir") for argument in job.arguments):
        raise UserError("give --workdir before the --: launch needs it too")
    if not job.workdir.startswith(("gs://", "/") if job.shared_disk else "gs://"):
        raise UserError(
            f"--workdir={job.workdir}: workers need gs://BUCKET/FOLDER, or an absolute path of a disk that they share "
            "and --shared-disk"
        )
    commit, head = repository.resolve(job.commit or "HEAD"), repository.resolve("HEAD")
    if commit != head:
        print(f"# commit {commit[:12]}, as before; for the present one, {head[:12]}, give --commit=HEAD")
    if not options.allow_dirty:
        repository.check_published(commit)
    url = job.repository or repository.remote()
    if repository.is_local(url) and not job.shared_disk:
        raise UserError(
            f"workers cannot clone {url}, a path of this machine: push to a server and give --repository=URL, "
            "or give --shared-disk if they see it"
        )
    return replace(job, commit=commit, repository=url)


def require_run(job: Job) -> None:
    if not job.commit:
        raise UserError(f"job {job.name} was never run: python -m launch run {job.name}")


def remember(jobs: Jobs, job: Job) -> Job:
    return jobs.change(job.name, **{key: value for key, value in asdict(job).items() if key not in HAPPENED})


if __name__ == "__main__":
    run_command(main)
