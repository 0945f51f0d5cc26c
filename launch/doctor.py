"""What can be known before anything is created: one line a check, with what to do about it."""

import json
import math
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
from launch.cloud import Cloud, CloudError
from launch.jobs import Job

LOCAL = ("ssh", "code", "versions")
ROOT = Path(__file__).parents[1]
QUOTA_COMMANDS = (("beta", "quotas"), ("quotas",))  # SDK 528 has the first; the second is what it may become
NO_SUCH_COMMAND = r"Invalid choice|installation of components|could not be answered|component manager"


class NotChecked(Exception):
    """Something that cannot be known here; doctor says so and goes on."""


def checks(cloud: Cloud, job: Job) -> list[tuple[str, Callable[[], str], str]]:
    """Name, check and remedy. A check gives what it found, or raises UserError or NotChecked."""
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
        limits = limits_of(json.loads(listed_quotas(cloud, project) or "[]"), job)
        needed = f"{job.slice}{' --spot' if job.spot else ''} needs {units_of(job)}"
        if not limits:
            wrong(f"{needed}, and no quota for it in {job.zone} is listed")
        name, limit = min(limits.items(), key=lambda each: each[1])
        found = f"{name} is {'unlimited' if limit == math.inf else limit} in {job.zone}, {needed}"
        return found if limit >= units_of(job) else wrong(found)

    def bucket() -> str:
        if job.shared_disk and job.workdir.startswith("/"):
            raise NotChecked(f"{job.workdir} is on a disk that workers share")
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
        if repository.is_local(url) and not job.shared_disk:
            wrong(f"workers cannot clone {url}, a path of this machine")
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
        ("quota", quota, "ask for more on the console's quota page; gcloud services enable cloudquotas.googleapis.com"),
        ("bucket", bucket, "gcloud storage buckets create, and give --workdir=gs://BUCKET/FOLDER"),
        ("ssh", ssh, "gcloud compute config-ssh; eval $(ssh-agent); ssh-add ~/.ssh/google_compute_engine"),
        ("code", code, "commit and push; --repository=URL for another server"),
        ("versions", versions, "use Python 3.11 here too"),
    ]


def listed_quotas(cloud: Cloud, project: str) -> str:
    """Google's list of quotas, by whichever of its commands this gcloud has."""
    for command in QUOTA_COMMANDS:
        try:
            return cloud.call(
                *(*command, "info", "list", "--service=tpu.googleapis.com", project, "--format=json"),
                what="reading quotas",
            )
        except CloudError as error:
            if not re.search(NO_SUCH_COMMAND, str(error)):
                raise
    raise NotChecked("this gcloud has no `gcloud beta quotas`: gcloud components install beta, or see the console")


def requirements() -> str:
    return "\n".join((ROOT / file).read_text() for file in ("requirements.txt", "requirements-tpu.txt"))


# How Google's names of quotas go on after "TPU".
QUOTAS = {"v4": "v4", "v5e": "v5slitepod", "v5p": "v5p", "v6e": "v6e"}


def units_of(job: Job) -> int:
    """What a job takes of its quota: the number in the slice's name, cores of v4 and v5p and chips of the others."""
    return int(job.tpus.accelerator_type.rpartition("-")[2]) * job.tpus.slices


def limits_of(quotas: list[dict], job: Job) -> dict[str, float]:
    """The limits that a job's slices come under, by the quotas' names: of their kind, in their zone or its region.

    Machines on demand and spot have quotas of their own, and so have v5e slices of one host, where they are "serving".
    """
    named = {quota["quotaId"].lower(): quota for quota in quotas}
    ours = [name for name in named if name.replace("preemptible", "").startswith(f"tpu{QUOTAS[job.tpus.generation]}")]
    ours = [name for name in ours if ("preemptible" in name) == job.spot and "reserved" not in name]
    serving = [name for name in ours if "serving" in name]
    ours = serving if serving and job.tpus.hosts == 1 else [name for name in ours if name not in serving]
    limits = {}
    for quota in (named[name] for name in ours):
        for each in quota.get("dimensionsInfos", []):
            places = {*each.get("dimensions", {}).values(), *each.get("applicableLocations", [])}
            if places & {job.zone, job.zone.rpartition("-")[0]}:
                value = int(each.get("details", {}).get("value", 0))
                limits[quota["quotaId"]] = math.inf if value < 0 else value
    return limits


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
        except NotChecked as error:
            print(f"-       {name} not checked: {error}")
        except UserError as error:
            well = False
            print(f"FAILED  {name}: {error}. Do: {remedy}")
    return well
