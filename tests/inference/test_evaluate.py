"""The command `evaluate`: what it prints and writes, and flags that cannot act together."""

import json
import shutil
import types

import numpy as np
import pytest

from block_recurrent import evaluate
from block_recurrent.data.store import open_store
from block_recurrent.errors import UserError
from block_recurrent.inference.measuring import has_words


@pytest.fixture
def read_only(downloaded):
    """A run in whose folder no figures can be written, even by root."""
    evaluation = downloaded / "evaluation"
    if evaluation.exists():
        evaluation.rename(downloaded / "moved")
    evaluation.write_text("a file where the folder should be")
    return downloaded


def test_figures_are_printed_before_they_are_saved(read_only, capsys):
    with pytest.raises(UserError, match=r"printed but not saved.*evaluation/test-4.json.*--output=FILE") as error:
        evaluate.main([str(read_only)])
    assert "bits per byte" in capsys.readouterr().out and "\n" not in str(error.value)


def test_figures_are_saved_where_they_are_wanted(read_only, tmp_path, capsys):
    evaluate.main([str(read_only), f"--output={tmp_path / 'mine' / 'figures.json'}"])
    written = json.loads((tmp_path / "mine" / "figures.json").read_text())
    assert f"{written['bits_per_byte']:.4f}" in capsys.readouterr().out


def test_perplexity_of_words_is_left_out_where_it_means_nothing(read_only, tmp_path, capsys):
    """Of bytes of any text: a byte's bits to the power of a word's length are a figure of nothing."""
    evaluate.main([str(read_only), f"--output={tmp_path / 'figures.json'}"])
    assert "│ word perplexity" not in capsys.readouterr().out.replace("┃", "│")
    assert json.loads((tmp_path / "figures.json").read_text())["word_perplexity"] is None


@pytest.mark.parametrize(
    ("kind", "task", "expected"),
    [
        ("bytes", "python_stdlib", False),
        ("bytes", "enwik8_bytes", False),
        ("bytes", None, False),
        ("bytes", "pg19_bytes", True),
        ("sentencepiece", "pg19_tokens", True),
        ("sentencepiece", "github_tokens", False),
        ("sentencepiece", None, True),
    ],
)
def test_what_has_words(kind, task, expected):
    assert has_words(types.SimpleNamespace(kind=kind, is_text=True), task) is expected
    assert not has_words(types.SimpleNamespace(kind=kind, is_text=False), task)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dynamic", "--rows=2"], "leave --rows and --reset_every away"),
        (["--rate=0.1"], "give --dynamic too"),
        (["--scored=3"], "give --history too"),
        (["--history=2", "--text=README.md"], "leave --text away"),
        (["--history=2", "--dynamic"], "leave --dynamic away"),
        (["--history=2", "--reset_every=4"], "leave --reset_every away"),
        (["--text=README.md", "--split=test"], "leave --split away"),
        (["--text=README.md", "--store=data/x"], "leave --store away"),
        (["--rows=0"], "--rows: '0' is not a whole number"),
        (["--rate=nan", "--dynamic"], "--rate: 'nan' is not a number"),
        (["--step=-1"], "--step: '-1' is no step"),
        (["--step=" + "9" * 5000], "--step: .* is no step"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        evaluate.main(["runs/any", *flags])


def test_more_rows_than_there_is_memory_for_are_refused(workdir):
    with pytest.raises(UserError, match=r"GiB of memory a device .*: give fewer --rows"):
        evaluate.main([str(workdir), "--rows=1000000000000"])


@pytest.mark.parametrize("binding", ["STEPS=-4", "LEARNING_RATE=3.0", "train.log_every=0", "STORE=elsewhere"])
def test_bindings_that_no_trained_model_depends_on_are_refused(workdir, binding):
    with pytest.raises(UserError, match=rf"--gin.{binding.partition('=')[0]} has no effect on a run that is trained"):
        evaluate.main([str(workdir), f"--gin.{binding}"])


def test_ids_that_the_vocabulary_does_not_have_are_told(workdir, corpus, tmp_path):
    damaged = shutil.copytree(corpus.folder, tmp_path / "damaged")
    tokens = np.memmap(next(damaged.glob("test-*.tokens")), open_store(damaged).split("test").tokens.dtype, "r+")
    tokens[5] = 60_000
    tokens.flush()
    with pytest.raises(
        UserError, match="the data has the token id 60000, and its vocabulary 259: the store is damaged"
    ):
        evaluate.main([str(workdir), f"--store={damaged}"])
