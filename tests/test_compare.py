"""A comparison takes more configs later and may be killed: nothing is trained twice, and its table is right."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from block_recurrent import compare
from block_recurrent.comparison import Contender, Run, write
from block_recurrent.errors import MISTAKE, UserError, run_command
from block_recurrent.inference.statistics import paired_interval, ratio_interval
from block_recurrent.prepare import prepare
from block_recurrent.training.reporting import read_metrics

ROOT = Path(__file__).parents[1]
SMALL = """from __gin__ import dynamic_registration
include 'tests/tiny.gin'
PATTERN = 'slide'
"""


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Two configs of one name."""
    folder = tmp_path_factory.mktemp("configs")
    files = [folder / "small.gin", folder / "wide" / "small.gin"]
    files[1].parent.mkdir()
    files[0].write_text(SMALL)
    files[1].write_text(f"{SMALL}MLP_DIM = 64\n")
    return [str(file) for file in files]


def arguments(configs, store, output, *more):
    every_step = ("--gin.train.checkpoint_every=1", "--gin.train.evaluate_every=4")
    return [*configs, f"--store={store}", "--tokens=500", f"--output={output}", *every_step, *more]


def written(output):
    """When each file of the runs was last written."""
    files = [file for run in output.glob("*-seed*") for file in run.rglob("*") if file.is_file()]
    return {str(file.relative_to(output)): file.stat().st_mtime_ns for file in files}


@pytest.fixture(scope="module")
def compared(corpus, configs, tmp_path_factory):
    """One config; a second with it, killed in the second's run; both again."""
    output = tmp_path_factory.mktemp("comparison")
    compare.main(arguments(configs[:1], corpus.folder, output))
    alone = written(output)
    command = [sys.executable, "-m", "block_recurrent.compare", *arguments(configs, corpus.folder, output)]
    begun = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    told, in_second = [], False
    for line in begun.stdout:
        told.append(line)
        in_second |= line.startswith("[2/2]")
        if in_second and line.startswith("step 3:"):  # the checkpoint of step 1 is there
            os.killpg(begun.pid, signal.SIGKILL)
            break
    begun.stdout.close()
    assert begun.wait() == -signal.SIGKILL, "".join(told)
    killed = written(output)
    compare.main(arguments(configs, corpus.folder, output))
    return output, "".join(told), alone, killed


@pytest.mark.slow
def test_a_killed_comparison_trains_nothing_twice(compared):
    output, told, alone, killed = compared
    assert f"[1/2] {output / 'small-seed0'}: done" in told
    now = written(output)
    assert {name: now[name] for name in alone} == alone
    assert not any(name.startswith("wide-small-seed0/checkpoints/8/") for name in killed)
    assert re.search(r"resumed at step [1-7]\n", (output / "wide-small-seed0" / "train.log").read_text())
    for run in ("small-seed0", "wide-small-seed0"):
        assert (output / run / "checkpoints" / "8").is_dir()
        assert [row["step"] for row in read_metrics(output / run / "metrics.jsonl") if "loss" in row] == [*range(1, 9)]


@pytest.mark.slow
def test_the_table_has_what_the_runs_say(compared, corpus, configs, capsys):
    output, told, _, _ = compared
    assert "small: 500 tokens are rounded up to 8 steps of 64: 512" in told
    document = json.loads((output / "comparison.json").read_text())
    assert document["tokens"] == 500 and document["missing"] == [] and document["split"] == "test"
    assert [entry["name"] for entry in document["configs"]] == ["small", "wide-small"]
    assert [entry["config"] for entry in document["configs"]] == configs
    first, second = document["configs"]
    for entry in document["configs"]:
        score = json.loads((output / f"{entry['name']}-seed0" / "evaluation" / "test-8.json").read_text())
        assert entry["bits_per_byte"]["by_seed"] == [score["bits_per_byte"]]
        assert entry["bits_per_token"]["mean"] == score["bits_per_token"]
        assert entry["curve"]["tokens"] == [256, 512] and entry["tokens"] == 512 and entry["seeds"] == [0]
        log = (output / f"{entry['name']}-seed0" / "train.log").read_text()
        assert f"parameters:      {entry['parameters']:,} " in log
        assert entry["tokens_per_second"] > 0
    assert first["difference"] is None and first["relative_time_per_token"] == 1.0
    expected = second["bits_per_byte"]["mean"] - first["bits_per_byte"]["mean"]
    assert second["difference"]["bits_per_byte"]["mean"] == pytest.approx(expected)
    assert second["model_flops_per_token"] > first["model_flops_per_token"]
    for name in ("bits_per_byte.png", "final.png"):
        assert (output / "plots" / name).read_bytes().startswith(b"\x89PNG")

    table = (output / "comparison.md").read_text()
    (output / "comparison.md").unlink()
    before = written(output)
    compare.main(arguments(configs, corpus.folder, output, "--table_only"))
    assert written(output) == before
    assert (output / "comparison.md").read_text() == table
    assert json.loads((output / "comparison.json").read_text()) == document
    assert "wide-small" in capsys.readouterr().out


@pytest.mark.slow
def test_a_workdir_of_another_run_is_refused(compared, corpus, configs, tmp_path):
    output, *_ = compared
    before = written(output)
    given = arguments(configs, corpus.folder, output)
    with pytest.raises(UserError, match=r"small-seed0 holds a run of another config \(first difference: DIM = 16\)"):
        compare.main([*given, "--gin.DIM=24"])
    with pytest.raises(UserError, match="small-seed0 holds a run of another number of tokens"):
        compare.main([*given, "--tokens=1000"])
    for split in ("train", "validation", "test"):
        (tmp_path / "texts" / split).mkdir(parents=True)
        (tmp_path / "texts" / split / "a.txt").write_text(f"{split} " * 50)
    other, _ = prepare("text_files", tmp_path / "other", input=str(tmp_path / "texts"))
    with pytest.raises(UserError, match=r"small-seed0 holds a run on other data than .*other"):
        compare.main([*given, f"--store={other.folder}"])
    assert written(output) == before


PLANNED = [Contender(name, f"{name}.gin", tokens_per_step=64, steps=8) for name in ("one", "two")]
COST = {"parameters": 1000, "model_flops_per_token": 6e6, "hardware_flops_per_token": 8e6}


def finished(output, contender, seed, nats, tokens, **changes):
    """A run's folder as `train` and `evaluate` leave it."""
    workdir = output / f"{contender.name}-seed{seed}"
    (workdir / "evaluation").mkdir(parents=True)
    documents = {"name": [f"{i}.txt" for i in range(len(nats))], "nats": list(nats), "tokens": list(tokens)}
    bits = float(np.sum(nats) / np.sum(tokens) / np.log(2))
    score = {
        "bits_per_token": bits,
        "bits_per_byte": bits / 2,
        "per_document": {**documents, "bytes": [2 * count for count in tokens], **changes},
    }
    (workdir / "evaluation" / "test-8.json").write_text(json.dumps(score))
    speeds = [1.0, *(100.0 if contender.name == "one" else 50.0,) * 3]
    rows = [{"step": i, "tokens_per_second": speed} for i, speed in enumerate(speeds, start=1)]
    rows += [{"step": step, "validation_bits_per_byte": 3.0 + seed} for step in (4, 8)]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Run(contender, seed, workdir, ()), score


ABOUT = {"tokens": 512, "store": "data/some", "split": "test", "bindings": [], "missing": ["two-seed2"]}


def test_figures_are_over_seeds_and_documents(tmp_path, capsys):
    rng = np.random.default_rng(0)
    tokens = [int(count) for count in rng.integers(10, 100, 20)]
    nats = {(i, seed): rng.normal(2 + i / 10, 0.3, 20) * tokens for i in range(2) for seed in range(2)}
    scores = dict(finished(tmp_path, PLANNED[i], seed, nats[i, seed], tokens) for i, seed in nats)
    write(tmp_path, ABOUT, scores, dict.fromkeys(PLANNED, COST))
    one, two = json.loads((tmp_path / "comparison.json").read_text())["configs"]
    means = [(nats[i, 0] + nats[i, 1]) / 2 for i in range(2)]
    bits = two["bits_per_token"]
    assert bits["mean"] == pytest.approx(means[1].sum() / sum(tokens) / np.log(2))
    assert bits["spread"] == pytest.approx(abs(np.subtract(*bits["by_seed"])))
    np.testing.assert_allclose(bits["interval"], np.divide(ratio_interval(means[1], tokens), np.log(2)))
    np.testing.assert_allclose(np.multiply(two["bits_per_byte"]["interval"], 2), bits["interval"])
    apart = two["difference"]["bits_per_token"]
    assert apart["mean"] == pytest.approx(bits["mean"] - one["bits_per_token"]["mean"])
    np.testing.assert_allclose(apart["interval"], np.divide(paired_interval(*means[::-1], tokens), np.log(2)))
    assert two["relative_time_per_token"] == 2.0, "the first row, in which a run compiles, does not count"
    assert two["curve"] == {"tokens": [256, 512], "bits_per_byte": [3.5, 3.5]}
    told = capsys.readouterr().out
    assert "Not finished: two-seed2." in told
    low, high = two["difference"]["bits_per_byte"]["interval"]
    line = (tmp_path / "comparison.md").read_text().splitlines()[5]
    assert line.startswith("| two | 1k | 6M | 8M | 2.00 | ") and line.endswith(f" [{low:+.3f}, {high:+.3f}] |")


def test_scores_of_other_documents_are_refused(tmp_path):
    scores = [finished(tmp_path, PLANNED[0], 0, [3.0, 4.0], [2, 2])]
    scores.append(finished(tmp_path, PLANNED[1], 0, [3.0, 4.0], [2, 2], name=["a", "b"]))
    with pytest.raises(UserError, match=r"two-seed0 was evaluated on other documents than .*one-seed0"):
        write(tmp_path, ABOUT, dict(scores), dict.fromkeys(PLANNED, COST))


def test_a_run_that_fails_does_not_keep_the_others(corpus, configs, tmp_path, monkeypatch):
    def call(command, arguments, *_):
        if command == "train" and "wide" in arguments[0]:
            raise UserError("train ended with exit code 2")
        if command == "evaluate":
            finished(tmp_path, Contender(Path(arguments[0]).name.removesuffix("-seed0"), "", 64, 8), 0, [3.0], [2])

    monkeypatch.setattr(compare, "call", call)
    monkeypatch.setattr(compare, "cost", lambda *_: COST)
    with pytest.raises(UserError, match=r"1 of 2 runs failed, .*: .*wide-small-seed0 \(train ended with exit code 2\)"):
        compare.main(arguments(configs, corpus.folder, tmp_path))
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert [entry["name"] for entry in document["configs"]] == ["small"]
    assert document["missing"] == ["wide-small-seed0"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tokens=0"], "--tokens: '0' is not a number, 1 or more"),
        (["--gin.STEPS=3"], "--gin.STEPS: a comparison sets it by --tokens"),
        (["--gin.train.seed=3"], "--gin.train.seed: a comparison sets it by --seeds"),
        (["--gin.DIMM=3"], "no gin name DIMM: did you mean DIM?"),
        (["--store=nowhere"], "no prepared data in nowhere"),
        (["--split=tset"], "has no split 'tset'"),
        (["--table_only"], "has no finished run yet"),
    ],
)
def test_mistakes_are_told_in_one_line_and_nothing_is_written(corpus, configs, tmp_path, capsys, more, message):
    with pytest.raises(SystemExit) as exit_code:
        run_command(compare.main, arguments(configs[:1], corpus.folder, tmp_path / "output", *more))
    told = capsys.readouterr().err
    assert exit_code.value.code == MISTAKE
    assert message in told and told.startswith("error: ") and told.count("\n") == 1
    assert not (tmp_path / "output").exists()


def test_a_task_is_prepared_where_that_needs_nothing(configs, tmp_path, monkeypatch):
    called = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "call", lambda command, arguments, *_: called.append((command, arguments)))
    given = [configs[0], "--tokens=64", "--output=output"]
    with pytest.raises(UserError, match="no prepared data in data/python_stdlib"):
        compare.main([*given, "--task=python_stdlib"])
    assert called == [("prepare", ["--task=python_stdlib"])]
    with pytest.raises(
        UserError, match=r"run python -m block_recurrent.prepare --task=enwik8_bytes --input=\.\.\. first"
    ):
        compare.main([*given, "--task=enwik8_bytes"])


def test_one_comparison_at_a_time(tmp_path):
    with compare.locked(tmp_path), pytest.raises(UserError, match="is at work there"), compare.locked(tmp_path):
        pass


def test_configs_of_one_name_are_told_apart_by_their_folders():
    files = ["configs/pg19/slide_13l.gin", "configs/github/slide_13l.gin", "configs/pg19/xl_512.gin"]
    assert list(compare.named(files)) == ["slide_13l", "github-slide_13l", "xl_512"]
    with pytest.raises(UserError, match="a config is given twice"):
        compare.named([*files, files[0]])
