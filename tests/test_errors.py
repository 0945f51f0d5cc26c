"""Commands say in one line what is missing, and end with the exit code of a mistake."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from block_recurrent.errors import MISTAKE, missing_package, run_command

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "train": ["--gin_file=configs/quickstart.gin", "--workdir=runs/any"],
    "evaluate": ["runs/any"],
    "generate": ["runs/any"],
    "report": ["runs/any"],
    "compare": ["configs/quickstart.gin", "--store=x", "--output=y"],
    "convert": ["--package=sru", "--weights=x.npz", "--output=y"],
    "plan": ["--gin_file=configs/quickstart.gin", "--slice=v4-8", "--fast"],
    "prepare": ["--task=text_files", "--input=README.md", "--output=x"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_python_without_packages_is_told_what_to_do(command, tmp_path):
    """`-S` leaves out the packages of an environment."""
    call = [sys._base_executable, "-S", "-m", f"block_recurrent.{command}", *COMMANDS[command]]
    ended = subprocess.run(call, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ended.returncode == MISTAKE
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: this Python, ") and ("-m pip install -r" in line or ".venv/bin/python" in line)


def test_jax_alone_may_be_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jax", None)

    def main(arguments):
        import jax  # noqa: F401

    with pytest.raises(SystemExit) as end:
        run_command(main, [])
    assert end.value.code == MISTAKE and "has no jax: " in capsys.readouterr().err


def test_a_package_of_somebody_else_is_no_business_of_ours():
    assert missing_package(ImportError("no module", name="mine")) is None
    assert missing_package(ValueError("no module")) is None


def test_a_device_without_memory_is_one_line(capsys):
    def main(arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 3992005248 bytes.\nmore")

    with pytest.raises(SystemExit) as end:
        run_command(main, [])
    told = capsys.readouterr().err
    assert end.value.code == MISTAKE and told.count("\n") == 1
    assert told.startswith("error: the device has not enough memory (Out of memory allocating 3992005248 bytes): take")
