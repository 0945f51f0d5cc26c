"""Runs that come from elsewhere: links that lead out of them, and files that are not what a run writes."""

import contextlib
import json
import re

import pytest
from etils import epath

from block_recurrent import compare, evaluate, generate, report, train
from block_recurrent.errors import UserError
from block_recurrent.inference.run import open_run, read_metrics
from tests.training.test_runs import arguments

COMMANDS = {
    "train": lambda run: train.main([f"--gin_file={CONFIG}", "--gin.STORE=x", f"--workdir={run}"]),
    "evaluate": lambda run: evaluate.main([str(run)]),
    "generate": lambda run: generate.main([str(run), "--tokens=1"]),
    "report": lambda run: report.main([str(run), "--no_samples"]),
    "compare": lambda run: compare.main([CONFIG, "--store=x", f"--output={run.parent}", "--table_only"]),
}
CONFIG = "tests/tiny.gin"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["report.html", "evaluation", "evaluation/test-4.json", "checkpoints/4", "plots"])
def test_a_link_that_leads_out_of_a_run_is_refused(downloaded, tmp_path_factory, command, name):
    outside = tmp_path_factory.mktemp("outside") / "precious"
    if (downloaded / name).is_dir():
        (downloaded / name).rename(outside)
    else:
        outside.write_text("mine")
    (downloaded / name).parent.mkdir(exist_ok=True)
    (downloaded / name).symlink_to(outside)
    before = sorted((file, file.stat().st_mtime_ns) for file in outside.parent.rglob("*"))
    with pytest.raises(UserError, match=rf"{name} is a symbolic link that leads out of .*: remove it"):
        COMMANDS[command](downloaded)
    assert sorted((file, file.stat().st_mtime_ns) for file in outside.parent.rglob("*")) == before


def test_links_inside_a_run_and_to_it_are_taken(downloaded, tmp_path, capsys):
    (downloaded / "checkpoints" / "4").rename(downloaded / "kept")
    (downloaded / "checkpoints" / "4").symlink_to("../kept")
    (downloaded / "report.html").symlink_to("config.gin")
    (tmp_path / "link").symlink_to(downloaded)
    config = (downloaded / "config.gin").read_text()
    COMMANDS["report"](tmp_path / "link")
    assert (downloaded / "config.gin").read_text() == config, "the page was written through the link"
    COMMANDS["generate"](tmp_path / "link")


@pytest.mark.parametrize(
    "position",
    [
        "[1, 2]",
        "{}",
        '{"cursor": null}',
        '{"cursor": {"document": 3}}',
        '{"epoch": 1}',
        "7",
        "nonsense",
    ],
)
def test_a_position_of_another_program_is_refused(corpus, downloaded, position):
    """The latest checkpoint has no cursor of this project's; the advice that is given works."""
    (downloaded / "checkpoints" / "4" / "cursor" / "metadata").write_text(position)
    with pytest.raises(UserError, match=r"checkpoints/4 is damaged \(.*\); --skip_damaged goes on from step 2"):
        train.main(arguments(corpus, downloaded, "--gin.STEPS=5"))


@pytest.mark.parametrize("change", [{"evaluated": -1}, {"nats": "many"}, {"losses": [1]}, {"losses": [[4, None]]}])
def test_a_position_with_figures_of_another_kind_is_refused(corpus, downloaded, change):
    file = downloaded / "checkpoints" / "4" / "cursor" / "metadata"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=r"checkpoints/4 is damaged"):
        train.main(arguments(corpus, downloaded, "--gin.STEPS=5"))


def test_a_changed_config_is_not_called_damage(downloaded):
    for config in (downloaded / "config.gin", downloaded / "operative.gin"):
        config.write_text(re.sub(r"^DIM = 16$", "DIM = 24", config.read_text(), flags=re.MULTILINE))
    with pytest.raises(UserError, match=r"is of another model than the config: .* is \[.*16.*\] there, \[.*24") as told:
        generate.main([str(downloaded), "--tokens=1"])
    assert "damaged" not in str(told.value)


def test_a_binding_that_changes_the_parameters_is_not_called_damage(downloaded):
    with pytest.raises(UserError, match=r"than the config: .* is \[2, 16\] there, \[3, 16\] by the config"):
        evaluate.main([str(downloaded), "--gin.PATTERN='3*slide'"])


GARBAGE = {
    "binary": bytes(range(256)) * 20,
    "UTF-16": "\ufeff{}\n".encode("utf-16"),
    "deep": b"[" * 100_000,
    "other JSON": b"[1, 2]\n{}\n3\n",
    "text for numbers": b'{"step": 4, "validation_loss": "low", "loss": null}\n',
    "empty": b"",
}


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "config.gin", "train.log", "evaluation/test-4.json"])
def test_a_file_of_something_else_is_no_traceback(downloaded, name, kind):
    """Every command says in one line what is wrong, or does without the file."""
    (downloaded / name).parent.mkdir(exist_ok=True)
    (downloaded / name).write_bytes(GARBAGE[kind])
    calls = {
        "report": lambda: report.main([str(downloaded), "--no_samples"]),
        "best": lambda: open_run(downloaded).best,
        "metrics": lambda: open_run(downloaded).metrics,
    }
    for call in calls.values():
        with contextlib.suppress(UserError):
            call()


@pytest.mark.parametrize("kind", ["binary", "deep"])
def test_training_goes_on_beside_metrics_that_are_none(corpus, downloaded, kind):
    (downloaded / "metrics.jsonl").write_bytes(GARBAGE[kind])
    train.main(arguments(corpus, downloaded, "--gin.STEPS=5"))
    assert [row["step"] for row in read_metrics(epath.Path(downloaded / "metrics.jsonl")) if "loss" in row] == [5]
