"""The screen of a run, its pace, and the small file that shows from outside that it moves."""

import io
import json
import math
import re
import sys
from pathlib import Path

import jax
import pytest
from rich.console import Console

from block_recurrent import config, slices, train
from block_recurrent.inference.run import read_metrics
from block_recurrent.training import loop, progress, utilisation
from block_recurrent.training.bar import Bar
from block_recurrent.training.overview import parameter_table
from block_recurrent.training.progress import ProgressFile
from tests.training.screen import Screen

TINY = str(Path(__file__).parents[1] / "tiny.gin")


def read(file):
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def seen(corpus, tmp_path_factory):
    """A run at a terminal of 80 columns, on a device of known peak: its screens, its states, its folder."""
    folder, screen, states = tmp_path_factory.mktemp("seen"), Screen(80), []
    tell = ProgressFile.tell

    def noting(file, state, step):
        tell(file, state, step)
        states.append(read(folder / "progress" / "now.json"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgressFile, "tell", noting)
        patch.setattr(progress, "EVERY", 0.0)
        patch.setattr(utilisation, "peak_flops", lambda kind: 1e9)
        patch.setattr(sys, "stdout", screen)
        for name, value in {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}.items():
            patch.setenv(name, value)
        patch.setenv(progress.VARIABLE, str(folder / "progress" / "now.json"))
        train.main([f"--gin_file={TINY}", f"--workdir={folder / 'run'}", f"--gin.STORE='{corpus.folder}'"])
    return screen.screens, states, folder / "run"


def test_lines_are_above_the_bar_and_the_bar_has_the_figures(seen):
    screens, _, workdir = seen
    rows = read_metrics(workdir / "metrics.jsonl")
    held_out = {row["step"]: row["validation_loss"] / math.log(2) for row in rows if "validation_loss" in row}
    assert list(held_out) == [4, 8]
    for step, bits in held_out.items():
        line = f"step {step}: validation {bits:.4f} bits per byte, {bits:.4f} per token"
        first = next(screen for screen in screens if any(each.startswith(line) for each in screen))
        above, bar = first[: bar_of(first)], first[bar_of(first) :]
        assert any(each.startswith(f"step {step}: loss ") for each in above) and above[-1].startswith(line)
        best = min((each for each in held_out if each <= step), key=held_out.__getitem__)
        assert f"held out {bits:.4f}, best {held_out[best]:.4f} at step {best}" in "\n".join(bar)
    figures = " ".join(screens[-1][bar_of(screens[-1]) :])
    assert re.search(r"^done +━+ 8/8 steps  in 0:\d\d:\d\d", figures)
    assert re.search(r"loss \d\.\d{4} bits per token .* [\d,]+ tokens/s   [\d.]+% MFU   learning rate 0\.\d+", figures)
    assert re.search(r"   \d+% of time in evaluation", figures)


def bar_of(screen):
    """The line of the bar, of which there is one."""
    (place,) = [i for i, line in enumerate(screen) if "━" in line]
    return place


def test_no_screen_has_two_bars(seen):
    screens, _, workdir = seen
    assert all(sum("━" in line for line in screen) <= 1 for screen in screens)
    logged = [line[len("2026-01-01 12:00:00 ") :] for line in (workdir / "train.log").read_text().splitlines()]
    for line in logged:
        assert not line.startswith("step ") or line in " ".join(screens[-1]), "lines break between words"


def test_metrics_have_the_share_of_evaluations_and_the_utilisation(seen):
    rows = [row for row in read_metrics(seen[2] / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows if row["evaluation_share"] > 0] == [5], "after the evaluation of step 4"
    assert all(0 <= row["data_share"] + row["checkpoint_share"] + row["evaluation_share"] < 1 for row in rows)
    flops = rows[0]["model_flops_utilisation"] * 1e9 / rows[0]["tokens_per_second"]
    assert all(row["model_flops_utilisation"] == pytest.approx(row["tokens_per_second"] * flops / 1e9) for row in rows)
    assert 6 * 16 * 259 < flops < 100 * 16 * 259, "of a token, of which the embedding is the most"


def test_the_progress_file_moves_with_every_state_step_and_batch(seen):
    states = seen[1]
    told = [(state["state"], state["step"]) for state in states]
    order = list(dict.fromkeys(told))
    assert order[:3] == [("starting", 0), ("compiling", 0), ("training", 1)]
    assert order[-3:] == [("evaluating", 8), ("saving", 8), ("done", 8)]
    assert {("training", step) for step in range(1, 9)} | {("evaluating", 4), ("saving", 2)} <= set(order)
    assert told.count(("evaluating", 4)) == 1 + 3, "its beginning, and its batches"
    assert all(state["steps"] == 8 for state in states)
    times = [state["time"] for state in states]
    assert times == sorted(times)


def test_a_progress_file_that_cannot_be_written_is_told_once(tmp_path, capsys):
    (tmp_path / "file").touch()
    file = ProgressFile(str(tmp_path / "file" / "now.json"), steps=2)
    file.tell("training", 1)
    told = capsys.readouterr().err
    assert told.count("cannot be written") == 1 and told.count("\n") == 1
    ProgressFile(str(tmp_path / "now.json"), steps=2).tell("saving", 2)
    assert [entry.name for entry in tmp_path.iterdir() if "now" in entry.name] == ["now.json"]
    ProgressFile(None, steps=2).tell("training", 1)


def test_a_wide_terminal_has_all_figures_in_one_line_and_a_narrow_one_breaks_between_them():
    figures = ("loss 2.4131 bits per token", "held out 2.5212, best 2.4983 at step 1,000", "18,512 tokens/s")
    figures += ("41.2% MFU", "learning rate 0.000316", "12% of time in evaluation")
    for width, lines in ((160, 1), (80, 2), (50, 4)):
        console = Console(width=width, height=24, file=io.StringIO(), force_terminal=True, color_system=None)
        bar = Bar(console, steps=250_000, step=120_000)
        bar.show("evaluating, batch 1,234", figures)
        bar.close(done=False)
        console.file = io.StringIO()
        console.print(bar.screen())
        head, *shown = console.file.getvalue().splitlines()
        assert head.startswith("stopped ") and "120,000/250,000 steps  in 0:" in head
        assert len(shown) == lines and all(len(line) <= width for line in [head, *shown])
        assert "   ".join(shown) == "   ".join(figures)


def test_layers_that_are_alike_are_one_group_wherever_they_are():
    base = [TINY, "configs/base/block_recurrent.gin"]
    config.parse(base, ["STORE='x'", "STATES=8", "PATTERN='2*slide rec slide'"])
    lines = list(parameter_table(config.bindings_of(loop.train, "model")["model"]))
    groups = [line for line in lines if line.startswith("layer")]
    assert groups[0].startswith("layers 0-1, 3: 3 x 2,146 parameters") and groups[1].startswith("layer 2: ")
    assert len(groups) == 2 and sum(line.startswith("  keys ") for line in lines) == 2
    assert all(len(line) <= 80 for line in lines)


def test_peaks_are_of_generations_that_can_be_booked():
    assert all(utilisation.peak_flops(kind) for kind in utilisation.GENERATIONS)
    assert utilisation.peak_flops("TPU v5 lite") == slices.find("v5litepod-8").peak_flops
    assert utilisation.peak_flops("NVIDIA A100-SXM4-80GB") == slices.find("a100-80gb-8").peak_flops
    assert utilisation.peak_flops(jax.devices("cpu")[0].device_kind) is None
