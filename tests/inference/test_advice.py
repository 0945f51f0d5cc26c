"""Every piece of advice that a message gives works when it is typed."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from block_recurrent import evaluate, generate, prepare, report, train
from block_recurrent.errors import UserError
from tests.training.test_runs import arguments

MODULES = {module.__name__: module for module in (evaluate, generate, prepare, train)}


def message_of(call) -> str:
    with pytest.raises(UserError) as told:
        call()
    assert "\n" not in str(told.value).strip()
    return str(told.value)


def typed(command: str) -> None:
    """Runs a command of a message, `... -m block_recurrent.NAME ...`."""
    module, *words = shlex.split(command.partition(" -m ")[2])
    MODULES[module].main(words)


@pytest.fixture
def texts(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / "texts" / split).mkdir(parents=True)
        (tmp_path / "texts" / split / "one.txt").write_text(f"alpha beta gamma {split} " * 20)
    return tmp_path / "texts"


def test_another_step_where_a_checkpoint_is_damaged(downloaded, tmp_path):
    for file in (downloaded / "checkpoints" / "4" / "params").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(b"garbage")
    for command in (evaluate, generate):
        message = message_of(lambda command=command: command.main([str(downloaded)]))
        assert "skip_damaged" not in message, "these commands have no such flag"
        (flag,) = re.findall(r"evaluate and generate read another with (--step=\d+)$", message)
        command.main([str(downloaded), flag, *(["--tokens=1"] if command is generate else [])])


def test_data_that_is_not_here(downloaded, corpus, tmp_path):
    about = json.loads((downloaded / "run.json").read_text())
    (downloaded / "run.json").write_text(json.dumps({**about, "store": "/elsewhere/store"}))
    message = message_of(lambda: evaluate.main([str(downloaded)]))
    assert "trained on /elsewhere/store, which is not here" in message
    assert re.findall(r"--\w+=\w+", message) == ["--store=FOLDER", "--text=FILE"]
    evaluate.main([str(downloaded), f"--store={corpus.folder}"])
    (tmp_path / "mine.txt").write_text("alpha beta")
    evaluate.main([str(downloaded), f"--text={tmp_path / 'mine.txt'}"])


@pytest.mark.parametrize("dynamic", [[], ["--dynamic", "--statistics=50"]], ids=["as it is", "dynamic"])
def test_data_that_has_changed(downloaded, dynamic):
    about = json.loads((downloaded / "run.json").read_text())
    about["splits"]["test"] = about["splits"]["train"] = "other"
    (downloaded / "run.json").write_text(json.dumps(about))
    (flag,) = re.findall(
        r"if you mean it, evaluate with (--store=.*)$", message_of(lambda: evaluate.main([str(downloaded), *dynamic]))
    )
    evaluate.main([str(downloaded), flag, *dynamic])


def test_a_store_of_another_vocabulary(downloaded, texts, tmp_path):
    common = ["--task=text_files", f"--input={texts}"]
    (tmp_path / "words.txt").write_text("\n".join(["<unk>", "<eos>", "alpha", "beta", "gamma", ""]))
    prepare.main([*common, f"--output={tmp_path / 'other'}", f"--vocabulary={tmp_path / 'words.txt'}"])
    message = message_of(lambda: evaluate.main([str(downloaded), f"--store={tmp_path / 'other'}"]))
    (flag,) = re.findall(r"prepare it with (--vocabulary=.*)$", message)
    prepare.main([*common, f"--output={tmp_path / 'mine'}", flag])
    evaluate.main([str(downloaded), f"--store={tmp_path / 'mine'}"])


def test_a_store_that_is_nowhere(downloaded, texts, tmp_path):
    message = message_of(lambda: evaluate.main([str(downloaded), f"--store={tmp_path / 'mine'}"]))
    typed(message.partition("make it with ")[2].replace("YOUR_TEXTS", str(texts)))
    evaluate.main([str(downloaded), f"--store={tmp_path / 'mine'}"])


def test_a_package_of_somebody_else(downloaded):
    config = (downloaded / "config.gin").read_text()
    mark = "from models import sliding_window\n"
    (downloaded / "config.gin").write_text(config.replace(mark, f"{mark}import colorsys\n"))
    for command in (generate, evaluate):
        (flag,) = re.findall(
            r"pass (--trust=\w+)$", message_of(lambda command=command: command.main([str(downloaded)]))
        )
        command.main([str(downloaded), flag, *(["--tokens=1"] if command is generate else [])])


def test_the_best_of_a_run_that_keeps_none(corpus, downloaded):
    shutil.rmtree(downloaded / "checkpoints" / "4")  # the one that was evaluated
    message = message_of(lambda: evaluate.main([str(downloaded), "--step=best"]))
    steps, flag = re.findall(r"choose one of ([\d, ]+); train .* with (--gin\S+)$", message)[0]
    evaluate.main([str(downloaded), f"--step={steps}"])
    train.main(arguments(corpus, downloaded, "--gin.STEPS=4", flag))
    evaluate.main([str(downloaded), "--step=best"])


def test_the_commands_of_a_report(downloaded, texts, tmp_path, monkeypatch, capsys):
    """All of them, from the folder of a downloaded run whose name has a blank."""
    moved = downloaded.rename(tmp_path / "my run")
    (tmp_path / "README.md").write_text("alpha beta gamma")
    monkeypatch.chdir(tmp_path)
    report.main([str(moved), "--no_samples"])
    commands = re.findall(r"^  \w[\w, ]+?  +(\S+ -m block_recurrent\..*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        typed(command.replace("FOLDER", str(texts)))
    assert (moved / "checkpoints" / "8").is_dir() and Path("runs/mine/checkpoints/8").is_dir()
