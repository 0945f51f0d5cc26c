"""Runs in a bucket are trained, stopped, resumed and opened as in a folder; a stand-in takes the place of Google's."""

import json
import signal
import threading

import fsspec
import gcsfs
import jax
import numpy as np
import pytest

from block_recurrent import evaluate, generate, report, train
from block_recurrent.data import files
from block_recurrent.errors import PREEMPTED, UserError, run_command
from block_recurrent.inference.run import open_run, run_folder
from block_recurrent.training.reporting import read_metrics
from block_recurrent.training.step import Trainer
from block_recurrent.training.warm_start import fingerprint
from tests.training.fake_gcs import FakeGCS
from tests.training.killed import kill_before_step
from tests.training.test_runs import arguments, untimed


@pytest.fixture(scope="module")
def server():
    """A stand-in for the cloud, with one bucket named "bucket"."""
    with FakeGCS("bucket") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        gcsfs.GCSFileSystem.clear_instance_cache()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
        gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def local(corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "local"
    train.main(arguments(corpus, workdir))
    return workdir


@pytest.fixture(scope="module")
def stopped(corpus, server):
    """A run in the bucket that is told to stop before its fourth step, and started again."""
    workdir = "gs://bucket/runs/stopped"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", Trainer.step)  # so that the next line is undone
        kill_before_step(4, signal.SIGTERM)
        with pytest.raises(SystemExit) as exit_code:
            run_command(train.main, arguments(corpus, workdir))
    assert exit_code.value.code == PREEMPTED
    train.main(arguments(corpus, workdir))
    return workdir


def names_in(server, folder):
    return {name.removeprefix(f"{folder}/") for name in server.objects if name.startswith(f"{folder}/")}


@pytest.mark.slow
def test_a_run_in_a_bucket_is_the_run_in_a_folder(local, stopped, server):
    here, there = open_run(local), open_run(stopped)
    assert there.checkpoints.steps() == [4, 6, 8]
    jax.tree.map(np.testing.assert_array_equal, there.params, here.params)
    assert untimed(read_metrics(there.workdir / "metrics.jsonl")) == untimed(
        read_metrics(here.workdir / "metrics.jsonl")
    )
    assert "resumed at step 4" in (there.workdir / "train.log").read_text()
    events = [name for name in names_in(server, "runs/stopped") if name.startswith("tensorboard/events")]
    assert len(events) == 2, "one file of TensorBoard's for each start"


@pytest.mark.slow
def test_commands_open_a_run_in_a_bucket(stopped, server, capsys):
    evaluate.main([stopped])
    generate.main([stopped, "--tokens=5", "--prompt=alpha"])
    report.main([stopped])
    told = capsys.readouterr().out
    assert "alpha" in told and f"on test at step 8  ({stopped}/evaluation/test-8.json)" in told
    assert json.loads(server.objects["runs/stopped/evaluation/test-8.json"][0])["step"] == 8
    assert server.objects["runs/stopped/report.html"][0].startswith(b"<!doctype html>")


@pytest.mark.slow
def test_a_checkpoint_that_was_not_finished_is_none(corpus, server, local):
    """What is left of a save that was killed: everything but the note that says it is complete."""
    workdir = "gs://bucket/runs/unfinished"
    train.main(arguments(corpus, workdir))
    del server.objects["runs/unfinished/checkpoints/8/commit_success.txt"]
    train.main(arguments(corpus, workdir))
    assert "resumed at step 6" in server.objects["runs/unfinished/train.log"][0].decode()
    jax.tree.map(np.testing.assert_array_equal, open_run(workdir).params, open_run(local).params)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside(corpus, server, local, capsys):
    workdir = "gs://bucket/runs/damaged"
    train.main(arguments(corpus, workdir))
    for name in names_in(server, "runs/damaged/checkpoints/8/params/ocdbt.process_0"):
        server.objects.pop(f"runs/damaged/checkpoints/8/params/ocdbt.process_0/{name}")
    with pytest.raises(UserError, match=r"checkpoints/8 is damaged .* --skip_damaged goes on from step 6"):
        train.main(arguments(corpus, workdir))
    train.main(arguments(corpus, workdir, "--skip_damaged"))
    assert "commit_success.txt" in names_in(server, "runs/damaged/checkpoints/damaged_8")
    jax.tree.map(np.testing.assert_array_equal, open_run(workdir).params, open_run(local).params)


def test_a_bucket_that_is_not_there_is_told(corpus, server):
    with pytest.raises(UserError, match=r"gs://other/run: the bucket cannot be reached"):
        train.main(arguments(corpus, "gs://other/run"))


def test_what_another_process_removes_is_seen_at_once(server):
    server.objects["runs/listed/checkpoints/2/file"] = (b"", 1)
    folder = run_folder("gs://bucket/runs/listed") / "checkpoints"
    assert [step.name for step in folder.iterdir()] == ["2"]
    server.objects["runs/listed/checkpoints/damaged_2/file"] = server.objects.pop("runs/listed/checkpoints/2/file")
    assert [step.name for step in folder.iterdir()] == ["damaged_2"]


@pytest.mark.parametrize("workdir", ["s3://bucket/run", "memory://run"])
def test_a_bucket_that_orbax_cannot_save_in_is_refused(corpus, workdir):
    with pytest.raises(UserError, match=r"a run is in a local folder or in gs://"):
        train.main(arguments(corpus, workdir))
    with pytest.raises(UserError, match=r"a run is in a local folder or in gs://"):
        report.main([workdir])


def test_what_is_written_here_is_uploaded():
    """TensorBoard's files and profiles are written by those who know no buckets."""
    mirror = files.Mirror("memory://mirrored/events")
    try:
        for text in ("one", "one, two"):
            files.write_bytes(f"{mirror.folder}/plugins/file", text.encode())
            mirror.upload()
            assert files.read_bytes("memory://mirrored/events/plugins/file") == text.encode()
    finally:
        fsspec.filesystem("memory").rm("/mirrored", recursive=True)


def test_a_warm_start_from_a_bucket_has_its_parameters(corpus, stopped, tmp_path):
    train.main([*arguments(corpus, tmp_path / "warm", "--gin.STEPS=1"), f"--from={stopped}@8"])
    source = json.loads((tmp_path / "warm" / "run.json").read_text())["from"]
    expected = fingerprint(open_run(stopped).at(8).params)
    assert source == {"run": stopped, "step": 8, "parameters": expected, "fresh": []}
