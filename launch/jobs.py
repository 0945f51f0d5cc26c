"""What is known about a job: one small JSON file per name, so that later commands need the name alone."""

import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from block_recurrent.errors import UserError
from block_recurrent.slices import Slice, find

FOLDER = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "block_recurrent" / "launch"
HAPPENED = ("created", "attempts", "started", "stopped", "active_seconds", "spent", "seen_active")  # written as it does
DRY = "dry-run"  # a folder beside the job files


@dataclass(frozen=True)
class Job:
    """A training run, where it runs, and what was created in the cloud for it."""

    name: str
    project: str = ""
    zone: str = ""
    slice: str = ""
    spot: bool = False
    repository: str = ""
    commit: str = ""
    workdir: str = ""
    arguments: list[str] = field(default_factory=list)  # of block_recurrent.train, but for --workdir
    create_flags: list[str] = field(default_factory=list)  # more flags for gcloud, such as --network=...
    ssh_flags: list[str] = field(default_factory=list)
    owner: str = ""  # a label on all that this job creates; nothing without it is ever deleted
    created: list[str] = field(default_factory=list)  # queued resources, the present one last
    attempts: int = 0
    started: bool = False  # a run was started on the present resource
    stopped: bool = False  # by `stop`: to be left alone by `watch`
    shared_disk: bool = False  # workers see this machine's paths
    prices: str = ""  # a file of them; the user's own or the repository's where empty
    per_hour: float = 0.0  # dollars, by that file; 0 where it is not known
    max_hours: float = 0.0  # 0 is no limit
    max_cost: float = 0.0
    active_seconds: float = 0.0  # of all slices that this job has had
    spent: float = 0.0  # dollars
    seen_active: float = 0.0  # seconds since the epoch at the last look, while the slice is ACTIVE

    @property
    def resource(self) -> str:
        """The present queued resource; where there is none, the one that `up` would create."""
        return self.created[-1] if self.created else self.next_resource

    @property
    def next_resource(self) -> str:
        return f"{self.name}-{self.attempts + 1}"

    @property
    def tpus(self) -> Slice:
        found = find(self.slice)
        if found.kind != "tpu":
            raise UserError(f"{self.slice} are GPUs, which launch does not book: see launch/slurm.sh")
        return found


class Jobs:
    """The folder of job files. Every change is read, made and written under a lock: `watch` and `stop` may meet."""

    def __init__(self, folder: Path):
        self.folder = folder

    def file(self, name: str) -> Path:
        # Room is left for what is put behind the name: gcloud takes 63 letters.
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", name):
            raise UserError(f"{name!r} is no name for a job: use up to 50 small letters, digits and hyphens")
        return self.folder / f"{name}.json"

    def find(self, name: str) -> Job | None:
        file = self.file(name)
        if not file.exists():
            return None
        try:
            return Job(**json.loads(file.read_text()))
        except (ValueError, TypeError) as error:
            raise UserError(f"{file} is not a job file ({error}): mend it or remove it") from error

    def names(self) -> set[str]:
        return {file.stem for file in self.folder.glob("*.json")}

    def is_taken(self, name: str) -> bool:
        return self.find(name) is not None

    def load(self, name: str) -> Job:
        job = self.find(name)
        if job is None:
            known = sorted(self.names())
            raise UserError(f"no job {name} in {self.folder}: known are {', '.join(known) or 'none'}")
        return job

    def change(self, name: str, /, **changes) -> Job:
        """Writes changes to a job, which is made if it is new."""
        file = self.file(name)
        with locked(self.folder / ".lock"):
            job = replace(self.find(name) or Job(name, owner=secrets.token_hex(6)), **changes)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(job), indent=2) + "\n")
            partial.replace(file)
            (self.folder / DRY / file.name).unlink(missing_ok=True)  # what was rehearsed is no longer so
        return job

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Two watches of one job would each recreate what the other has."""
        with locked(self.folder / f".{name}.watch", f"{name} is being watched already, by another process"):
            yield


class DryJobs(Jobs):
    """What commands with --dry-run would have remembered: files of their own over the real ones, which stay."""

    def __init__(self, folder: Path):
        super().__init__(folder / DRY)
        self.real = Jobs(folder)

    def find(self, name: str) -> Job | None:
        return super().find(name) or self.real.find(name)

    def names(self) -> set[str]:
        return super().names() | self.real.names()

    def is_taken(self, name: str) -> bool:
        return self.real.is_taken(name)


def fresh(job: Job) -> Job:
    """The job as one to which nothing has happened yet, with a label of its own."""
    new = Job(job.name, owner=secrets.token_hex(6))
    return replace(job, owner=new.owner, **{name: getattr(new, name) for name in HAPPENED})


def merged(job: Job | None, name: str, given: dict) -> Job:
    """A job with what the command line says over what its file says."""
    known = {each.name for each in fields(Job)}
    changes = {key: value for key, value in given.items() if key in known and value is not None}
    return replace(job or Job(name, owner=secrets.token_hex(6)), **changes)


def require(job: Job, *names: str) -> None:
    missing = [f"--{name}" for name in names if not getattr(job, name)]
    if missing:
        raise UserError(f"job {job.name} has no {', '.join(missing)}: give it once, it is remembered")


@contextmanager
def locked(file: Path, busy: str = "") -> Iterator[None]:
    """Holds a lock; waits for it, or is refused where `busy` says why."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise UserError(busy) from None
        yield
