"""Every gcloud command that launch gives, and nothing else that touches the cloud."""

import json
import re
import shlex
import subprocess
from dataclasses import dataclass

from block_recurrent.errors import UserError
from launch.jobs import Job

ACTIVE = "ACTIVE"
GONE = "NOT_FOUND"
LOST = ("SUSPENDED", "FAILED", GONE)  # any other state is waited for: in SUSPENDING, a run may still be saving
OWNER = "block-recurrent-owner"
ANSWER = 900.0  # seconds: a machine that is taken away in the middle of an ssh may never answer


class CloudError(UserError):
    """A gcloud command that failed."""


@dataclass(frozen=True)
class Resource:
    """A queued resource as gcloud describes it."""

    state: str
    owner: str = ""
    reason: str = ""


@dataclass
class Cloud:
    """gcloud, or with `dry` a printer of the commands it would be given."""

    gcloud: str = "gcloud"
    dry: bool = False

    def call(
        self, *arguments: str, what: str, show: bool = False, input: str | None = None, answer: float | None = None
    ) -> str:
        """Runs a gcloud command and gives its standard output; a failure is told in one line."""
        command = [self.gcloud, *arguments]
        if self.dry:
            print(shlex.join(command))
            return ""
        answer = answer or ANSWER
        feed = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
        try:
            done = subprocess.run(
                command,
                text=True,
                stdout=None if show else subprocess.PIPE,
                stderr=subprocess.PIPE,
                timeout=None if show else answer,
                **feed,
            )
        except subprocess.TimeoutExpired:
            raise CloudError(f"{what} failed: no answer in {answer:.0f} s") from None
        except FileNotFoundError:
            raise UserError(f"no program {self.gcloud}: install the Google Cloud SDK, or give --gcloud=PATH") from None
        if done.returncode:
            raise CloudError(f"{what} failed (exit code {done.returncode}): {telling(done.stdout, done.stderr)}")
        return done.stdout or ""

    def create(self, job: Job) -> None:
        tpus, name = job.tpus, job.next_resource
        several = [f"--node-count={tpus.slices}", f"--node-prefix={name}"]
        self.call(
            *("compute", "tpus", "queued-resources", "create", name),
            *place(job),
            *([f"--node-id={name}"] if tpus.slices == 1 else several),
            f"--accelerator-type={tpus.accelerator_type}",
            f"--runtime-version={tpus.runtime_version}",
            f"--labels=block-recurrent-job={job.name},{OWNER}={job.owner}",
            *(["--spot"] if job.spot else []),
            *job.create_flags,
            what=f"creating {name}",
        )

    def describe(self, job: Job, name: str) -> Resource:
        """What the cloud says of a queued resource; its state is NOT_FOUND where there is none of the name."""
        try:
            text = self.call(
                *("compute", "tpus", "queued-resources", "describe", name),
                *place(job),
                "--format=json",
                what=f"describing {name}",
            )
        except CloudError as error:
            if re.search(r"NOT_FOUND|was not found", str(error)):
                return Resource(GONE)
            raise
        if self.dry:
            return Resource(ACTIVE, job.owner)
        told = json.loads(text)
        nodes = told.get("tpu", {}).get("nodeSpec", [])
        owners = {node.get("node", {}).get("labels", {}).get(OWNER, "") for node in nodes}
        state = told.get("state", {})
        reason = (state.get("failedData") or {}).get("error", {}).get("message", "")
        return Resource(state.get("state", "UNKNOWN"), owners.pop() if len(owners) == 1 else "", reason)

    def delete(self, job: Job, name: str) -> bool:
        """Deletes a queued resource of this job, if it is still there.

        One that is not its own is refused, whatever the job's file says.
        """
        found = self.describe(job, name)
        if found.state == GONE:
            return False
        if found.owner != job.owner or name not in job.created:
            raise UserError(f"{name} was not created by job {job.name} (its labels say so): it is not deleted")
        self.call(
            *("compute", "tpus", "queued-resources", "delete", name), *place(job), "--force", what=f"deleting {name}"
        )
        return True

    def ssh(
        self,
        job: Job,
        command: str,
        node: str = "all",
        worker: str = "all",
        show: bool = False,
        answer: float | None = None,
    ) -> str:
        """Runs a command on workers. Of the two ssh commands, only this one reaches all slices and all their hosts."""
        return self.call(
            *("compute", "tpus", "queued-resources", "ssh", job.resource),
            *place(job),
            *(f"--node={node}", f"--worker={worker}", "--batch-size=all"),
            *job.ssh_flags,
            f"--command={command}",
            what=f"ssh to {job.resource}",
            show=show,
            answer=answer,
        )

    def list_bucket(self, pattern: str) -> list[str]:
        """The objects in a bucket that match a pattern, if there are any."""
        try:
            return self.call("storage", "ls", pattern, what=f"listing {pattern}").splitlines()
        except CloudError as error:
            if re.search(r"matched no objects|NOT_FOUND|not found", str(error)):
                return []
            raise


def place(job: Job) -> list[str]:
    return [f"--zone={job.zone}", f"--project={job.project}", "--quiet"]


def telling(output: str | None, errors: str | None) -> str:
    """The line of a failed command's output that tells most: an error, or the last."""
    lines = [line.strip() for text in (output, errors) for line in (text or "").splitlines() if line.strip()]
    if not lines:
        return "it said nothing"
    return next((line for line in lines if re.search(r"\berror\b|refused", line, re.IGNORECASE)), lines[-1])
