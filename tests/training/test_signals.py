"""Runs of music and of labelled sequences, from end to end: trained, stopped and resumed, evaluated, opened."""

import json
import signal
from dataclasses import dataclass

import numpy as np
import pytest

from block_recurrent import evaluate, generate, train
from block_recurrent.data.documents import SPLITS, Document, Unit
from block_recurrent.data.signals import PixelVocabulary
from block_recurrent.errors import MISTAKE, PREEMPTED, UserError, run_command
from block_recurrent.inference.run import open_run, read_metrics
from block_recurrent.prepare import prepare
from block_recurrent.training.step import Trainer
from tests.data.test_labels_and_records import built
from tests.data.test_music import packed, rolls
from tests.training.killed import kill_before_step
from tests.training.test_runs import assert_bit_identical, saved

LENGTHS = (7, 20, 13, 1)


@dataclass(frozen=True)
class Shades:
    """Sequences of grey values of several lengths, either dark or bright."""

    labels: tuple[str, ...] = ("dark", "bright")
    name = "shades"
    contiguous = False

    def units(self):
        return [Unit((split,), "") for split in SPLITS]

    def read(self, unit, dropped):
        (split,) = unit.places
        rng = np.random.default_rng(SPLITS.index(split))
        for i in range(12):
            pixels = rng.integers(0, 128, LENGTHS[i % 4]) + 127 * (i // 4 % 2)
            yield Document(f"{split}/{i:02d}", bytes(pixels.tolist()), split=split, label=i // 4 % 2)


MODEL = [
    "DIM=8",
    "HEADS=2",
    "LOCAL=3",
    "CONTEXT=16",
    "STEPS=6",
    "EPOCH=2",
    "ROWS=2",
    "PATTERN='2*rt'",
    "DROPOUT=0.2",
    "QUERY_TILE=None",
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signals")
    packed(folder / "Nottingham.npz", rolls())
    music, _ = prepare("nottingham", folder / "music", input=str(folder))
    return {"music": music, "shades": built(folder, Shades(), PixelVocabulary(), "shades")}


def arguments(kind, stores, workdir):
    config = {"music": "configs/music/r_transformer.gin", "shades": "configs/mnist/small.gin"}[kind]
    bindings = [*MODEL, f"STORE='{stores[kind].folder}'", "train.segment=16", "train.log_every=1"]
    bindings += ["Classifier.classes=2"] if kind == "shades" else []
    return [f"--gin_file={config}", f"--workdir={workdir}", *(f"--gin.{binding}" for binding in bindings)]


@pytest.fixture(scope="module")
def runs(stores, tmp_path_factory):
    """A run of each kind, and what training and evaluation printed."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in stores:
        train.main(arguments(kind, stores, folder / kind))
    return {kind: folder / kind for kind in stores}


@pytest.mark.parametrize("kind", ["music", "shades"])
def test_stopped_and_started_again_is_bit_identical(kind, stores, runs, tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    monkeypatch.setattr(Trainer, "step", Trainer.step)  # so that the next line is undone
    kill_before_step(4, signal.SIGTERM)
    with pytest.raises(SystemExit) as exit_code:
        run_command(train.main, arguments(kind, stores, workdir))
    assert exit_code.value.code == PREEMPTED
    monkeypatch.undo()
    train.main(arguments(kind, stores, workdir))
    assert_bit_identical(saved(workdir, 6), saved(runs[kind], 6))


def alone(run, split, method):
    """What the model says of every document of a split, each in a call of its own."""
    part = run.split(split)
    for begin, end in zip(part.offsets, part.offsets[1:], strict=False):
        tokens = part.tokens[begin:end]
        inputs = tokens[None, :-1] if method == "losses" else tokens[None].astype(np.int32)
        start = np.arange(inputs.shape[1])[None] == 0
        state, params = run.model.initial_state(1), {"params": run.params}
        if method == "losses":
            yield run.model.apply(params, inputs, tokens[None, 1:], state, start, method=method)[0][0]
        else:
            yield run.model.apply(params, inputs, state, start)[0][0, -1]


def test_music_is_measured_in_nats_per_frame(runs, capsys):
    evaluate.main([str(runs["music"])])
    printed = capsys.readouterr().out
    found = json.loads((runs["music"] / "evaluation" / "test-6.json").read_text())
    expected = [np.asarray(losses, np.float64) for losses in alone(open_run(runs["music"]), "test", "losses")]
    frames = sum(map(len, expected))
    assert found["tokens"] == frames == sum(len(song) - 1 for song in rolls()["test"])
    np.testing.assert_allclose(found["nats_per_token"], np.concatenate(expected).mean(), rtol=1e-5)
    np.testing.assert_allclose(found["per_document"]["nats"], [losses.sum() for losses in expected], rtol=1e-5)
    assert f"{found['nats_per_token']:.4f}" in printed and "nats per frame" in printed and "bits" not in printed
    validation = [row for row in read_metrics(runs["music"] / "metrics.jsonl") if "validation_loss" in row]
    assert [row["step"] for row in validation] == [2, 4, 6]
    assert not any(name.startswith("validation_bits") for row in validation for name in row)


def test_labels_are_counted_right_class_by_class(runs, capsys):
    evaluate.main([str(runs["shades"])])
    printed = capsys.readouterr().out
    found = json.loads((runs["shades"] / "evaluation" / "test-6.json").read_text())
    logits = np.array(list(alone(open_run(runs["shades"]), "test", "logits")), np.float64)
    labels = np.array([i // 4 % 2 for i in range(12)])
    hits = np.argmax(logits, axis=-1) == labels
    nats = np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(12), labels]
    assert found["documents"] == 12 and found["accuracy"] == np.mean(hits) and found["hits"] == hits.sum()
    assert found["per_document"]["hit"] == hits.astype(int).tolist()
    assert found["per_document"]["label"] == labels.tolist()
    np.testing.assert_allclose(found["per_document"]["nats"], nats, rtol=1e-4)
    np.testing.assert_allclose(found["nats_per_token"], nats.mean(), rtol=1e-5)
    by_class = {row["of"]: (row["documents"], row["accuracy"]) for row in found["by_class"]}
    assert by_class == {"dark": (8, hits[labels == 0].mean()), "bright": (4, hits[labels == 1].mean())}
    assert "bright" in printed and f"{np.mean(hits):.2%}" in printed and "bits" not in printed
    rows = [row for row in read_metrics(runs["shades"] / "metrics.jsonl") if "validation_loss" in row]
    assert all(0.0 <= row["validation_accuracy"] <= 1.0 for row in rows)
    (last,) = [row for row in rows if row["step"] == 6]
    whole = open_run(runs["shades"]).evaluate("validation")
    np.testing.assert_allclose(last["validation_loss"], whole.score.loss, rtol=1e-5)
    assert last["validation_accuracy"] == whole.score.accuracy


@pytest.mark.parametrize(
    ("kind", "told"), [("music", "is one of notes"), ("shades", "tells labels")], ids=["music", "shades"]
)
def test_what_needs_text_is_refused_in_one_line(runs, kind, told, capsys):
    asked = [["--text=README.md"], ["--history=2"], ["--dynamic"]]
    for command, more in ((generate, ["--prompt=x"]), *((evaluate, options) for options in asked)):
        with pytest.raises(SystemExit) as exit_code:
            run_command(command.main, [str(runs[kind]), *more])
        error = capsys.readouterr().err
        assert exit_code.value.code == MISTAKE and "\n" not in error.strip() and told in error
    with pytest.raises(UserError, match=told):
        open_run(runs[kind]).score("some text")
    with pytest.raises(UserError, match=told):
        open_run(runs[kind]).states("some text")


def test_evaluations_without_a_label_are_told_at_once(stores, tmp_path, capsys):
    few = [*arguments("shades", stores, tmp_path / "run"), "--gin.train.segment=4", "--gin.train.evaluation_batches=1"]
    with pytest.raises(SystemExit) as exit_code:
        run_command(train.main, few)
    error = capsys.readouterr().err
    assert exit_code.value.code == MISTAKE and "\n" not in error.strip()
    assert "train.evaluation_batches is 1" in error and "nothing to predict in its first 4 positions" in error
    assert not (tmp_path / "run").exists(), "nothing is written"


def test_a_store_of_other_labels_is_refused(runs, tmp_path):
    other = built(tmp_path, Shades(labels=("night", "day")), PixelVocabulary(), "other")
    with pytest.raises(UserError, match="has other labels than"):
        open_run(runs["shades"]).evaluate("test", store=other.folder)


def test_a_head_and_a_store_that_do_not_go_together_are_told(stores, tmp_path, capsys):
    swapped = {"music": stores["shades"], "shades": stores["music"]}
    for kind, told in (("music", "shades"), ("shades", "music")):
        with pytest.raises(SystemExit) as exit_code:
            run_command(train.main, arguments(kind, swapped, tmp_path / kind))
        error = capsys.readouterr().err
        assert exit_code.value.code == MISTAKE and "\n" not in error.strip() and told in error
        assert not (tmp_path / kind).exists(), "nothing is written"
    classes = [*arguments("shades", stores, tmp_path / "classes"), "--gin.Classifier.classes=3"]
    with pytest.raises(SystemExit):
        run_command(train.main, classes)
    assert "has 2 labels, the model's head, Classifier, is for 3 of them" in capsys.readouterr().err
