"""What the commands' argument parsers share."""

import argparse
from typing import NoReturn

from block_recurrent.errors import UserError
from block_recurrent.ranges import WHOLE_0


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, without the usage above them."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; {self.prog} --help shows what there is")


def command_parser(command: str, about: str) -> Parser:
    """A parser that shows the module's text and knows --debug."""
    parser = Parser(
        f"python -m block_recurrent.{command}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def gin_bindings(parser: Parser, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses arguments of which --gin.NAME=VALUE are bindings."""
    prefix = "--gin."
    bindings = [argument.removeprefix(prefix) for argument in arguments if argument.startswith(prefix)]
    return parser.parse_args([argument for argument in arguments if not argument.startswith(prefix)]), bindings


def step(text: str) -> int | str:
    """The value of --step: a number, or "best"."""
    try:
        return text if text == "best" else int(WHOLE_0(text))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no step: give its number, or best") from error
