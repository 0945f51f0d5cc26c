"""A real run on a slice that is taken away in its middle."""

import re
import sys

import pytest

from block_recurrent import train
from block_recurrent.inference.run import read_metrics
from tests.launch.conftest import ROOT, program
from tests.training.test_runs import untimed


@pytest.mark.slow
def test_a_preempted_run_is_resumed_on_a_new_slice_and_ends_the_same(
    cloud, repository, corpus, tmp_path, monkeypatch, capfd
):
    store, workdir = f"--gin.STORE='{corpus.folder}'", tmp_path / "run"
    python = program(
        tmp_path / "python",
        "shift 2  # -m block_recurrent.train",
        f'PYTHONPATH=. exec {sys.executable} {ROOT}/tests/launch/paused_training.py "$@"',
    )
    monkeypatch.setenv("BR_PYTHON", str(python))
    monkeypatch.setenv("MARKS", str(tmp_path))
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "7")
    taken_away = [
        *("WAITING_FOR_RESOURCES", "PROVISIONING"),
        {"state": "ACTIVE", "until": str(tmp_path / "paused")},
        {"state": "SUSPENDING", "signal": "SIGTERM", "touch": str(tmp_path / "signalled"), "ended": True},
        "SUSPENDED",
    ]
    cloud.change(scripts=[taken_away, ["WAITING_FOR_RESOURCES", "ACTIVE"]])

    where = ("--slice=v5litepod-8", "--zone=z", "--project=p", "--spot")
    assert cloud.launch("up", "tiny", *where, "--interval=0.1") == 0
    training = ("--", "--gin_file=tests/tiny.gin", store, "--gin.train.rows=8")
    assert cloud.launch("run", "tiny", f"--workdir={workdir}", "--shared-disk", *training, checked=True) == 0
    log = cloud.folder / "tiny-1" / "w-0" / "block_recurrent" / "runs" / "tiny" / "log"
    assert cloud.launch("watch", "tiny", "--interval=0.3") == 0, log.read_text() if log.exists() else ""
    told = capfd.readouterr().out
    assert re.search("fits v5litepod-8 by shapes; estimate: .* h, .* to ", told)
    assert "tiny-1 is SUSPENDED" in told and "tiny-2 was asked for" in told and "done, at step 8" in told
    assert cloud.launch("logs", "tiny", "--lines=200") == 0
    assert "resumed at step 5" in capfd.readouterr().out
    assert set(cloud.resources) == {"tiny-2"}
    assert cloud.launch("down", "tiny") == 0 and not cloud.resources

    monkeypatch.chdir(ROOT)
    train.main([*training[1:], f"--workdir={tmp_path / 'whole'}"])
    runs = [untimed(read_metrics(folder / "metrics.jsonl")) for folder in (workdir, tmp_path / "whole")]
    assert runs[0] == runs[1]
