"""One process owns a run's folder: a second training there is refused, in one line that names the first.

On a local disk the owner holds a lock that the kernel drops with the process, however it ends: after `kill -9` the same
command goes on at once. A bucket has no locks. There a file tells the owner, when it was last alive, and the launch it
belongs to: the same launch goes on at once, anybody else once the owner was silent for ten minutes.
"""

import errno
import fcntl
import json
import os
import secrets
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from etils import epath

from block_recurrent.data import files
from block_recurrent.errors import UserError

OWNER = "owner.json"
LAUNCH = "BLOCK_RECURRENT_OWNER"  # names the launch that restarts this run: a job's or a JobSet's name
DYING = 10.0  # seconds that a killed process may take to go
SAVING = 180.0  # seconds that a process that was told to stop, or one of the same launch, may take
SILENT = 600.0  # seconds after which an owner in a bucket is taken for dead
ALIVE = 60.0  # seconds between its signs of life
SETTLING = 1.0  # seconds after which two that begin at once see the file of the later one
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def launch_of(environment: dict[str, str]) -> str:
    """Returns what names the launch of this process, the same after each of its restarts; empty for a person's own."""
    slurm = environment.get("SLURM_JOB_ID")
    return environment.get(LAUNCH) or (f"Slurm job {slurm}" if slurm else "")


def own(workdir: epath.Path, take_over: bool = False) -> "LockedOwner | WrittenOwner":
    """Makes this process the owner of a run's folder until `release`; a UserError where another is."""
    if files.is_remote(workdir):
        return WrittenOwner(workdir, take_over)
    try:
        return LockedOwner(workdir, take_over)
    except OSError as error:  # a network's file system without locks
        if error.errno not in NO_LOCKS:
            raise
        return WrittenOwner(workdir, take_over)


def description() -> dict[str, Any]:
    """What this process says of itself in the owner's file."""
    return {
        "id": secrets.token_hex(8),
        "process": os.getpid(),
        "host": socket.gethostname(),
        "launch": launch_of(dict(os.environ)),
        "since": time.time(),
    }


def told(workdir: epath.Path, owner: dict[str, Any]) -> str:
    """Returns who owns a folder, for a person."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(owner["since"]))
    launch = f", of {owner['launch']}," if owner["launch"] else ""
    return f"{workdir} belongs to process {owner['process']} on {owner['host']}{launch} since {since}"


def read_owner(file: epath.Path) -> dict[str, Any] | None:
    """Returns what the owner's file says; None where it says nothing that is whole."""
    try:
        owner = json.loads(file.read_bytes())
        kinds = {"id": str, "process": int, "host": str, "launch": str, "since": int | float}
        return owner if all(isinstance(owner[name], kind) for name, kind in kinds.items()) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


class LockedOwner:
    """The owner of a folder on a disk: it holds a lock on the file that tells of it."""

    def __init__(self, workdir: epath.Path, take_over: bool):
        self.workdir, self.file = workdir, workdir / OWNER
        self.created = not workdir.exists()
        self.me = description()
        until, asked = time.monotonic() + DYING, False
        while not self._lock():
            owner = read_owner(self.file)
            if owner and owner["launch"] and owner["launch"] == self.me["launch"] and not asked:
                until, asked = time.monotonic() + SAVING, True  # on its way out, to be followed by this one
            if owner and take_over and not asked:
                until, asked = time.monotonic() + SAVING, True
                self._end(owner)
            if time.monotonic() > until:
                who = told(workdir, owner) if owner else f"{workdir} belongs to another process"
                advice = "it does not end" if take_over else "stop it, or give --take_over, which does"
                raise UserError(f"{who}, which trains there: {advice}; or choose another --workdir")
            time.sleep(0.1)
        os.truncate(self.descriptor, 0)
        os.write(self.descriptor, json.dumps(self.me).encode())

    def _lock(self) -> bool:
        """Takes the lock, of the file that has the name now: an owner that leaves removes its own."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_same_file(descriptor, self.file):
                self.descriptor = descriptor
                return True
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return False

    def _end(self, owner: dict[str, Any]) -> None:
        """Tells the owner to save and stop, as SIGTERM does."""
        if owner["host"] != self.me["host"]:
            raise UserError(f"{told(self.workdir, owner)}: --take_over ends processes of this machine only")
        print(f"{told(self.workdir, owner)}: it is told to save and stop", flush=True)
        try:
            os.kill(owner["process"], signal.SIGTERM)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise UserError(f"{told(self.workdir, owner)}, and is another user's: ask them to stop it") from error

    def require(self) -> None:
        """Raises a UserError where the folder is no longer this process's: nothing of it may be written over."""
        if not is_same_file(self.descriptor, self.file):
            raise UserError(
                f"{self.workdir} was removed or taken over while this process trained: nothing more is saved"
            )

    def release(self) -> None:
        if is_same_file(self.descriptor, self.file):
            self.file.unlink()
        os.close(self.descriptor)
        if self.created and not any(self.workdir.iterdir()):
            self.workdir.rmdir()


def is_same_file(descriptor: int, file: epath.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(Path(file)))
    except FileNotFoundError:
        return False


class WrittenOwner:
    """The owner of a folder in a bucket: a file tells of it, and a thread of its being alive."""

    def __init__(self, workdir: epath.Path, take_over: bool):
        self.workdir, self.file, self.me = workdir, workdir / OWNER, description()
        owner = read_owner(self.file)
        if owner and not take_over and not (owner["launch"] and owner["launch"] == self.me["launch"]):
            silent = time.time() - seen(owner)
            if silent < SILENT:
                raise UserError(
                    f"{told(workdir, owner)}, and was alive {max(silent, 0):.0f} s ago: stop it; if it is gone, "
                    f"give --take_over, or wait for {SILENT - silent:.0f} s; or choose another --workdir"
                )
            print(f"{told(workdir, owner)}, and is silent for {silent:.0f} s: taken for dead", flush=True)
        workdir.mkdir(parents=True, exist_ok=True)
        self._write()
        time.sleep(SETTLING)
        self.require()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()

    def _write(self) -> None:
        self.file.write_text(json.dumps({**self.me, "seen": time.time()}))

    def _live(self) -> None:
        while not self.ended.wait(ALIVE):
            try:
                if self._is_mine():
                    self._write()
            except Exception as error:  # a network that is away for a while
                print(f"{self.file} cannot be written: {error}", flush=True)

    def _is_mine(self) -> bool:
        owner = read_owner(self.file)
        return owner is not None and owner["id"] == self.me["id"]

    def require(self) -> None:
        """Raises a UserError where the folder is no longer this process's: nothing of it may be written over."""
        owner = read_owner(self.file)
        if owner is not None and owner["id"] != self.me["id"]:
            raise UserError(f"{told(self.workdir, owner)}, which took it over: nothing more is saved here")

    def release(self) -> None:
        self.ended.set()
        self.thread.join()
        if self._is_mine():
            self.file.unlink()


def seen(owner: dict[str, Any]) -> float:
    """When an owner was last alive, in seconds since the epoch."""
    return owner["seen"] if isinstance(owner.get("seen"), int | float) else owner["since"]
