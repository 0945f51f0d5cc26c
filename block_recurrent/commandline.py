"""What the commands' argument parsers share."""

import argparse


def command_parser(command: str, about: str) -> argparse.ArgumentParser:
    """A parser that shows the module's text and knows --debug."""
    parser = argparse.ArgumentParser(
        f"python -m block_recurrent.{command}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def gin_bindings(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses arguments of which --gin.NAME=VALUE are bindings."""
    prefix = "--gin."
    bindings = [argument.removeprefix(prefix) for argument in arguments if argument.startswith(prefix)]
    return parser.parse_args([argument for argument in arguments if not argument.startswith(prefix)]), bindings


def step(text: str) -> int | str:
    """The value of --step: a number, or "best"."""
    return text if text == "best" else int(text)
