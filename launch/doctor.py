"""What can be known before anything is created: one line a check, with what to do about it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from block_recurrent.errors import UserError
from launch import repository
from launch.cloud import Cloud
from launch.jobs import Job

LOCAL = ("ssh", "code", "versions")
ROOT = Path(__file__).parents[1]


def checks(cloud: Cloud, job: Job) -> list[tuple[str, Callable[[], str], str]]:
    """Name, check and remedy. A check gives what it found, or raises UserError."""
    zone, project = f"--zone={job.zone}", f"--project={job.project}"

    def gcloud() -> str:
        if shutil.which(cloud.gcloud) is None:
            raise UserError(f"{cloud.gcloud} is not on the PATH")
        return cloud.call("version", '--format=value("Google Cloud SDK")', what="gcloud version").strip()

    def account() -> str:
        found = cloud.call("auth", "list", "--filter=status:ACTIVE", "--format=value(account)", what="gcloud auth")
        return found.strip() or wrong("nobody is logged in")

    def where() -> str:
        cloud.call("projects", "describe", job.project or wrong("no --project"), what=f"project {job.project}")
        return f"{job.project}, {job.zone or wrong('no --zone')}"

    def api() -> str:
        offered = cloud.call(
            *("compute", "tpus", "accelerator-types", "list", zone, project, "--format=value(type)"),
            what="the TPU API",
        ).split()
        wanted = job.tpus.accelerator_type
        kind = wanted.rpartition("-")[0]
        near = ", ".join(name for name in offered if name.startswith(kind)) or "none of its kind"
        return wanted if wanted in offered else wrong(f"{job.zone} does not offer {wanted} ({near})")

    def quota() -> str:
        told = cloud.call(
            *("quotas", "info", "list", "--service=tpu.googleapis.com", project, "--format=value(quotaId)"),
            what="reading quotas",
        ).split()
        kind = job.tpus.accelerator_type.rpartition("-")[0]
        ours = [name for name in told if kind.lower() in name.lower()]
        return f"{len(told)} TPU quotas are readable; {', '.join(ours) or f'none is named after {kind}'}"

    def bucket() -> str:
        if not job.workdir.startswith("gs://"):
            wrong(f"{job.workdir or 'no --workdir'} is not in a bucket: a slice that is taken away takes it along")
        probe = f"{job.workdir.rstrip('/')}/.launch-doctor-{os.getpid()}"
        cloud.call("storage", "cp", "-", probe, what=f"writing to {job.workdir}", input="written by launch doctor\n")
        cloud.call("storage", "rm", probe, what=f"removing {probe}")
        return f"{job.workdir} can be written"

    def ssh() -> str:
        key = Path("~/.ssh/google_compute_engine").expanduser()
        if not key.exists():
            wrong(f"no {key}")
        try:
            held = subprocess.run(["ssh-add", "-l"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        except FileNotFoundError:
            wrong("no program ssh-add")
        return f"{key}, with an agent" if held.returncode == 0 else wrong("no key in an ssh agent")

    def code() -> str:
        url = job.repository or repository.remote()
        commit = repository.resolve(job.commit or "HEAD")
        repository.git("ls-remote", "--exit-code", url, "HEAD")
        repository.check_published(commit)
        return f"{commit[:12]} of {url}"

    def versions() -> str:
        pins = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)", requirements(), re.MULTILINE))
        if sys.version_info[:2] != (3, 11):
            wrong(f"this is Python {sys.version.split()[0]}; workers run 3.11")
        return f"Python {sys.version.split()[0]}; workers get jax {pins['jax']}, flax {pins['flax']}"

    return [
        ("gcloud", gcloud, "install the Google Cloud SDK"),
        ("login", account, "gcloud auth login"),
        ("project and zone", where, "give --project and --zone, or gcloud projects list"),
        ("TPU API", api, "gcloud services enable tpu.googleapis.com, or another --slice or --zone"),
        ("quota", quota, "gcloud services enable cloudquotas.googleapis.com; more: the console's quota page"),
        ("bucket", bucket, "gcloud storage buckets create, and give --workdir=gs://BUCKET/FOLDER"),
        ("ssh", ssh, "gcloud compute config-ssh; eval $(ssh-agent); ssh-add ~/.ssh/google_compute_engine"),
        ("code", code, "commit and push"),
        ("versions", versions, "use Python 3.11 here too"),
    ]


def requirements() -> str:
    return "\n".join((ROOT / file).read_text() for file in ("requirements.txt", "requirements-tpu.txt"))


def wrong(text: str):
    raise UserError(text)


def doctor(cloud: Cloud, job: Job) -> bool:
    """Prints a line for every check; whether all is well. Dry, it prints what it would ask gcloud."""
    well = True
    for name, check, remedy in checks(cloud, job):
        if cloud.dry:
            if name not in LOCAL:
                with suppress(UserError):
                    check()
            continue
        try:
            print(f"ok      {name}: {check()}")
        except UserError as error:
            well = False
            print(f"FAILED  {name}: {error}. Do: {remedy}")
    return well
