"""Runs that come from elsewhere: links that lead out of them, and files that are not what a run writes."""

import pytest

from block_recurrent import compare, evaluate, generate, report
from block_recurrent.errors import UserError

COMMANDS = {
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
