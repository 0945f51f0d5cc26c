"""Warm starts: a new run begins with the parameters of another, whatever its segment, window, rows and optimizer."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from block_recurrent import config, report, train
from block_recurrent.data.store import Store
from block_recurrent.errors import UserError, first_line
from block_recurrent.inference.evaluation import Evaluator
from block_recurrent.inference.run import open_run, open_weights, read_metrics
from block_recurrent.training import loop
from block_recurrent.training.sharding import make_mesh
from block_recurrent.training.step import Trainer
from block_recurrent.training.warm_start import (
    WarmStart,
    comparable,
    fingerprint,
    first_score,
    fitting,
    read_source,
    require_begun_with,
    require_same_tokens,
)

TINY = str(Path(__file__).parents[1] / "tiny_block_recurrent.gin")
WHOLE = "--gin.train.evaluation_batches=None"
OTHER = ("--gin.train.segment=64", "--gin.train.rows=3", "--gin.WINDOW=8", "--gin_file=configs/base/adam.gin")
WORSE = "--gin.LEARNING_RATE=1.0"  # so that the start stays the best


def arguments(corpus, workdir, *more):
    return [f"--gin_file={TINY}", f"--workdir={workdir}", f"--gin.STORE='{corpus.folder}'", *more]


@pytest.fixture(scope="module")
def source(corpus, tmp_path_factory):
    """A run of segments of 32 and windows of 16, with checkpoints of steps 2 and 4."""
    workdir = tmp_path_factory.mktemp("runs") / "source"
    given = ["--gin.train.segment=32", "--gin.WINDOW=16", "--gin.STEPS=4", "--gin.train.evaluate_every=2", WHOLE]
    train.main([*arguments(corpus, workdir), *given])
    return workdir


@pytest.fixture(scope="module")
def warm(corpus, source, tmp_path_factory):
    """A run with everything else that the source's, whose first start died before its first step."""
    workdir = tmp_path_factory.mktemp("runs") / "warm"
    given = [*arguments(corpus, workdir, *OTHER, WHOLE, WORSE), f"--from={source}@4", "--gin.STEPS=2"]
    given += ["--gin.WARMUP=1", "--gin.train.evaluate_every=1", "--gin.train.keep_best=True"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Trainer, "step", lambda *_: 1 / 0)
        train.main([*given, "--gin.train.keep_best=False"])
    train.main(given)
    return workdir


@pytest.fixture(scope="module")
def resumed(corpus, source, tmp_path_factory):
    """A run that evaluates a part of the split, with one step more by the same command after its source was removed."""
    folder = tmp_path_factory.mktemp("resumed")
    gone = shutil.copytree(source, folder / "gone")
    given = [*arguments(corpus, folder / "run", "--gin.train.segment=32", "--gin.WINDOW=16"), f"--from={gone}@best"]
    given += ["--gin.train.evaluation_batches=1", "--gin.train.evaluate_every=1", "--gin.train.keep_best=True"]
    train.main([*given, "--gin.STEPS=1"])
    noted = json.loads((folder / "run" / "run.json").read_text())["from"]
    shutil.rmtree(gone)
    train.main([*given, "--gin.STEPS=2"])
    assert json.loads((folder / "run" / "run.json").read_text())["from"] == noted
    return folder / "run"


def held_out(workdir) -> dict[int, float]:
    return {
        row["step"]: row["validation_loss"]
        for row in read_metrics(workdir / "metrics.jsonl")
        if "validation_loss" in row
    }


def begun(corpus, source, *bindings, fresh=()):
    """The source's parameters in a model with other bindings, and what is noted of them."""
    config.parse([TINY], [f"STORE='{corpus.folder}'", *bindings])
    trainer = Trainer(**config.bindings_of(loop.train, "model", "optimizer", "rows"), mesh=make_mesh())
    start = WarmStart(str(source), fresh=fresh)
    return start.state(trainer, corpus, seed=0).params, start.note


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_parameters_are_taken_by_another_segment_window_rows_and_optimizer(source, warm):
    assert_equal(open_run(warm).at(0).params, open_run(source).params)


def test_the_first_figure_is_that_of_evaluate(source, warm):
    """Over the whole validation split, with the new run's window."""
    expected = open_run(source, bindings=["WINDOW=8"]).evaluate("validation").score.loss
    assert held_out(warm)[0] == pytest.approx(expected, rel=1e-5)


def test_the_start_may_stay_the_best(warm):
    losses = held_out(warm)
    assert min(losses, key=losses.get) == 0 and open_run(warm).best == 0


def test_a_start_that_died_leaves_no_second_first_figure(warm):
    rows = read_metrics(warm / "metrics.jsonl")
    assert [row["step"] for row in rows if "validation_loss" in row] == [0, 1, 2]


def test_a_run_notes_whose_parameters_it_began_with(source, warm):
    expected = {"run": str(source), "step": 4, "parameters": fingerprint(open_run(source).params), "fresh": []}
    assert json.loads((warm / "run.json").read_text())["from"] == expected
    assert fingerprint(open_run(source).at(2).params) != expected["parameters"]


def test_the_log_says_where_it_begins_and_what_differs(source, warm):
    log = (warm / "train.log").read_text()
    assert f"starting from the parameters of {source} at step 4" in log
    assert "differs from that of" in log and "WINDOW" in log and "train.segment" in log


def test_a_report_names_the_source(source, warm, capsys):
    report.main([str(warm), "--no_samples"])
    assert f"began with   the parameters of {source} at step 4" in capsys.readouterr().out
    assert f"began with the parameters of {source} at step 4" in (warm / "report.html").read_text()


def test_the_same_command_goes_on_with_the_run_itself(resumed):
    """Though the source is gone; its note stays."""
    assert "resumed at step 1" in (resumed / "train.log").read_text()
    assert list(held_out(resumed)) == [0, 1, 2] and open_run(resumed).steps == [1, 2]


def test_a_first_figure_of_more_than_the_others_is_no_best(source, resumed):
    """Evaluations of the first batches alone are of other tokens than the whole split."""
    expected = open_run(source).evaluate("validation").score.loss
    assert held_out(resumed)[0] == pytest.approx(expected, rel=1e-5)
    assert 0 not in open_run(resumed).steps


@pytest.mark.parametrize("given", ["{elsewhere}", "{source}@2"])
def test_another_source_is_refused_for_a_run_that_goes_on(source, warm, given):
    given = given.format(elsewhere=warm, source=source)
    with pytest.raises(UserError, match=f"is a run already, which began with {source} at step 4.*leave --from away"):
        require_begun_with(warm, given)
    require_begun_with(warm, f"{source}@best")
    with pytest.raises(UserError, match="which did not begin with another"):
        require_begun_with(source, str(warm))


def test_what_does_not_fit_is_named_before_anything_is_written(corpus, source, tmp_path):
    with pytest.raises(UserError) as refused:
        train.main([*arguments(corpus, tmp_path / "run", "--gin.STATES=8"), f"--from={source}"])
    assert first_line(refused.value) == (
        f"{source} at step 4 does not fit this model: "
        "stack/layers_1/initial_state is 4 x 16 in the source and 8 x 16 here, "
        "stack/layers_1/state_ids is 4 x 16 in the source and 8 x 16 here; "
        "to start these fresh, add --from_fresh='*/initial_state' --from_fresh='*/state_ids'"
    )
    assert not (tmp_path / "run").exists()


def test_parameters_that_are_named_start_fresh(corpus, source):
    params, note = begun(corpus, source, "STATES=8", fresh=("*/initial_state", "*/state_ids"))
    taken = open_run(source).params
    layer = params["stack"]["layers_1"]
    assert layer["state_ids"].shape == (8, 16) and np.std(layer["state_ids"]) > 0.5
    assert note["fresh"] == ["stack/layers_1/initial_state", "stack/layers_1/state_ids"]
    np.testing.assert_array_equal(layer["queries"], taken["stack"]["layers_1"]["queries"])


def test_nothing_of_the_configs_of_a_source_is_run(corpus, source, tmp_path):
    """Nor does it change what is parsed: the new run is built of its own."""
    hostile = shutil.copytree(source, tmp_path / "hostile")
    (hostile / "config.gin").write_text("import antigravity\nWINDOW = 512\n")
    params, _ = begun(corpus, hostile, "WINDOW=8")
    assert_equal(params, open_run(source).params)


def arrays(**shapes):
    return {name.replace("__", "/"): jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("wanted", "saved", "told"),
    [
        (
            arrays(e=(2,), s__a=(3, 2)),
            arrays(e=(2,), s__a=(4, 2)),
            "s/a is 4 x 2 in the source and 3 x 2 here; .*'[*]/a'",
        ),
        (arrays(e=(2,), s__a=(3,)), arrays(e=(2,)), "s/a is 3 here and not in the source"),
        (arrays(e=(2,)), arrays(e=(2,), s__a=()), "s/a is one number in the source and not in this model"),
        (arrays(e=(2,)), {"e": jax.ShapeDtypeStruct((2,), np.float16)}, "no parameter that fits.*e is 2 float16 in"),
        (
            arrays(e=(2,), s__l0__a=(2, 3), s__l0__b=(2,), s__l1__a=(3,), s__l1__b=()),
            arrays(e=(2,), s__l0__a=(4, 3), s__l0__b=(4,), s__l1__a=(3,), s__l1__b=()),
            "s/l0/b is 4 in the source and 2 here; to start these fresh, add --from_fresh='s/l0/[*]'$",
        ),
    ],
)
def test_misfits_are_told_with_both_shapes_and_a_flag_for_just_them(wanted, saved, told):
    with pytest.raises(UserError, match=told):
        fitting("runs/a at step 4", wanted, saved, ())


def test_patterns_of_nothing_and_of_everything_are_refused():
    known = arrays(e=(2,), a=(3,))
    with pytest.raises(UserError, match="--from_fresh=b matches no parameter: they are called e, a"):
        fitting("runs/a at step 4", known, known, ["b"])
    with pytest.raises(UserError, match="leaves nothing to be taken from runs/a at step 4"):
        fitting("runs/a at step 4", known, known, ["*"])
    with pytest.raises(UserError, match="--from_fresh is of a warm start: give --from=RUN too"):
        train.main(["--gin_file=x", "--workdir=x", "--from_fresh=b"])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"vocabulary": {"kind": "bytes", "size": 259, "sha256": "1" * 64}},
            "another vocabulary than .*259 bytes, 111",
        ),
        ({"vocabulary": {"kind": "sentencepiece", "size": 300, "sha256": "1" * 64}}, "300 sentencepiece"),
        ({"labels": ["good", "bad"]}, "was trained to tell other labels"),
    ],
)
def test_other_tokens_and_labels_are_refused(corpus, source, changed, told):
    with pytest.raises(UserError, match=told):
        require_same_tokens(open_weights(source), Store(corpus.folder, {**corpus.manifest, **changed}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs/a", ("runs/a", None)),
        ("gs://b/a@best", ("gs://b/a", "best")),
        ("runs/a@b@120", ("runs/a@b", 120)),
        ("runs/a@b", ("runs/a@b", None)),
    ],
)
def test_a_source_is_a_run_and_perhaps_a_step(text, expected):
    assert read_source(text) == expected


def test_a_source_that_cannot_be_taken_is_told_in_a_line(corpus, source, tmp_path):
    with pytest.raises(UserError, match="it is a prepared store"):
        begun(corpus, corpus.folder)
    with pytest.raises(UserError, match="has no checkpoint of step 3: it has 2, 4"):
        train.main([*arguments(corpus, tmp_path / "run"), f"--from={source}@3"])
    damaged = shutil.copytree(source, tmp_path / "damaged")
    for file in (damaged / "checkpoints" / "4" / "params").rglob("*"):
        if file.is_file() and "d" in file.parent.name:
            file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"4/params cannot be read \(.*give another step of this run, --from=RUN@STEP"):
        begun(corpus, damaged)


def test_a_running_text_is_read_whole_as_evaluate_does(corpus, source):
    """A run's own evaluations cut it into rows, so the first figure is not to be compared with theirs."""
    run = open_run(source)
    text = replace(corpus.split("validation"), contiguous=True)
    trainer = Trainer(run.model, config.bindings_of(loop.train, "optimizer")["optimizer"], make_mesh(), rows=8)
    evaluator = Evaluator(run.model, 8, 32, trainer.place, trainer.local_rows(), trainer.initial_memory)
    score, cut = first_score(evaluator, trainer, run.params, text), evaluator(run.params, text)
    whole = run.evaluate("validation").score
    assert score.tokens == whole.tokens and math.isclose(score.loss, whole.loss, rel_tol=1e-5)
    assert not math.isclose(cut.loss, whole.loss, rel_tol=1e-5)
    assert not comparable(text, None) and comparable(corpus.split("validation"), None)
