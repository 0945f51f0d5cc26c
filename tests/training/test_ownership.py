"""A run's folder belongs to one process: others are refused, and a killed owner is followed at once."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from etils import epath

from block_recurrent import train
from block_recurrent.errors import UserError, run_command
from block_recurrent.training import ownership
from block_recurrent.training.ownership import LAUNCH, OWNER, WrittenOwner, launch_of, own
from tests.training.test_runs import arguments

HOLD = """
import sys, signal, time
from etils import epath
from block_recurrent.training.ownership import own
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
owner = own(epath.Path(sys.argv[1]))
try:
    print("owned", flush=True)
    sys.stdin.read()
finally:
    owner.release()
"""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(ownership, "DYING", 0.0)
    monkeypatch.setattr(ownership, "SAVING", 20.0)
    monkeypatch.setattr(ownership, "SETTLING", 0.0)
    monkeypatch.delenv(LAUNCH, raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.fixture
def holder(tmp_path):
    """Another process, which owns tmp_path / "run"."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout.readline() == "owned\n"
        yield process
        process.kill()


def test_a_second_training_is_refused_in_one_line_and_changes_nothing(corpus, tmp_path, holder, impatient, capsys):
    workdir = tmp_path / "run"
    with pytest.raises(SystemExit):
        run_command(train.main, arguments(corpus, workdir))
    line = (
        rf"error: \S+ belongs to process {holder.pid} on \S+ since 2\S+ \S+ UTC, which trains there: .*--take_over.*\n"
    )
    assert re.fullmatch(line, capsys.readouterr().err)
    assert [file.name for file in workdir.iterdir()] == [OWNER]
    holder.kill()  # -9: the kernel drops the lock with the process, and the same command goes on
    ownership.DYING = 20.0
    own(epath.Path(workdir)).release()
    assert not (workdir / OWNER).exists()


def test_take_over_tells_the_owner_to_stop_and_follows_it(tmp_path, holder, impatient, capsys):
    owner = own(epath.Path(tmp_path / "run"), take_over=True)
    assert holder.wait() == 0, "it has ended by itself, after SIGTERM"
    assert json.loads((tmp_path / "run" / OWNER).read_text())["process"] == os.getpid()
    assert f"belongs to process {holder.pid}" in capsys.readouterr().out
    owner.release()


def test_on_a_disk_the_same_launch_waits_for_the_one_before_it(tmp_path, impatient, monkeypatch, request):
    """As when a job's restart comes before the process that it follows has ended."""
    monkeypatch.setenv(LAUNCH, "mine")
    holder = request.getfixturevalue("holder")
    monkeypatch.setattr(ownership.time, "sleep", lambda _: holder.kill())
    own(epath.Path(tmp_path / "run")).release()


def test_a_run_whose_folder_was_taken_over_writes_no_checkpoint(corpus, tmp_path, impatient, monkeypatch):
    def refuse(_):
        raise UserError("taken over")

    monkeypatch.setattr(ownership.LockedOwner, "require", refuse)
    with pytest.raises(UserError, match="taken over"):
        train.main(arguments(corpus, tmp_path / "run", "--gin.STEPS=1"))
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_an_owner_whose_folder_is_gone_saves_nothing_more(tmp_path, impatient):
    owner = own(epath.Path(tmp_path / "run"))
    owner.require()
    (tmp_path / "run" / OWNER).unlink()
    with pytest.raises(UserError, match="was removed or taken over"):
        owner.require()
    owner.release()
    assert not (tmp_path / "run").exists(), "an empty folder that it made goes with it"


@pytest.fixture
def bucket(tmp_path):
    return epath.Path(tmp_path / "bucket")


def test_in_a_bucket_a_live_owner_is_respected_and_a_silent_one_is_not(bucket, impatient, capsys):
    first = WrittenOwner(bucket, take_over=False)
    with pytest.raises(UserError, match=r"was alive . s ago: stop it; if it is gone, give --take_over, or wait for"):
        WrittenOwner(bucket, take_over=False)
    (bucket / OWNER).write_text(json.dumps({**first.me, "seen": time.time() - ownership.SILENT}))
    second = WrittenOwner(bucket, take_over=False)
    assert "silent for 600 s: taken for dead" in capsys.readouterr().out
    with pytest.raises(UserError, match="took it over: nothing more is saved"):
        first.require()
    first.release()
    second.require()
    second.release()
    assert not (bucket / OWNER).exists()


@pytest.mark.parametrize("variables", [{LAUNCH: "mine"}, {"SLURM_JOB_ID": "17"}])
def test_in_a_bucket_the_same_launch_goes_on_at_once(bucket, impatient, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    WrittenOwner(bucket, take_over=False).ended.set()  # as if killed: its file stays
    again = WrittenOwner(bucket, take_over=False)
    again.release()


def test_take_over_in_a_bucket_needs_no_answer(bucket, impatient):
    first = WrittenOwner(bucket, take_over=False)
    second = WrittenOwner(bucket, take_over=True)
    with pytest.raises(UserError, match="took it over"):
        first.require()
    first.release()
    second.release()


def test_an_owner_in_a_bucket_says_that_it_is_alive(bucket, impatient, monkeypatch):
    monkeypatch.setattr(ownership, "ALIVE", 0.01)
    owner = WrittenOwner(bucket, take_over=False)
    began = json.loads((bucket / OWNER).read_text())["seen"]
    while json.loads((bucket / OWNER).read_text() or "{}").get("seen", began) == began:
        pass
    owner.release()


def test_a_file_of_no_owner_is_nobody(bucket, impatient):
    bucket.mkdir()
    for content in (b"", b"{", b"[1]", b'{"id": 3}', b"\xff\x00"):
        (bucket / OWNER).write_bytes(content)
        WrittenOwner(bucket, take_over=False).release()
        (bucket / OWNER).write_bytes(content)
        own(bucket).release()


def test_a_file_system_without_locks_has_owners_as_a_bucket_has(tmp_path, impatient, monkeypatch):
    def refuse(*_):
        raise OSError(ownership.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(ownership.fcntl, "flock", refuse)
    owner = own(epath.Path(tmp_path / "run"))
    assert isinstance(owner, WrittenOwner)
    owner.release()


def test_a_launch_is_named_by_its_job():
    assert launch_of({}) == ""
    assert launch_of({"SLURM_JOB_ID": "17"}) == "Slurm job 17"
    assert launch_of({LAUNCH: "mine", "SLURM_JOB_ID": "17"}) == "mine"


def test_a_run_without_a_checkpoint_may_begin_with_another_config(corpus, tmp_path, monkeypatch):
    """What failed before its first checkpoint does not keep its folder from the corrected command."""
    from block_recurrent.training import loop

    def fail(*_):
        raise UserError("out of memory")

    with monkeypatch.context() as broken, pytest.raises(UserError, match="out of memory"):
        broken.setattr(loop, "Checkpoints", fail)
        train.main(arguments(corpus, tmp_path / "run", "--gin.DIM=24"))
    assert (tmp_path / "run" / "config.gin").exists() and not (tmp_path / "run" / OWNER).exists()
    train.main(arguments(corpus, tmp_path / "run", "--gin.STEPS=1"))
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir() and not (tmp_path / "run" / OWNER).exists()
