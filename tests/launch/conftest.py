"""A cloud in a folder, a repository that is pushed to a remote in another, and short waits."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from block_recurrent.errors import run_command
from launch import __main__ as launch
from tests.launch import fake_gcloud

ROOT = Path(__file__).parents[2]
PATIENCE = "--patience=600"  # what worker.sh gives every run


@dataclass
class FakeCloud:
    """What the fake gcloud knows, and the launch command in front of it."""

    folder: Path
    state: Path

    def change(self, **changes) -> None:
        file = self.folder / "cloud.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    @property
    def resources(self) -> dict:
        return json.loads((self.folder / "cloud.json").read_text())["resources"]

    def calls(self, *words: str) -> list[list[str]]:
        """The logged calls that have all of these words."""
        log = self.folder / "log.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [line for line in lines if set(words) <= set(line)]

    def launch(self, command: str, name: str, *arguments: str, yes: bool = True, checked: bool = False) -> int:
        """Runs a launch command as from a terminal and gives its exit code; it does not ask and does not plan."""
        flags = ["--yes"] if yes and command in ("up", "sweep") else []
        flags += ["--unchecked"] if not checked and command in ("up", "run", "sweep", "jobset") else []
        try:
            run_command(launch.main, [command, name, f"--state={self.state}", *flags, *arguments])
        except SystemExit as exit_code:
            return exit_code.code or 0
        return 0

    def job(self, name: str) -> dict:
        return json.loads((self.state / f"{name}.json").read_text())


@pytest.fixture
def cloud(tmp_path, monkeypatch) -> FakeCloud:
    folder, programs = tmp_path / "cloud", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    (folder / "cloud.json").write_text(json.dumps({"resources": {}, "scripts": [], "answers": {}}))
    program(programs / "gcloud", f'exec {sys.executable} -I -S {ROOT}/tests/launch/fake_gcloud.py "$@"')
    program(programs / "hostname", 'echo "${FAKE_HOST:-here}"')
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CLOUD", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    run = call_in_process(monkeypatch, folder)
    for name in ("BR_HOME", "BR_PYTHON", "BR_REQUIREMENTS"):
        monkeypatch.delenv(name, raising=False)
    begun, sleep = time.monotonic(), time.sleep

    def bounded_sleep(seconds: float) -> None:
        assert time.monotonic() < begun + 300, "it waits for ever"
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", bounded_sleep)
    yield (fake := FakeCloud(folder, tmp_path / "state"))
    for resource in fake.resources:  # ends what a test has left running
        run(["gcloud", "compute", "tpus", "queued-resources", "delete", resource, "--force"], check=True)


def call_in_process(monkeypatch, folder: Path) -> Callable:
    """Answers calls of gcloud without the program, most of which is Python's start; gives what starts it."""
    start = subprocess.run
    monkeypatch.setattr(fake_gcloud, "CLOUD", folder)

    def run(command: list[str], *, stdout=None, input: str | None = None, **more) -> subprocess.CompletedProcess:
        if command[0] != "gcloud":
            return start(command, stdout=stdout, **({} if input is None else {"input": input}), **more)
        output, errors, code = io.StringIO(), io.StringIO(), 0
        monkeypatch.setattr(sys, "stdin", io.StringIO(input or ""))
        try:
            with redirect_stderr(errors), redirect_stdout(sys.stdout if stdout is None else output):
                fake_gcloud.main(command[1:])
        except SystemExit as end:
            errors.write(f"{end.code}\n" if isinstance(end.code, str) else "")
            code = end.code if isinstance(end.code, int) else 1
        return subprocess.CompletedProcess(command, code, output.getvalue(), errors.getvalue())

    monkeypatch.setattr(subprocess, "run", run)
    return start


def program(file: Path, *lines: str) -> Path:
    file.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
    file.chmod(0o755)
    return file


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"no {file}"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> Path:
    """A clone of this tree as it is now, committed and pushed to a bare repository beside it."""
    folder = tmp_path_factory.mktemp("repository")
    clone, remote = folder / "clone", folder / "remote.git"
    ignored = shutil.ignore_patterns("__pycache__", "*.ipynb")
    for part in ("block_recurrent", "models", "configs", "launch"):
        shutil.copytree(ROOT / part, clone / part, ignore=ignored)
    (clone / "tests").mkdir()
    for file in (ROOT / "tests" / "tiny.gin", *ROOT.glob("requirements*.txt"), ROOT / ".gitignore"):
        shutil.copy(file, clone / file.relative_to(ROOT))
    git(folder, "init", "--quiet", "--bare", "--initial-branch=main", str(remote))
    git(clone, "init", "--quiet", "--initial-branch=main")
    git(clone, "add", ".")
    git(clone, "commit", "--quiet", "--message=all")
    git(clone, "remote", "add", "origin", str(remote))
    git(clone, "push", "--quiet", "origin", "main")
    return clone


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    told = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return told.stdout.strip()


@pytest.fixture
def repository(published, monkeypatch) -> Path:
    """The published clone as the current folder."""
    monkeypatch.chdir(published)
    return published
