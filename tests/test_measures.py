"""Runs of music and of labels: their pages and comparisons have their own measures, and the right numbers."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import block_recurrent
from block_recurrent import compare, evaluate, report, train
from block_recurrent.comparison import Run, write
from block_recurrent.errors import UserError
from block_recurrent.inference.statistics import paired_interval, ratio_interval
from block_recurrent.measures import LABELS, MUSIC, TEXT
from block_recurrent.prepare import prepare
from tests.data.test_images import write_images
from tests.data.test_music import packed, rolls
from tests.test_compare import ABOUT, COST, PLANNED
from tests.test_notebooks import ROOT, executed
from tests.test_report import read

OWN_STEPS = {**ABOUT, "tokens": None, "missing": []}


def run_of(config, store, workdir, *bindings):
    """A run of four steps, evaluated in training after two and at its end, and then at the best of them."""
    bindings = ("STEPS=4", "EPOCH=2", "ROWS=2", "DIM=8", "train.log_every=1", f"STORE={store.folder!r}", *bindings)
    options = [f"--gin_file=configs/{config}", f"--workdir={workdir}"]
    train.main([*options, *(f"--gin.{binding}" for binding in bindings)])
    evaluate.main([str(workdir), "--step=best"])
    return workdir


def best_of(workdir) -> int:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    return min(losses, key=losses.get)


@pytest.fixture(scope="module")
def music(tmp_path_factory):
    folder = tmp_path_factory.mktemp("music")
    packed(folder / "Nottingham.npz", rolls())
    store, _ = prepare("nottingham", folder / "store", input=str(folder))
    return run_of("music/lstm.gin", store, folder / "song", "SEGMENT=16")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    store, _ = prepare("mnist", folder / "store", input=str(write_images(folder / "mnist")))
    return run_of("mnist/lstm.gin", store, folder / "digits")


def evaluated(workdir) -> dict:
    return json.loads((workdir / "evaluation" / f"test-{best_of(workdir)}.json").read_text())


def metrics(workdir, name):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


@pytest.mark.slow
def test_a_page_of_music_tells_nats_per_frame(music, capsys):
    report.main([str(music)])
    told, found, score = capsys.readouterr().out, read(music / "report.html"), evaluated(music)
    assert f"{score['nats_per_token']:.3f} nats per frame on test at step {score['step']}" in told
    assert "generate" not in told and "text" not in told
    assert found.labels == ["Loss in training", "Held-out documents", "Nats per frame by frames into the document"]
    assert "bits" not in found.text.partition("config.gin")[0] and "Samples" not in found.text
    low, high = (np.log(2) * bound for bound in score["bits_per_token_interval"])
    assert f"{score['tokens']:,}{score['nats_per_token']:.4f}{low:.4f} to {high:.4f}" in found.text
    assert f"last training loss, nats per frame{metrics(music, 'loss')[-1]:.3f}" in found.text
    assert f"last held-out nats per frame{metrics(music, 'validation_loss')[-1]:.3f}" in found.text
    for row in score["by_position"]:
        assert f"{row['of']}{row['tokens']:,}{np.log(2) * row['bits_per_token']:.4f}" in found.text
    songs = score["per_document"]
    places = [
        found.text.index(f"{name}{frames}{nats / frames:.3f}")
        for nats, frames, name in sorted(
            zip(songs["nats"], songs["tokens"], songs["name"], strict=True), key=lambda song: -song[0] / song[1]
        )
    ]
    assert places == sorted(places), "worst first"


@pytest.mark.slow
def test_a_page_of_labels_tells_accuracy(images, capsys):
    report.main([str(images)])
    told, found, score = capsys.readouterr().out, read(images / "report.html"), evaluated(images)
    assert f"{score['accuracy']:.2%} accuracy on test at step {score['step']}" in told
    assert found.labels == [
        "Loss in training",
        "Held-out sequences, nats per label",
        "Held-out sequences, accuracy",
        "Accuracy by class",
    ]
    assert "bits" not in found.text.partition("config.gin")[0] and "Samples" not in found.text
    low, high = score["accuracy_interval"]
    assert f"{score['nats_per_token']:.4f}{score['accuracy']:.2%}{low:.2%} to {high:.2%}" in found.text
    assert f"last training loss, nats per label{metrics(images, 'loss')[-1]:.3f}" in found.text
    assert f"last held-out accuracy{metrics(images, 'validation_accuracy')[-1]:.2%}" in found.text
    sequences = score["per_document"]
    for digit in set(sequences["label"]):
        hits = [hit for hit, label in zip(sequences["hit"], sequences["label"], strict=True) if label == digit]
        assert f"{digit}{len(hits)}{np.mean(hits):.2%}" in found.text
    ordered = sorted(zip(sequences["nats"], sequences["name"], sequences["label"], strict=True), reverse=True)
    places = [found.text.index(f"{name}{label}{nats:.3f}") for nats, name, label in ordered]
    assert places == sorted(places), "worst first"


def test_classes_have_their_names_where_some_are_missing(images, tmp_path):
    workdir = shutil.copytree(images, tmp_path / "digits")
    file = workdir / "evaluation" / f"test-{best_of(workdir)}.json"
    score = json.loads(file.read_text())
    by_class = [{"of": name, "documents": 1, "accuracy": 1.0, "interval": None} for name in ("dull", "fine")]
    documents = {"name": ["a", "b"], "label": [7, 2], "nats": [0.25, 3.0], "hit": [1, 0]}
    file.write_text(json.dumps({**score, "by_class": by_class, "per_document": documents}))
    report.main([str(workdir)])
    assert "bdull3.000afine0.250" in read(workdir / "report.html").text


def test_runs_of_different_kinds_are_not_set_side_by_side(music, images):
    with pytest.raises(
        UserError, match=r"song is judged by nats per frame, .*digits is judged by accuracy: give runs of"
    ):
        report.main([str(music), str(images)])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(MUSIC, "nats_per_frame"), (LABELS, "accuracy")])
def test_real_runs_are_compared_at_their_best(music, images, tmp_path, kind, name):
    workdir = music if kind is MUSIC else images
    contenders = [replace(each, steps=4, tokens_per_step=32) for each in PLANNED]
    runs = [Run(each, 0, workdir, (), keeps_best=True) for each in contenders]
    scores = {run: run.score("test") for run in runs}
    write(tmp_path, OWN_STEPS, scores, dict.fromkeys(contenders, COST), kind)
    document = json.loads((tmp_path / "comparison.json").read_text())
    source = "nats_per_token" if kind is MUSIC else "accuracy"
    assert document["configs"][0][name]["mean"] == pytest.approx(evaluated(workdir)[source])
    assert document["configs"][1]["difference"][name]["mean"] == 0
    assert document["best"] == [f"{workdir.name} at step {best_of(workdir)}"] * 2
    report.main([str(tmp_path)])
    found = read(tmp_path / "report.html")
    label = kind.main.label
    assert found.labels == [f"{label[0].upper()}{label[1:]} on test", f"Held-out {label} in training"]
    assert "some, each config's own steps" in found.text and "minutes of training" in found.text
    assert f"best checkpoint by held-out loss: {workdir.name} at step {best_of(workdir)}" in found.text


def finished(output, contender, seed, score, rows=(), step=8):
    """A run's folder as `train` and `evaluate` leave it."""
    workdir = output / f"{contender.name}-seed{seed}"
    (workdir / "evaluation").mkdir(parents=True)
    (workdir / "evaluation" / f"test-{step}.json").write_text(json.dumps(score))
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Run(contender, seed, workdir, ()), score


def compared(output, scores, kind, about=ABOUT):
    write(output, about, dict(scores), dict.fromkeys(PLANNED, COST), kind)
    lines = (output / "comparison.md").read_text().splitlines()
    header, second = ([cell.strip() for cell in lines[i].strip("|").split("|")] for i in (2, 5))
    entries = json.loads((output / "comparison.json").read_text())["configs"]
    return entries, dict(zip(header, second, strict=True)), lines


def test_music_is_compared_by_nats_per_frame(tmp_path):
    rng = np.random.default_rng(0)
    frames = [int(count) for count in rng.integers(10, 100, 20)]
    nats = {(i, seed): rng.normal(8 + i, 0.3, 20) * frames for i in range(2) for seed in range(2)}
    scores = []
    for (i, seed), found in nats.items():
        names = [f"test/{j}" for j in range(20)]
        documents = {"name": names, "nats": list(found), "tokens": frames, "bytes": [0] * 20}
        figures = {"bits_per_token": found.sum() / sum(frames) / np.log(2), "bits_per_byte": 99.0}
        rows = [{"step": step, "validation_loss": 9.0 + seed + i} for step in (4, 8)]
        scores.append(finished(tmp_path, PLANNED[i], seed, {**figures, "per_document": documents}, rows))
    (one, two), row, _ = compared(tmp_path, scores, MUSIC)
    means = [(nats[i, 0] + nats[i, 1]) / 2 for i in range(2)]
    figure, apart = two["nats_per_frame"], two["difference"]["nats_per_frame"]
    assert figure["mean"] == pytest.approx(means[1].sum() / sum(frames))
    by_seed = [nats[1, seed].sum() / sum(frames) for seed in range(2)]
    assert figure["spread"] == pytest.approx(abs(by_seed[0] - by_seed[1]))
    np.testing.assert_allclose(figure["interval"], ratio_interval(means[1], frames))
    assert apart["mean"] == pytest.approx((means[1] - means[0]).sum() / sum(frames))
    np.testing.assert_allclose(apart["interval"], paired_interval(means[1], means[0], frames))
    assert one["curve"] == {"tokens": [256, 512], "nats_per_frame": [9.5, 9.5]}
    low, high = figure["interval"]
    assert row["nats per frame"] == f"{figure['mean']:.3f} [{low:.3f}, {high:.3f}]"
    assert row["spread of seeds"] == f"{figure['spread']:.3f} of 2"
    assert row["difference per frame"].startswith(f"{apart['mean']:+.3f} [+")
    assert "model FLOPs per frame" in row and not any("bits" in name for name in row)
    assert (tmp_path / "plots" / "nats_per_frame.png").exists()


def test_labels_are_compared_by_accuracy(tmp_path):
    rng = np.random.default_rng(0)
    hits = {(i, seed): rng.random(40) < 0.6 + 0.2 * i for i in range(2) for seed in range(2)}
    nats = {key: rng.gamma(1.0, 0.5, 40) for key in hits}
    scores = []
    for key, found in hits.items():
        documents = {"name": [f"test/{j}" for j in range(40)], "label": [j % 2 for j in range(40)]}
        documents |= {"nats": nats[key].tolist(), "hit": found.astype(int).tolist()}
        figures = {"accuracy": found.mean(), "nats_per_token": nats[key].mean()}
        rows = [{"step": 8, "validation_loss": 0.5, "validation_accuracy": 0.7 + 0.1 * key[1]}]
        scores.append(finished(tmp_path, PLANNED[key[0]], key[1], {**figures, "per_document": documents}, rows))
    (one, two), row, _ = compared(tmp_path, scores, LABELS)
    means = [(1.0 * hits[i, 0] + hits[i, 1]) / 2 for i in range(2)]
    figure, apart = two["accuracy"], two["difference"]["accuracy"]
    assert figure["mean"] == pytest.approx(means[1].mean())
    np.testing.assert_allclose(figure["interval"], ratio_interval(means[1], np.ones(40)))
    assert apart["mean"] == pytest.approx((means[1] - means[0]).mean())
    np.testing.assert_allclose(apart["interval"], paired_interval(means[1], means[0], np.ones(40)))
    assert two["nats_per_label"]["mean"] == pytest.approx((nats[1, 0] + nats[1, 1]).mean() / 2)
    assert one["curve"]["accuracy"] == [pytest.approx(0.75)]
    low, high = figure["interval"]
    assert row["accuracy"] == f"{figure['mean']:.2%} [{low:.2%}, {high:.2%}]"
    assert row["spread of seeds"] == f"{figure['spread']:.2%} of 2"
    assert row["difference in points"].startswith(f"{apart['mean']:+.2%} [")

    other = json.loads((tmp_path / "two-seed0" / "evaluation" / "test-8.json").read_text())
    other["per_document"]["label"][0] = 1
    scores[-1] = (scores[-1][0], other)
    with pytest.raises(UserError, match="was evaluated on other documents"):
        compared(tmp_path, scores, LABELS)


def text_score(nats=(3.0, 4.0)):
    documents = {"name": ["a", "b"], "nats": list(nats), "tokens": [2, 2], "bytes": [2, 2]}
    bits = sum(nats) / 4 / np.log(2)
    return {"bits_per_token": bits, "bits_per_byte": bits, "per_document": documents}


def test_own_steps_are_timed_and_not_called_equal(tmp_path):
    """64 tokens a step: the first two steps at 4 tokens a second, the next two at 8."""
    rows = [{"step": 2, "tokens_per_second": 4.0, "tokens": 1}, {"step": 4, "tokens_per_second": 8.0, "tokens": 1}]
    scores = [finished(tmp_path, each, 0, text_score(), rows) for each in PLANNED]
    (one, _), row, lines = compared(tmp_path, scores, TEXT, OWN_STEPS)
    assert one["minutes"] == pytest.approx((2 * 64 / 4 + 2 * 64 / 8) / 60)
    assert lines[0] == "some, each config's own steps, evaluated on test" and row["minutes of training"] == "0.8"
    (one, _), row, lines = compared(tmp_path, scores, TEXT)
    assert "minutes" not in one and "minutes of training" not in row and lines[0].startswith("512 tokens of some")


def test_the_best_checkpoint_is_evaluated_once_training_is_over(tmp_path):
    losses = {2: 3.0, 4: 1.0, 6: 0.5, 8: 2.0}
    rows = [{"step": step, "validation_loss": loss} for step, loss in losses.items()]
    run, score = finished(tmp_path, PLANNED[0], 0, text_score(), rows, step=4)
    run = replace(run, keeps_best=True)
    (run.workdir / "checkpoints" / "4").mkdir(parents=True)
    assert run.evaluated_step == 8 and run.score("test") is None, "a better one may still come"
    (run.workdir / "checkpoints" / "8").mkdir()
    (run.workdir / "checkpoints" / "6.orbax-checkpoint-tmp").mkdir()
    assert run.evaluated_step == 4 and run.score("test") == score
    write(tmp_path, OWN_STEPS, {run: score}, {PLANNED[0]: COST})
    told = (tmp_path / "comparison.md").read_text()
    assert "Evaluated at the best checkpoint by held-out loss: one-seed0 at step 4." in told
    (run.workdir / "stopped.json").write_text('{"step": 8}')
    assert replace(run, keeps_best=False).evaluated_step == 8


@pytest.mark.parametrize(("more", "steps"), [([], 6), (["--gin.STEPS=7"], 7)])
def test_configs_train_for_their_own_steps_where_no_tokens_are_given(corpus, tmp_path, monkeypatch, more, steps):
    called, config = [], tmp_path / "own.gin"
    config.write_text("from __gin__ import dynamic_registration\ninclude 'tests/tiny.gin'\nSTEPS = 6\n")

    def call(command, arguments, *_):
        called.append((command, arguments))
        workdir = tmp_path / "output" / "own-seed0"
        if command == "train":
            for step in (4, steps):
                (workdir / "checkpoints" / str(step)).mkdir(parents=True)
            rows = [{"step": 4, "validation_loss": 1.0}, {"step": steps, "validation_loss": 2.0}]
            (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            (workdir / "evaluation").mkdir()
            (workdir / "evaluation" / "test-4.json").write_text(json.dumps(text_score()))

    monkeypatch.setattr(compare, "call", call)
    monkeypatch.setattr(compare, "cost", lambda *_: COST)
    given = [str(config), f"--store={corpus.folder}", f"--output={tmp_path / 'output'}", *more]
    compare.main([*given, "--gin.train.keep_best=True"])
    (_, training), (_, evaluation) = called
    assert f"--gin.STEPS={steps}" in training and "--step=4" in evaluation
    document = json.loads((tmp_path / "output" / "comparison.json").read_text())
    assert document["tokens"] is None and document["best"] == ["own-seed0 at step 4"]
    assert document["configs"][0]["steps"] == steps and document["configs"][0]["tokens"] == steps * 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "told"), [("music", "{:+.3f} nats per frame".format), ("images", "{:+.2%} accuracy".format)]
)
def test_the_notebook_compares_two_runs_by_their_measure(kind, told, request, tmp_path, monkeypatch):
    """A run at its end, and at an earlier step."""
    workdir = request.getfixturevalue(kind)
    earlier = shutil.copytree(workdir, tmp_path / "earlier")
    shutil.rmtree(earlier / "checkpoints" / "4")
    settings = {"BR_RUNS": f"{workdir}:{earlier}", "BR_COMPARISON": str(tmp_path), "PYTHONPATH": str(ROOT)}
    pictures, text = executed(ROOT / "notebooks" / "compare.ipynb", settings, monkeypatch)
    scores = [block_recurrent.open(folder).evaluate().score for folder in (workdir, earlier)]
    end, start = (score.loss if kind == "music" else score.accuracy for score in scores)
    assert len(pictures) == 2
    assert f"earlier, step 2 less {workdir.name}, step 4: {told(start - end)} [" in text
