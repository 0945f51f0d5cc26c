"""The code of a run is a git commit that the workers can fetch."""

import io
import re
import subprocess
import tarfile
from pathlib import Path

from block_recurrent.errors import UserError


def git(*arguments: str, folder: Path | None = None) -> str:
    """The output of a git command; what git says of a failure is a UserError."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise UserError("no program git: install it") from None
    if done.returncode:
        raise UserError(f"git {arguments[0]}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    return done.stdout.rstrip()


def resolve(commit: str, folder: Path | None = None) -> str:
    git("rev-parse", "--git-dir", folder=folder)  # outside of a repository git says so
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}", folder=folder)
    except UserError:
        raise UserError(f"no commit {commit} in this repository: see git log, or git fetch it") from None


def remote(folder: Path | None = None) -> str:
    try:
        return git("remote", "get-url", "origin", folder=folder)
    except UserError:
        raise UserError("this repository has no remote called origin: give --repository=URL") from None


def is_local(url: str) -> bool:
    """Whether a repository's address is a path of this machine: no scheme but file://, and no HOST: before a slash."""
    return url.lower().startswith("file:") or not re.match(r"[a-z][a-z0-9+.-]*://|[^/]+:", url, re.IGNORECASE)


def export(commit: str, folder: Path) -> None:
    """Writes a commit's files to a folder."""
    try:
        packed = subprocess.run(["git", "archive", "--format=tar", commit], capture_output=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise UserError(f"git archive: {error.stderr.decode(errors='replace').strip()}") from None
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def check_published(commit: str, folder: Path | None = None) -> None:
    """Refuses what the workers would not get: changes that are not committed, and commits that are not pushed."""
    changed = git("status", "--porcelain", folder=folder).splitlines()
    if changed:
        raise UserError(
            f"{len(changed)} files are not committed (first: {changed[0][3:]}): workers run the commit; "
            "commit and push, or run it as it is with --allow-dirty"
        )
    if not git("branch", "--remotes", "--contains", commit, folder=folder):
        raise UserError(
            f"commit {commit[:12]} is on no remote branch known here: push it (or git fetch), or give --allow-dirty"
        )
