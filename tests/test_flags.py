"""Every numeric flag of every command has a range, and flags that cannot act together are refused."""

import argparse
import importlib
from pathlib import Path

import pytest

from block_recurrent import compare, prepare, report
from block_recurrent.errors import UserError
from block_recurrent.ranges import Range

ROOT = Path(__file__).parents[1]


class Caught(Exception):
    """Holds the parser of a command that was about to parse its arguments."""


def commands() -> list[str]:
    """The modules that take flags."""
    files = [*ROOT.glob("block_recurrent/**/*.py"), *ROOT.glob("launch/*.py"), *ROOT.glob("benchmarks/*.py")]
    takers = [file for file in files if "add_argument(" in file.read_text() and file.name != "commandline.py"]
    return sorted(".".join(file.relative_to(ROOT).with_suffix("").parts) for file in takers)


def caught(parser, *arguments):
    raise Caught(parser)


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """All flags of a parser and of its subcommands."""
    own = [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return own + [flag for each in below for one in each.choices.values() for flag in actions(one)]


def parser_of(module: str, monkeypatch) -> argparse.ArgumentParser:
    """What a command parses its arguments with."""
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", caught)
    main = importlib.import_module(module).main
    with pytest.raises(Caught) as found:
        main([]) if main.__code__.co_argcount else main()
    return found.value.args[0]


@pytest.mark.parametrize("module", commands())
def test_every_number_has_a_range(module, monkeypatch):
    for action in actions(parser_of(module, monkeypatch)):
        name = action.option_strings[-1] if action.option_strings else action.dest
        is_number = isinstance(action.default, int | float) and not isinstance(action.default, bool)
        ranged = isinstance(action.type, Range)
        assert ranged or not (is_number or action.type in (int, float, complex)), f"{name} takes any number"
        if not ranged and action.type is not None:  # several numbers, or one among words
            for nonsense in ("nan", "inf", "-1", "9" * 20):
                try:
                    value = action.type(nonsense)
                except (ValueError, argparse.ArgumentTypeError):
                    continue
                assert not holds_number(value), f"{name} takes {nonsense}"


def holds_number(value: object) -> bool:
    each = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(one, int | float) and not isinstance(one, bool) for one in each)


def test_the_commands_are_found():
    assert {"block_recurrent.train", "block_recurrent.generate", "launch.__main__", "benchmarks.step"} <= set(
        commands()
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--list", "--task=text_files"], "--task does not go with --list"),
        (["--show=data/x", "--task=text_files"], "--task does not go with --show"),
        (["--show=data/x", "--output=y"], "--output does not go with --show"),
        (["--mixture=a=1,b=2", "--output=x", "--vocabulary=bytes"], "--vocabulary does not go with --mixture"),
        (["--task=text_files", "--size=100"], "--size does not go with --task"),
        (["--task=text_files", "--document=2"], "--document does not go with --task"),
        (["--train_vocabulary=x.model", "--task=text_files", "--separator"], "--separator does not go with"),
        (["--task=text_files", "--workers=0"], "--workers: '0' is not a whole number"),
        (["--task=github_bytes", "--max_file_bytes=-1"], "--max_file_bytes: '-1' is not a whole number"),
        (["--show=data/x", "--document=-1"], "--document: '-1' is not a whole number"),
        (["--input=x"], "say what to do"),
    ],
)
def test_prepare_refuses_flags_without_use(flags, message):
    with pytest.raises(UserError, match=message):
        prepare.main(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens=nan"], "--tokens: 'nan' is not a number"),
        (["--tokens=0"], "--tokens: '0' is not a number"),
        (["--tokens=1e30"], "--tokens: '1e30' is not a number"),
        (["--seeds=0,-1"], "--seeds: '-1' is not a whole number"),
        (["--seeds=12345678901234567890"], "--seeds: '12345678901234567890' is not a whole number"),
    ],
)
def test_compare_refuses_what_makes_no_sense(flags, message):
    with pytest.raises(UserError, match=message):
        compare.parse(["x.gin", "--store=y", "--output=z", *flags])


def test_a_report_without_samples_trusts_nobody():
    with pytest.raises(UserError, match="--trust is for samples"):
        report.main(["runs/any", "--no_samples", "--trust=mine"])
