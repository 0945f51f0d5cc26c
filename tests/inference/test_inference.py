"""Evaluation and generation, from a workdir alone; what is generated is in test_generation.py."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import block_recurrent
from block_recurrent import evaluate
from block_recurrent.data.store import Store, split_in_memory
from block_recurrent.errors import UserError
from block_recurrent.inference.evaluation import Evaluator
from block_recurrent.inference.generation import Sampling
from block_recurrent.inference.run import open_run, save_run


@pytest.fixture(scope="module")
def run(workdir):
    return open_run(workdir)


@pytest.fixture(scope="module")
def params(run):
    return run.params


def nats_of(run, params, text: bytes) -> float:
    """The slow truth: one document, one token at a time, from an empty state."""
    tokens = run.vocabulary.encode(text)
    apply = jax.jit(lambda token, state, start: run.model.apply({"params": params}, token, state, start))
    state, total = run.model.initial_state(1), 0.0
    for i, (token, target) in enumerate(itertools.pairwise(tokens)):
        logits, state = apply(jnp.full((1, 1), token), state, jnp.full((1, 1), i == 0))
        total -= float(jax.nn.log_softmax(logits[0, 0])[target])
    return total


def test_a_split_is_scored_exactly_once_with_state_carried(run, params):
    """Sums over documents scored alone, token by token, whatever the rows and segments of the evaluation."""
    texts = [b"alpha beta gamma delta epsilon " * 2, b"gamma gamma", b"x", b"beta", b"delta " * 7]
    split = split_in_memory(texts, run.vocabulary)
    expected = sum(nats_of(run, params, text) for text in texts)
    for rows, segment in ((1, 8), (3, 16), (4, 32)):
        score = Evaluator(run.model, rows, segment)(params, split)
        assert score.tokens == sum(len(text) - 1 for text in texts)
        np.testing.assert_allclose(score.nats, expected, rtol=1e-5)
        np.testing.assert_allclose(score.bits_per_byte, expected / np.log(2) / score.tokens, rtol=1e-5)
        # "x" is one token: there is nothing to predict in it, so its word does not count.
        words = sum(len(text.split()) for text in texts) - 1
        np.testing.assert_allclose(np.log(score.word_perplexity), expected / words, rtol=1e-5)


def test_evaluate_writes_what_it_prints(workdir, capsys):
    evaluate.main([str(workdir)])
    written = json.loads((workdir / "evaluation" / "test-4.json").read_text())
    assert f"{written['bits_per_byte']:.4f}" in capsys.readouterr().out
    assert written["documents"] == 5


def test_evaluate_own_text(workdir, tmp_path):
    (tmp_path / "mine.txt").write_text("alpha beta gamma")
    evaluate.main([str(workdir), f"--text={tmp_path / 'mine.txt'}"])
    assert json.loads((workdir / "evaluation" / "text-4.json").read_text())["tokens"] == len("alpha beta gamma") - 1


def test_dynamic_evaluation_says_how_much_it_learns_from(workdir, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("alpha beta gamma")
    flags = ["--dynamic", "--epsilon=0.001", "--statistics=200"]
    evaluate.main([str(workdir), f"--text={tmp_path / 'mine.txt'}", *flags])
    assert re.search(r"^gradient statistics from 200 of [\d,]+ training tokens$", capsys.readouterr().err, re.MULTILINE)
    (file,) = (workdir / "evaluation").glob("text-4-dynamic*.json")
    assert json.loads(file.read_text())["changed"] == ["dynamic=5e-05,0.002,0.001", "statistics=200"]


def test_evaluate_refuses_another_vocabulary(corpus, workdir, tmp_path):
    for file in Path(corpus.folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    evaluate.main([str(workdir), f"--store={tmp_path}"])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["vocabulary"]["sha256"] = "other"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="another vocabulary"):
        evaluate.main([str(workdir), f"--store={tmp_path}"])


def test_parameters_can_be_had_in_another_type(run):
    params = run.params_as(jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_a_run_refuses_a_store_of_another_vocabulary(corpus, tmp_path):
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    save_run(tmp_path, corpus, "train")
    save_run(tmp_path, corpus, "train again")
    other = {**corpus.manifest, "vocabulary": {"kind": "bytes", "size": 259, "sha256": "other"}}
    with pytest.raises(UserError, match="has another vocabulary than"):
        save_run(tmp_path, Store(corpus.folder, other), "train with another")
    with pytest.raises(UserError, match="is not the vocabulary that"):
        Store(corpus.folder, other).vocabulary.decode([100])


def test_a_run_is_opened_by_its_path_and_nothing_else(workdir, corpus):
    run = block_recurrent.open(workdir)
    assert "STEPS = 4" in run.config and run.metrics[-1]["step"] == 4 and run.steps == [2, 4] and run.step == 4
    scores = run.score("alpha beta gamma")
    assert len(scores) == 16 and scores.offsets[-1] == 16 and scores.bits_per_byte > 1
    assert run.at(2).score("alpha beta gamma").bits_per_byte != scores.bits_per_byte
    found = run.evaluate("validation")
    assert found.score.documents == 4 and len(found.names) == 4
    assert run.evaluate(texts={"mine": b"alpha beta gamma"}).score.nats == pytest.approx(
        np.nansum(scores.bits) * np.log(2), rel=1e-4
    )


def test_generation_goes_on_from_texts_and_streams(run):
    """The same text, given whole, or as a stream that was fed in pieces, goes on in the same way."""
    alone = run.generate("alpha beta gam", tokens=12)
    stream = run.stream()
    for piece in ("alpha", " be", "ta gam"):
        stream.feed(piece)
    assert run.generate(stream, tokens=12) == alone == run.generate(stream, tokens=12)
    first, second = run.generate(["alpha beta gam", "x"], tokens=12)
    assert first == alone and second
    likeliest = run.generate("alpha", tokens=5, sampling=Sampling(0))
    assert likeliest == run.generate("alpha", tokens=5, beams=1)
    with pytest.raises(UserError, match="stream is empty"):
        run.generate(run.stream())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.gin").unlink(), "is not a run"),
        (lambda folder: (folder / "run.json").write_text("{"), "not a complete run"),
        (lambda folder: (folder / "run.json").write_text("{}"), "not a complete run"),
        (lambda folder: add(folder / "config.gin", "import os\n"), "imports os"),
        (lambda folder: add(folder / "config.gin", "import \\\nantigravity\n"), "antigravity"),
        (
            lambda folder: add(folder / "config.gin", "from block_recurrent import train\n"),
            "imports block_recurrent.train",
        ),
        (lambda folder: add(folder / "config.gin", "X = @loop.train()\n"), "refers to .*loop.train"),
        (lambda folder: add(folder / "config.gin", "X = @loop.Checkpoints()\n"), "refers to .*Checkpoints"),
        (lambda folder: add(folder / "config.gin", "X = @stack.re.compile()\n"), "refers to re.compile"),
        (lambda folder: add(folder / "config.gin", "include 'x.gin'\n"), "flat"),
    ],
)
def test_a_folder_that_is_no_run_or_not_to_be_trusted(workdir, tmp_path, damage, message):
    for name in ("config.gin", "run.json"):
        (tmp_path / name).write_text((workdir / name).read_text())
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        open_run(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "it has no config.gin"),
        ({"manifest.json": "{}"}, "it is a prepared store"),
        ({"comparison.json": "{}", "a-seed0/config.gin": ""}, "it is a comparison of runs; give one of them: a-seed0"),
        ({"_METADATA": "{}"}, "it is an Orbax checkpoint without its run"),
        ({"model.safetensors": ""}, "it looks like a model of PyTorch"),
        ({"../config.gin": ""}, "it is inside one"),
    ],
)
def test_a_folder_of_something_else_is_called_what_it_is(tmp_path, files, message):
    folder = tmp_path / "parent" / "given"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with pytest.raises(UserError, match=f"is not a run: {message}"):
        block_recurrent.open(folder)
    with pytest.raises(UserError, match="there is nothing of that name"):
        block_recurrent.open(folder / "nowhere")


def test_a_run_of_another_mesh_opens_here(workdir, tmp_path):
    """The mesh is not built where only the model is wanted."""
    text = (workdir / "config.gin").read_text()
    (tmp_path / "config.gin").write_text(text.replace("FSDP = -1", "FSDP = 64"))
    (tmp_path / "run.json").write_text((workdir / "run.json").read_text())
    assert "FSDP = 64" in (tmp_path / "config.gin").read_text()
    assert open_run(tmp_path).settings["rows"] == 4


def test_a_store_that_has_changed_is_noticed(run, corpus):
    about = {**run.about, "splits": {**run.about["splits"], "test": "other"}}
    with pytest.raises(UserError, match="has changed since"):
        dataclasses.replace(run, about=about).store()


def add(file, text):
    head, mark, rest = file.read_text().partition("from models import sliding_window\n")
    file.write_text(head + mark + text + rest)


def test_steps_that_are_not_there(run, tmp_path, workdir):
    with pytest.raises(UserError, match="no checkpoint of step 3: it has 2, 4"):
        run.at(3)
    for name in ("config.gin", "run.json"):
        (tmp_path / name).write_text((workdir / name).read_text())
    with pytest.raises(UserError, match="no checkpoint yet"):
        _ = open_run(tmp_path).step
