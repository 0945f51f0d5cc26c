"""Two real processes on this machine: one run, one data order, one stop; and who does not fit is named."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

import block_recurrent
from block_recurrent.errors import MISTAKE, PREEMPTED, UserError
from block_recurrent.inference.run import read_metrics
from block_recurrent.training import processes
from block_recurrent.training.reporting import append
from block_recurrent.training.stopping import Stopped, StopRequest
from block_recurrent.training.warm_start import fingerprint

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "tests" / "tiny.gin")
NO_STORE = "--gin.STORE='/nowhere'"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(process: int, port: int, devices: int, arguments: list[str], module: list[str]) -> subprocess.Popen:
    together = [f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--process={process}"]
    return subprocess.Popen(
        [sys.executable, "-m", *module, *arguments, *together],
        cwd=ROOT,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pair(*arguments: list[str], modules=(["block_recurrent.train"],) * 2, devices: int = 2) -> list[tuple[int, str]]:
    """Exit code and standard error of two processes of one run, with their arguments."""
    port = free_port()
    running = [start(i, port, devices, arguments[i], modules[i]) for i in range(2)]
    try:
        with ThreadPoolExecutor() as readers:  # of both: one that fills its pipe while the other is read would wait
            told = list(readers.map(lambda process: process.communicate(timeout=240)[1], running))
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, text) for process, text in zip(running, told, strict=True)]


def train_arguments(corpus, workdir, *more) -> list[str]:
    return [f"--gin_file={TINY}", f"--workdir={workdir}", f"--gin.STORE='{corpus.folder}'", "--gin.train.rows=8", *more]


def losses(workdir) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(Path(workdir) / "metrics.jsonl") if "loss" in row}


def alone(arguments, devices: int = 1) -> None:
    subprocess.run(
        [sys.executable, "-m", "block_recurrent.train", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)},
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def stopped(corpus, tmp_path_factory) -> tuple[list[tuple[int, str]], Path]:
    """How two processes of two devices each ended when one had SIGTERM before its third step, and their workdir."""
    workdir = tmp_path_factory.mktemp("runs") / "stopped"
    killed = ["tests.training.killed", "3", str(int(signal.SIGTERM))]
    arguments = train_arguments(corpus, workdir)
    return pair(arguments, arguments, modules=(["block_recurrent.train"], killed)), workdir


@pytest.mark.slow
def test_sigterm_to_one_of_two_stops_both_and_one_goes_on_alone(corpus, stopped, tmp_path):
    """Law 10 across machines: stopped on two processes of two devices each, gone on with by one on another mesh.

    The run to compare with is one of eight devices; both open here, where there is one.
    """
    alone(train_arguments(corpus, tmp_path / "whole"), devices=8)
    ended, workdir = stopped
    assert [code for code, _ in ended] == [PREEMPTED, PREEMPTED], ended
    steps = [int(re.search(r"SIGTERM: saved step (\d+) of 8", told)[1]) for _, told in ended]
    assert steps[0] == steps[1] < 8, "both saved the same step"
    shutil.copytree(workdir, tmp_path / "stopped")
    alone(
        [*train_arguments(corpus, tmp_path / "stopped"), "--gin.FSDP=1", "--gin.make_mesh.data=4"],
        devices=4,
    )
    whole, resumed = losses(tmp_path / "whole"), losses(tmp_path / "stopped")
    assert list(whole) == list(resumed) == list(range(1, 9))
    np.testing.assert_allclose(list(resumed.values()), list(whole.values()), rtol=1e-4)
    cursors = [
        json.loads((tmp_path / run / "checkpoints" / "8" / "cursor" / "metadata").read_text())["cursor"]
        for run in ("whole", "stopped")
    ]
    assert cursors[0] == cursors[1], "the same data"
    assert jax.device_count() == 1
    scores = [block_recurrent.open(tmp_path / run).score("alpha beta gamma") for run in ("whole", "stopped")]
    np.testing.assert_allclose(scores[0].bits[1:], scores[1].bits[1:], rtol=1e-3)


@pytest.mark.slow
def test_a_part_of_a_checkpoint_that_one_process_cannot_read_is_told_and_skipped_by_both(corpus, stopped, tmp_path):
    workdir = tmp_path / "damaged"
    shutil.copytree(stopped[1], workdir)
    *_, before, last = sorted(int(step.name) for step in (workdir / "checkpoints").iterdir())
    for item in ("params", "training"):
        for file in (workdir / "checkpoints" / str(last) / item / "ocdbt.process_1" / "d").iterdir():
            file.unlink()
    arguments = train_arguments(corpus, workdir)
    for code, told in pair(arguments, arguments):
        assert code == MISTAKE, told
        assert re.search(
            rf"^error: checkpoint .*/{last} is damaged .* --skip_damaged goes on from step {before}$", told, re.M
        )
    skipping = [*arguments, "--skip_damaged"]
    assert [code for code, _ in pair(skipping, skipping)] == [0, 0]
    assert (workdir / "checkpoints" / f"damaged_{last}").is_dir()
    assert f"resumed at step {before}\n" in (workdir / "train.log").read_text()
    assert list(losses(workdir)) == list(range(1, 9))


@pytest.mark.slow
def test_a_process_with_another_config_is_named_by_all(corpus, tmp_path):
    arguments = train_arguments(corpus, tmp_path / "run")
    ended = pair(arguments, [*arguments, "--gin.train.seed=7"])
    for code, told in ended:
        assert code == MISTAKE
        assert re.search(r"^error: process 1 has another config than process 0: \w+ and not \w+;", told, re.M), told
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_process_that_has_no_data_is_named_by_the_others_at_once(corpus, tmp_path):
    ended = pair(train_arguments(corpus, tmp_path / "run"), [*train_arguments(corpus, tmp_path / "run"), NO_STORE])
    assert [code for code, _ in ended] == [MISTAKE, MISTAKE]
    assert ended[0][1].splitlines()[-1].startswith("error: process 1 has failed: no prepared data in /nowhere"), ended
    assert ended[1][1].splitlines()[-1].startswith("error: no prepared data in /nowhere"), ended


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named(corpus, tmp_path):
    process = start(
        0, free_port(), 2, [*train_arguments(corpus, tmp_path / "run"), "--patience=6"], ["block_recurrent.train"]
    )
    _, told = process.communicate(timeout=120)
    assert process.returncode == MISTAKE
    assert told.splitlines()[-1].startswith("error: process 1 of 2 did not come within 6 s"), told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("127.0.0.1:1", 2, None), "go together"),
        (("127.0.0.1", 2, 0), "give HOST:PORT"),
        (("127.0.0.1:99999", 2, 0), "give HOST:PORT"),
        (("127.0.0.1:1", 2, 2), "the numbers are 0 to 1"),
    ],
)
def test_flags_that_do_not_fit_are_told(flags, told):
    with pytest.raises(UserError, match=told):
        processes.join(*flags)


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("", 0)) as taken, pytest.raises(UserError, match="process 0 cannot listen on port"):
        processes.join(f"127.0.0.1:{taken.getsockname()[1]}", 2, 0)


def test_processes_that_were_told_of_different_numbers_are_named_at_once_by_both():
    told = {}

    def call_as(process: int, of: int) -> None:
        with pytest.raises(UserError) as error:
            processes.roll_call(coordinator, of, process, 60)
        told[process] = str(error.value)

    coordinator = f"127.0.0.1:{free_port()}"
    threads = [threading.Thread(target=call_as, args=each) for each in ((0, 2), (2, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert told == dict.fromkeys((0, 2), "process 2 was told of 3 processes and process 0 of 2: start all alike")


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (
            {"TPU_WORKER_HOSTNAMES": "localhost,elsewhere", "TPU_WORKER_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": ""}
            | {"MEGASCALE_NUM_SLICES": "", "MEGASCALE_SLICE_ID": ""},
            ("localhost:8482", 2, 1),
        ),
        (
            {"TPU_WORKER_HOSTNAMES": "elsewhere,there", "TPU_WORKER_ID": "1", "MEGASCALE_NUM_SLICES": "2"}
            | {"MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080", "MEGASCALE_SLICE_ID": "1"},
            ("localhost:8482", 4, 3),
        ),
        (
            {"SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "node[003-004]", "SLURM_NTASKS": "16", "SLURM_PROCID": "9"}
            | {"SLURM_LOCALID": "1"},
            ("node003:61441", 16, 9),
        ),
    ],
    ids=["a slice", "two slices", "Slurm"],
)
def test_the_environment_tells_of_the_other_processes(monkeypatch, variables, found):
    from jax._src.clusters import cloud_tpu_cluster

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", "TPU_WORKER_ID" in variables)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert processes.of_cluster(patience=10) == found


def test_a_run_of_one_process_asks_no_cluster(monkeypatch):
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: None)
    processes.join()
    assert processes.client() is None


def test_several_processes_ask_whether_to_stop_at_the_same_places_one_after_another(monkeypatch):
    """Steps and batches of evaluations alike: JAX picks a place that none of them has passed."""
    asked = []
    monkeypatch.setattr(processes, "preempted", lambda place: asked.append(place) or place == 3)
    stop = StopRequest()
    assert stop.due() == ""
    stop.check()
    with pytest.raises(Stopped, match="SIGTERM"):
        stop.check()
    assert asked == [1, 2, 3]


class Store:
    """A key-value store in which process 1 is behind and process 2 has never been."""

    def key_value_dir_get(self, prefix):
        return [(f"{prefix}0", "12"), (f"{prefix}1", "9")]

    def key_value_set(self, key, value, allow_overwrite=False):
        self.said = (key, value)


def test_a_wait_that_lasts_too_long_names_who_is_missing(monkeypatch):
    store = Store()
    monkeypatch.setattr(processes, "client", lambda: store)
    monkeypatch.setattr(processes.distributed.global_state, "num_processes", 3)
    monkeypatch.setattr(processes.distributed.global_state, "process_id", 0)
    attendance = processes.Attendance(patience=1000)
    attendance.at(12)
    assert store.said == ("block_recurrent/step/0", "12")
    assert attendance._late() == "process 2 is not there, process 1 was last seen at step 9"
    attendance.close()


def test_a_process_that_waits_notes_the_step_that_it_is_at(monkeypatch):
    """Fast steps are not all noted: the process that was noted last would seem to be ahead of the others."""
    store, noted = Store(), threading.Event()
    monkeypatch.setattr(store, "key_value_set", lambda key, value, **_: value == "13" and noted.set(), raising=False)
    monkeypatch.setattr(processes, "client", lambda: store)
    monkeypatch.setattr(processes.distributed.global_state, "process_id", 0)
    attendance = processes.Attendance(patience=0.4)
    attendance.at(12)
    attendance.at(13)
    assert noted.wait(timeout=30)
    attendance.close()


def test_what_is_added_to_a_file_in_a_bucket_is_written_with_the_rest():
    class File:
        text = None

        def __str__(self):
            return "gs://bucket/metrics.jsonl"

        def exists(self):
            return self.text is not None

        def read_text(self):
            return self.text

        def write_text(self, text):
            self.text = text

    file = File()
    for line in ("a\n", "b\n"):
        append(file, line)
    assert file.text == "a\nb\n"


@pytest.mark.slow
def test_two_processes_begin_with_the_parameters_of_another_run(corpus, stopped, tmp_path):
    """Each puts its own part of every parameter on its devices; what they hold together is the source's."""
    _, source = stopped
    warm = [*train_arguments(corpus, tmp_path / "warm", "--gin.STEPS=1"), f"--from={source}"]
    ended = pair(warm, warm)
    assert [code for code, _ in ended] == [0, 0], ended
    run = block_recurrent.open(source)
    noted = json.loads((tmp_path / "warm" / "run.json").read_text())["from"]
    assert (noted["step"], noted["parameters"]) == (run.step, fingerprint(run.params))
    first = read_metrics(tmp_path / "warm" / "metrics.jsonl")[0]
    assert first["validation_loss"] == pytest.approx(run.evaluate("validation").score.loss, rel=1e-5)
