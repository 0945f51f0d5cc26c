"""Whole runs of the train command: resume after kill -9 and SIGTERM bit for bit, divergence, and what is refused."""

import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from block_recurrent import train
from block_recurrent.data.rows import RowStream
from block_recurrent.errors import MISTAKE, PREEMPTED, Preempted, UserError, run_command
from block_recurrent.inference.run import read_metrics
from block_recurrent.prepare import prepare
from block_recurrent.training import loop
from block_recurrent.training.loop import check_finite
from block_recurrent.training.processes import Attendance
from block_recurrent.training.profiling import Profile
from block_recurrent.training.reporting import Reporter, append, drop_after
from block_recurrent.training.step import Trainer
from tests.training.killed import kill_before_step

TINY = str(Path(__file__).parents[1] / "tiny.gin")


def arguments(corpus, workdir, *more):
    return [f"--gin_file={TINY}", f"--workdir={workdir}", f"--gin.STORE='{corpus.folder}'", *more]


def saved(workdir, step):
    """Everything in a checkpoint, as NumPy."""
    folder = Path(workdir).absolute() / "checkpoints" / str(step)
    with ocp.StandardCheckpointer() as reader:
        trees = {item: reader.restore(folder / item) for item in ("params", "training")}
    cursor = json.loads((folder / "cursor" / "metadata").read_text())
    return jax.tree.map(np.asarray, trees), cursor


def assert_bit_identical(a, b):
    assert a[1] == b[1]
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a[0]), jax.tree.leaves(b[0]), strict=True):
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    train.main(arguments(corpus, workdir))
    return workdir


@pytest.mark.slow
def test_killed_and_started_again_is_bit_identical(corpus, uninterrupted, tmp_path):
    """Law 10: kill -9 in the middle, the same command again: everything in the last checkpoint is the same."""
    workdir = tmp_path / "killed"
    command = [
        sys.executable,
        "-m",
        "tests.training.killed",
        "6",
        str(int(signal.SIGKILL)),
        *arguments(corpus, workdir),
    ]
    died = subprocess.run(command, cwd=Path(__file__).parents[2], env=os.environ, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    steps = [int(folder.name) for folder in (workdir / "checkpoints").iterdir() if folder.name.isdigit()]
    assert steps and max(steps) < 6
    train.main(arguments(corpus, workdir))
    assert_bit_identical(saved(workdir, 8), saved(uninterrupted, 8))
    rows = [row["step"] for row in read_metrics(workdir / "metrics.jsonl") if "loss" in row]
    assert rows == list(range(1, 9)), "a resumed run neither repeats nor loses a row of metrics"


def test_sigterm_saves_and_exits_with_its_own_code(corpus, uninterrupted, tmp_path, monkeypatch, capsys):
    workdir = tmp_path / "preempted"
    monkeypatch.setattr(Trainer, "step", Trainer.step)  # so that the next line is undone
    kill_before_step(4, signal.SIGTERM)
    with pytest.raises(SystemExit) as exit_code:
        run_command(train.main, arguments(corpus, workdir))
    assert exit_code.value.code == PREEMPTED and "SIGTERM: saved step 4 of 8 in " in capsys.readouterr().err
    monkeypatch.undo()
    assert (workdir / "checkpoints" / "4").is_dir()
    train.main(arguments(corpus, workdir))
    assert_bit_identical(saved(workdir, 8), saved(uninterrupted, 8))
    # Step 4 was due for evaluation when the signal came: its row is written on resuming, and every row is the same.
    assert untimed(read_metrics(workdir / "metrics.jsonl")) == untimed(read_metrics(uninterrupted / "metrics.jsonl"))


def test_sigterm_before_anything_new_does_not_claim_to_have_saved(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Attendance, "at", lambda attendance, step: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as exit_code:
        run_command(train.main, arguments(corpus, tmp_path / "run"))
    assert exit_code.value.code == PREEMPTED
    assert capsys.readouterr().err.startswith("SIGTERM: nothing new to save at step 0 of 8 in ")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_sigterm_in_an_evaluation_ends_it_and_it_is_done_again(corpus, uninterrupted, tmp_path, monkeypatch):
    workdir, read, batches = tmp_path / "preempted", RowStream.read, []

    def read_and_be_told(stream, cursor):
        if stream.epochs == 1:
            batches.append(cursor)
            if len(batches) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        return read(stream, cursor)

    monkeypatch.setattr(RowStream, "read", read_and_be_told)
    with pytest.raises(SystemExit) as exit_code:
        run_command(train.main, arguments(corpus, workdir))
    assert exit_code.value.code == PREEMPTED
    assert len(batches) == 2, "the third was not evaluated"
    assert all("loss" in row for row in read_metrics(workdir / "metrics.jsonl")), "nothing of it is reported"
    train.main(arguments(corpus, workdir))
    assert_bit_identical(saved(workdir, 8), saved(uninterrupted, 8))
    assert untimed(read_metrics(workdir / "metrics.jsonl")) == untimed(read_metrics(uninterrupted / "metrics.jsonl"))


TIMED = ("tokens_per_second", "data_share", "checkpoint_share", "evaluation_share")


def untimed(rows):
    return sorted(({k: v for k, v in row.items() if k not in TIMED} for row in rows), key=str)


def test_a_stopped_run_keeps_its_share_of_a_row_of_metrics(corpus, tmp_path, monkeypatch):
    """A row that averages steps from before and after a stop is the row of an uninterrupted run."""
    spaced = "--gin.train.log_every=8"
    train.main(arguments(corpus, tmp_path / "whole", spaced))
    monkeypatch.setattr(Trainer, "step", Trainer.step)
    kill_before_step(5, signal.SIGTERM)
    with pytest.raises(SystemExit):
        run_command(train.main, arguments(corpus, tmp_path / "stopped", spaced))
    monkeypatch.undo()
    train.main(arguments(corpus, tmp_path / "stopped", spaced))
    rows = [untimed(read_metrics(tmp_path / run / "metrics.jsonl")) for run in ("whole", "stopped")]
    assert rows[0] == rows[1]


def test_a_run_tells_what_it_is_before_it_starts(corpus, tmp_path, capsys):
    train.main(arguments(corpus, tmp_path / "run", "--gin.STEPS=1"))
    told = capsys.readouterr().out
    before, _, _ = told.partition("starting from scratch")
    assert "parameters:      8," in before and "tokens per step: 64 = 4 rows x 16" in before
    keys = re.search(r"layers 0-1: 2 x 2,146 parameters\n(?:  .*\n)*  keys +16 x 16 +float32 +256\n", before)
    assert keys, "layers that are alike are in one group"


def test_bfloat16_run_carries_its_state_in_bfloat16(corpus, tmp_path):
    train.main(arguments(corpus, tmp_path / "run", "--gin.STEPS=2", "--gin.DTYPE='bfloat16'"))
    trees, _ = saved(tmp_path / "run", 2)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(trees["training"]["memory"])} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(trees["params"])} == {"float32"}


def test_a_finished_run_may_go_on_longer_without_a_second_table(corpus, tmp_path, capsys):
    train.main(arguments(corpus, tmp_path / "run", "--gin.STEPS=2"))
    capsys.readouterr()
    train.main(arguments(corpus, tmp_path / "run", "--gin.STEPS=4"))
    assert (tmp_path / "run" / "checkpoints" / "4").is_dir()
    told = capsys.readouterr().out
    assert told.startswith("parameters: ") and "resumed at step 2\n" in told and "layers 0-1" not in told


def test_divergence_stops_and_keeps_the_last_good_checkpoint(corpus, tmp_path, capsys, monkeypatch):
    """A loss that is not a number is told in one line, and nothing of its step is saved."""
    read = RowStream.read

    def read_or_spoil(stream, cursor):
        batch, after = read(stream, cursor)
        if stream.epochs is None and sum(cursor.offset) >= 4 * 16 * 3:  # in the fourth training step or later
            batch["weights"] = batch["weights"] * np.nan
        return batch, after

    monkeypatch.setattr(RowStream, "read", read_or_spoil)
    with pytest.raises(SystemExit) as exit_code:
        run_command(train.main, arguments(corpus, tmp_path / "run"))
    assert exit_code.value.code == MISTAKE
    assert re.search(r"error: step \d has diverged \(loss nan", capsys.readouterr().err)
    kept = [int(folder.name) for folder in (tmp_path / "run" / "checkpoints").iterdir() if folder.name.isdigit()]
    assert 2 in kept
    for step in kept:
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(saved(tmp_path / "run", step)[0]["params"]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--gin.STEPZ=3"], "no gin name STEPZ: did you mean STEPS?"),
        (["--gin.train.stepz=3"], "did you mean steps?"),
        (["--gin.trian.steps=3"], "did you mean"),
        (["--gin.STEPS"], "write --gin.NAME=VALUE"),
        (["--gin.STEPS=%MISSING"], "MISSING"),
        (["--gin_file=configs/quickstrat.gin"], "did you mean configs/quickstart.gin?"),
        (["--gin.STORE='nowhere'"], "no prepared data in nowhere"),
        (["--gin.FSDP=3"], "does not cover the 1 device"),
        (["--gin.train.accumulate=3"], "4 rows do not divide over data x fsdp = 1 times 3"),
        (["--gin.train.segment=20"], "segment 20 is not a multiple of the model's block (its window) 8: try 16"),
        (["--gin.VOCABULARY=100"], "has 259 token ids, the model's vocabulary_size is 100"),
        (["--gin.PATTERN='2*slyde'"], "'2*slyde' is not one of slide"),
        (["--gin.HEADS=0"], "SlidingWindowLayer.heads is 0: give a whole number, 1 or more"),
        (["--gin.HEAD_DIM=2.5"], "SlidingWindowLayer.head_dim is 2.5: give a whole number, 1 or more"),
        (["--gin.WINDOW=0"], "SlidingWindowLayer.window is 0: give a whole number, 1 or more"),
        (["--gin.DIM=0"], "LanguageModel.dim is 0: give a whole number, 1 or more"),
        (["--gin.train.log_every=0"], "train.log_every is 0: give a whole number, 1 or more"),
        (["--gin.train.evaluation_batches=0"], "train.evaluation_batches is 0: give a whole number, 1 or more"),
        (["--gin.train.keep_checkpoints=0"], "train.keep_checkpoints is 0"),
        (["--gin.train.keep_every=0"], "train.keep_every is 0: give a whole number, 1 or more"),
        (["--gin.train.rows=1e9"], "train.rows is 1000000000.0: give a whole number, 1 or more"),
        (["--gin.train.rows=1000000000"], "GiB of memory a device (carried state"),
        (["--gin.DIM=1000000000"], "GiB of memory a device (parameters"),
        (["--gin.PATTERN='1000000000*slide'"], "has 1,000,000,000 layers: give 10,000 or fewer"),
        (["--gin.train.seed='a'"], "train.seed is 'a': give a whole number, 0 or more"),
        (["--gin.train.seed=99999999999999999999"], "train.seed is 99999999999999999999: give a whole number, 0 or"),
        (["--gin.train.health='yes'"], "train.health is 'yes': give True or False"),
        (["--gin.train.optimizer='adam'"], "train.optimizer is 'adam': give one of block_recurrent.training.optim"),
        (["--gin.LEARNING_RATE='fast'"], "is 'fast': give a number, 0 or more"),
        (["--gin.LEARNING_RATE=-0.1"], "is -0.1: give a number, 0 or more"),
        (["--gin.DTYPE='float17'"], "dtype is 'float17': give one of 'float32', 'bfloat16'"),
        (["--gin.DTYPE='int32'"], "dtype is 'int32': give one of 'float32', 'bfloat16'"),
        (["--gin.DROPOUT=2"], "dropout is 2: give a number, 0 or more, below 1"),
        (["--gin.DROPOUT=-0.5"], "dropout is -0.5: give a number, 0 or more, below 1"),
        (["--gin.STORE=data/mine"], "no prepared data in data/mine"),
    ],
)
def test_mistakes_are_told_in_one_line_and_nothing_is_written(corpus, tmp_path, capsys, more, message):
    with pytest.raises(SystemExit) as exit_code:
        run_command(train.main, arguments(corpus, tmp_path / "run", *more))
    told = capsys.readouterr().err
    assert exit_code.value.code == MISTAKE
    assert message in told and told.startswith("error: ") and told.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_workdir_of_another_config_is_refused(corpus, uninterrupted):
    with pytest.raises(UserError, match=r"holds a run of another config .*DIM = "):
        train.main(arguments(corpus, uninterrupted, "--gin.DIM=24"))
    with pytest.raises(UserError, match="holds a run of another config"):
        train.main(arguments(corpus, uninterrupted, "--gin.train.seed=5"))


def test_a_workdir_that_is_a_file_is_told(corpus, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as exit_code:
        run_command(train.main, arguments(corpus, tmp_path / "file"))
    assert exit_code.value.code == MISTAKE and capsys.readouterr().err.startswith("error: ")


def test_a_full_disk_is_told_however_deep_it_was_found(capsys):
    def fail(arguments):
        raise ValueError("could not write") from OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SystemExit) as exit_code:
        run_command(fail, [])
    assert exit_code.value.code == MISTAKE and "the disk is full" in capsys.readouterr().err


def test_a_mistake_in_the_code_keeps_its_traceback():
    """Also one that is made while a missing file is being handled."""

    def fail(arguments):
        try:
            Path("no such file").read_text()
        finally:
            raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        run_command(fail, [])


def test_a_damaged_checkpoint_is_named_and_can_be_skipped(corpus, uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    train.main(arguments(corpus, workdir, "--gin.STEPS=4"))
    for file in (workdir / "checkpoints" / "4" / "params").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(b"garbage")
    with pytest.raises(UserError, match=r"checkpoints/4 is damaged .* --skip_damaged goes on from step 2"):
        train.main(arguments(corpus, workdir))
    train.main(arguments(corpus, workdir, "--skip_damaged"))
    assert (workdir / "checkpoints" / "damaged_4").is_dir()
    assert_bit_identical(saved(workdir, 8), saved(uninterrupted, 8))


def test_checkpoints_are_kept_by_number_and_by_interval(corpus, tmp_path):
    train.main(arguments(corpus, tmp_path / "run", "--gin.train.keep_checkpoints=1", "--gin.train.keep_every=4"))
    assert sorted(int(f.name) for f in (tmp_path / "run" / "checkpoints").iterdir() if f.name.isdigit()) == [4, 8]


def test_a_profile_traces_steps_after_the_first(monkeypatch, tmp_path):
    traced = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **options: traced.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: traced.append("stop"))
    profile = Profile(tmp_path / "profile", begun=10, steps=2)
    for step in range(10, 18):
        profile.at(step)
        traced.append(step)
    assert traced == [10, 11, 12, str(tmp_path / "profile"), 13, 14, "stop", 15, 16, 17]


def test_of_several_processes_the_first_alone_is_traced(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **options: pytest.fail("traced"))
    profile = Profile(tmp_path / "profile", begun=0, steps=2)
    for step in range(8):
        profile.at(step)


def test_a_line_that_was_cut_short_swallows_no_other(tmp_path):
    file = epath.Path(tmp_path / "metrics.jsonl")
    file.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    append(file, '{"step": 2, "loss": 2.0}\n')
    append(file, '{"step": 3, "loss": 1.0}\n')
    file.write_text(file.read_text() + 'null\n[1]\n{"loss": 1}\n')
    assert [row["step"] for row in read_metrics(file)] == [1, 2, 3]
    drop_after(file, 3, 3)
    assert len(file.read_text().splitlines()) == 3, "the torn line is gone"
    drop_after(file, step=2, evaluated=2)
    assert [row["loss"] for row in read_metrics(file)] == [3.0, 2.0]
    assert not file.read_text().endswith("}{") and list(tmp_path.iterdir()) == [tmp_path / "metrics.jsonl"]


def test_a_rewrite_of_metrics_that_fails_leaves_them_as_they_were(tmp_path, monkeypatch):
    file = epath.Path(tmp_path / "metrics.jsonl")
    rows = '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n'
    file.write_text(rows)
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drop_after(file, step=1, evaluated=1)
    assert file.read_text() == rows and list(tmp_path.iterdir()) == [tmp_path / "metrics.jsonl"]


def test_parameters_that_are_no_numbers_are_named(tmp_path):
    params = {"head": {"kernel": np.ones(3)}, "norm": {"scale": np.array([1.0, np.nan])}}
    with pytest.raises(UserError, match=r"checkpoint 7 of .* no finite numbers: \['norm'\]\['scale'\]$"):
        check_finite(params, epath.Path(tmp_path), 7)


def test_a_run_that_begins_from_no_numbers_ends_before_its_first_step(corpus, tmp_path, monkeypatch):
    init = Trainer.init

    def spoilt(trainer, seed):
        state = init(trainer, seed)
        return dataclasses.replace(state, params=jax.tree.map(lambda a: a * np.nan, state.params))

    monkeypatch.setattr(Trainer, "init", spoilt)
    with pytest.raises(UserError, match="the model at its start has parameters that are no finite numbers"):
        train.main(arguments(corpus, tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_without_held_out_text_says_so_before_its_first_step(tmp_path, monkeypatch):
    (tmp_path / "texts" / "train").mkdir(parents=True)
    (tmp_path / "texts" / "train" / "a.txt").write_text("all that there is to learn from " * 9)
    store, _ = prepare("text_files", tmp_path / "store", input=str(tmp_path / "texts"))
    lines = []
    monkeypatch.setattr(Reporter, "line", lambda self, line: lines.append(line))
    monkeypatch.setattr(loop, "meet", lambda *_: (_ for _ in ()).throw(Preempted("before the first step")))
    with pytest.raises(Preempted):
        train.main(arguments(store, tmp_path / "run"))
    assert lines[-1] == f"{store.folder} has no validation split: this run is measured on nothing that is held out"
