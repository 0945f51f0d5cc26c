"""What held-out losses decide: the rules on lists, and runs that get a lower rate, stop early and keep their best."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from block_recurrent import evaluate, generate, train
from block_recurrent.checkpoints import Best
from block_recurrent.comparison import Contender, Run
from block_recurrent.errors import PREEMPTED, UserError, run_command
from block_recurrent.inference.evaluation import Evaluator
from block_recurrent.inference.run import held_out_loss, open_run, read_metrics
from block_recurrent.training import optimizers
from block_recurrent.training.plateau import STEADY, Plateau, best
from block_recurrent.training.sharding import make_mesh
from block_recurrent.training.step import Trainer
from tests.training.killed import kill_before_step
from tests.training.test_runs import TINY, assert_bit_identical, saved, untimed
from tests.training.test_step import model

ROOT = Path(__file__).parents[2]
PLATEAU = """from __gin__ import dynamic_registration
from block_recurrent.training import plateau
include 'tests/tiny.gin'
include 'configs/base/plateau.gin'
plateau.Plateau:
    over = 1
    after = 1
"""


def authors_rates(losses, rate=1.0):
    """The loop of the R-Transformer authors' code: the rate after each epoch."""
    before, rates = [], []
    for epoch, loss in enumerate(losses, start=1):
        if epoch > 10 and loss > max(before[-3:]):
            rate /= 10
        before.append(loss)
        rates.append(rate)
    return rates


def torch_rates(losses, patience, rate=1.0):
    """ReduceLROnPlateau without a threshold."""
    lowest, bad, rates = math.inf, 0, []
    for loss in losses:
        lowest, bad = (loss, 0) if loss < lowest else (lowest, bad + 1)
        if bad > patience:
            rate, bad = rate / 10, 0
        rates.append(rate)
    return rates


@pytest.mark.parametrize("seed", range(3))
def test_the_default_is_the_authors_rule(seed):
    losses = np.random.default_rng(seed).normal(size=60).tolist()
    found = [Plateau().scale(losses[:count]) for count in range(1, 61)]
    np.testing.assert_allclose(found, authors_rates(losses), rtol=1e-6)
    assert found[9] == 1.0 and found[-1] < 1e-3


@pytest.mark.parametrize("patience", [0, 2])
def test_patience_is_pytorchs_and_one(patience):
    losses = np.random.default_rng(0).normal(size=60).tolist()
    rule = Plateau(over=None, after=0, patience=patience + 1)
    found = [rule.scale(losses[:count]) for count in range(1, 61)]
    np.testing.assert_allclose(found, torch_rates(losses, patience), rtol=1e-6)
    assert found[-1] < 1.0


def test_a_loss_reduces_only_above_the_last_three_and_after_ten():
    falling = [20.0 - i for i in range(10)]  # down to 11
    assert Plateau().scale([*falling, 13.0]) == 1.0, "not above the largest of the last three"
    assert Plateau().scale([*falling, 13.5]) == 0.1
    assert Plateau().scale([*falling[1:], 13.5]) == 1.0, "the tenth evaluation"
    assert Plateau().scale([*falling, 13.5, 12.0, 14.0]) == pytest.approx(0.01)
    assert Plateau(floor=0.05).scale([*falling, 13.5, 12.0, 14.0]) == 0.05
    assert Plateau().scale([]) == STEADY.scale([*falling, 99.0]) == 1.0


def test_a_run_stops_after_so_many_evaluations_without_a_new_best():
    rule = Plateau(stop_after=2)
    assert [rule.stops(losses) for losses in ([], [2.0], [2.0, 1.0, 1.5], [2.0, 1.0, 1.0, 1.0])] == [0, 0, 0, 1]
    assert not STEADY.stops([1.0, 2.0, 3.0]) and best([2.0, 1.0, 3.0, 1.0]) == 1


@pytest.mark.parametrize("wrong", [{"factor": 0.0}, {"floor": 2.0}, {"over": 0}, {"after": None}, {"stop_after": 0}])
def test_a_rule_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(UserError, match=f"Plateau.*{next(iter(wrong))}"):
        Plateau(**wrong)


def test_the_best_of_the_checkpoints_that_are_there_is_kept():
    there = [SimpleNamespace(step=step) for step in (2, 4, 6)]
    assert Best({2: 2.0, 3: 0.5, 4: 1.0}).should_preserve(there, context=None) == [False, True, False]
    assert Best({}).should_preserve(there, context=None) == [False] * 3


def test_the_scale_multiplies_updates_and_rate_and_compiles_nothing_anew():
    trainer = Trainer(model(spec="slide"), optimizers.sgd(lambda step: 0.5), make_mesh(), rows=2)
    tokens = np.random.default_rng(0).integers(0, 259, (2, 17)).astype(np.int32)
    batch = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones((2, 16), np.float32),
        "start": np.arange(32).reshape(2, 16) % 16 == 0,
    }
    found = {}
    for scale in (1.0, 0.1, 1):
        _, metrics = trainer.step(trainer.init(0), batch, scale)
        found[scale] = {name: float(metrics[name]) for name in ("update_norm", "learning_rate", "gradient_norm")}
    assert trainer._step._cache_size() == 1
    assert found[0.1]["gradient_norm"] == found[1.0]["gradient_norm"]
    for name in ("update_norm", "learning_rate"):
        np.testing.assert_allclose(found[0.1][name], 0.1 * found[1.0][name], rtol=1e-6)
    _, unscaled = trainer.step(trainer.init(0), batch)
    assert float(unscaled["update_norm"]) == found[1.0]["update_norm"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("configs") / "plateau.gin"
    file.write_text(PLATEAU)
    return file


def arguments(corpus, config, workdir, *more):
    every = ("--gin.train.evaluate_every=1", "--gin.train.checkpoint_every=3", "--gin.train.keep_checkpoints=1")
    return [f"--gin_file={config}", f"--workdir={workdir}", f"--gin.STORE='{corpus.folder}'", *every, *more]


def turn_evaluations_round(monkeypatch):
    """The held-out loss rises as the model learns."""
    true = Evaluator.__call__

    def turned(*arguments):
        score = true(*arguments)
        return replace(score, nats=score.tokens * (12.0 - score.loss))

    monkeypatch.setattr(Evaluator, "__call__", turned)


def steps_in(workdir):
    return sorted(int(folder.name) for folder in (workdir / "checkpoints").iterdir() if folder.name.isdigit())


def losses_of(workdir):
    rows = read_metrics(workdir / "metrics.jsonl")
    return {row["step"]: held_out_loss(row) for row in rows if held_out_loss(row) is not None}


@pytest.fixture(scope="module")
def worsening(corpus, config, tmp_path_factory):
    """A run whose held-out losses rise from its first step on."""
    workdir = tmp_path_factory.mktemp("runs") / "worsening"
    with pytest.MonkeyPatch.context() as patch:
        turn_evaluations_round(patch)
        train.main(arguments(corpus, config, workdir))
    return workdir


def test_a_rising_loss_lowers_the_rate_and_the_best_checkpoint_stays(worsening):
    rows = [row for row in read_metrics(worsening / "metrics.jsonl") if "learning_rate" in row]
    schedule = optimizers.inverse_square_root(warmup=4)
    scales = [row["learning_rate"] / float(schedule(row["step"] - 1)) for row in rows]
    losses = losses_of(worsening)
    assert list(losses) == list(range(1, 9)) and min(losses, key=losses.get) < 8
    rule = Plateau(over=1, after=1)
    expected = [rule.scale([losses[step] for step in range(1, row["step"])]) for row in rows]
    np.testing.assert_allclose(scales, expected, rtol=1e-5)
    assert expected[-1] < 1e-2
    assert steps_in(worsening) == [min(losses, key=losses.get), 8]
    log = (worsening / "train.log").read_text()
    bits = losses[1] / math.log(2)
    assert f"step 1: validation {bits:.4f} bits per byte, {bits:.4f} per token; the best so far" in log
    assert "the learning rate is now 0.1 times" in log


def test_a_run_that_goes_on_decides_the_same(corpus, config, worsening, tmp_path, monkeypatch, capsys):
    """SIGTERM where the rate has been lowered: everything in the last checkpoint is the same, bit for bit."""
    workdir = tmp_path / "stopped"
    turn_evaluations_round(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", Trainer.step)  # so that the next line is undone
        kill_before_step(5, signal.SIGTERM)
        with pytest.raises(SystemExit) as exit_code:
            run_command(train.main, arguments(corpus, config, workdir))
    assert exit_code.value.code == PREEMPTED and "saved step 5 of 8" in capsys.readouterr().err
    train.main(arguments(corpus, config, workdir))
    assert_bit_identical(saved(workdir, 8), saved(worsening, 8))
    assert untimed(read_metrics(workdir / "metrics.jsonl")) == untimed(read_metrics(worsening / "metrics.jsonl"))
    assert steps_in(workdir) == steps_in(worsening)


@pytest.mark.slow
def test_killed_with_a_plateau_is_bit_identical(corpus, tmp_path):
    """kill -9 between checkpoints, after the rate was lowered by losses that a high rate makes worse."""
    file = tmp_path / "plateau.gin"
    file.write_text(PLATEAU + "LEARNING_RATE = 8.0\n")
    train.main(arguments(corpus, file, tmp_path / "whole"))
    given = arguments(corpus, file, tmp_path / "killed")
    command = [sys.executable, "-m", "tests.training.killed", "6", str(int(signal.SIGKILL)), *given]
    died = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    train.main(given)
    assert "the learning rate is now 0.1 times" in (tmp_path / "whole" / "train.log").read_text()
    assert_bit_identical(saved(tmp_path / "killed", 8), saved(tmp_path / "whole", 8))


def test_a_run_stops_early_once_and_counts_as_trained(corpus, config, tmp_path, monkeypatch, capsys):
    workdir = tmp_path / "run"
    turn_evaluations_round(monkeypatch)
    given = arguments(corpus, config, workdir, "--gin.STOP_AFTER=2")
    train.main(given)
    last = 1 + 2
    told = f"finished early, at step {last} of 8: the last 2 evaluations brought no lower loss than "
    assert told in capsys.readouterr().out and steps_in(workdir) == [1, last]
    assert json.loads((workdir / "stopped.json").read_text())["step"] == last
    run = Run(Contender("run", "", 64, 8), 0, workdir, ())
    assert run.is_trained() and run.last_step == last

    rows = read_metrics(workdir / "metrics.jsonl")
    monkeypatch.setattr(Trainer, "step", lambda *_: pytest.fail("it went on"))
    monkeypatch.setattr(Evaluator, "__call__", lambda *_: pytest.fail("it evaluated"))
    train.main(given)
    assert told in capsys.readouterr().out and read_metrics(workdir / "metrics.jsonl") == rows
    monkeypatch.undo()
    train.main(arguments(corpus, config, workdir, "--gin.STOP_AFTER=100"))
    assert steps_in(workdir)[-1] == 8 and not (workdir / "stopped.json").exists() and run.last_step == 8


def test_a_rule_may_not_change_but_what_is_kept_may(corpus, config, worsening):
    with pytest.raises(UserError, match="holds a run of another config"):
        train.main(arguments(corpus, config, worsening, "--gin.Plateau.over=2"))
    train.main(arguments(corpus, config, worsening, "--gin.train.keep_best=False"))


def test_the_best_step_is_evaluated(worsening, capsys):
    run = open_run(worsening)
    assert run.best == run.at("best").step == 1 and run.step == 8
    evaluate.main([str(worsening), "--step=best"])
    assert json.loads((worsening / "evaluation" / "test-1.json").read_text())["step"] == 1
    generate.main([str(worsening), "--step=best", "--tokens=2", "--prompt=alpha"])
    assert "at step 1 on test" in capsys.readouterr().out


def test_a_run_without_evaluations_has_no_best(corpus, tmp_path):
    given = [f"--gin_file={TINY}", f"--workdir={tmp_path / 'run'}", f"--gin.STORE='{corpus.folder}'", "--gin.STEPS=1"]
    train.main(given)
    run = open_run(tmp_path / "run")
    assert run.best == 1
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows = read_metrics(metrics)
    assert rows[-1]["validation_loss"] == pytest.approx(rows[-1]["validation_bits_per_token"] * math.log(2))
    old = {name: value for name, value in rows[-1].items() if name != "validation_loss"}
    assert held_out_loss(old) == pytest.approx(rows[-1]["validation_loss"])
    metrics.write_text(json.dumps({**rows[-1], "step": 3}) + "\n")
    with pytest.raises(UserError, match=r"evaluated in training has a checkpoint: .*keep_best"):
        run.at("best")
    metrics.write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    with pytest.raises(UserError, match="was not evaluated in training"):
        run.at("best")


def test_a_checkpoint_from_before_losses_were_saved_goes_on(corpus, config, tmp_path):
    workdir = tmp_path / "run"
    train.main(arguments(corpus, config, workdir, "--gin.STEPS=1"))
    file = workdir / "checkpoints" / "1" / "cursor" / "metadata"
    position = json.loads(file.read_text())
    assert [step for step, _ in position.pop("losses")] == [1]
    file.write_text(json.dumps(position))
    train.main(arguments(corpus, config, workdir, "--gin.STEPS=2"))
    assert [step for step, _ in saved(workdir, 2)[1]["losses"]] == [2] and list(losses_of(workdir)) == [1, 2]
