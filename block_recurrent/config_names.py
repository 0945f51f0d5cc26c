"""What can be changed in a config: names, their values, and a line on each from gin files and docstrings."""

import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import gin

from block_recurrent.config_bindings import (
    BASE,
    LAYER_FILES,
    MACRO,
    MESH,
    ROOT,
    TRAIN,
    destinations,
    is_macro_name,
    keys_within,
    kinds_expected,
    register,
)

# Arguments that no config gives: those of flags, and what flax or a mesh has besides.
NOT_BOUND = {"skip_damaged", "profile_steps", "patience", "warm_start", "devices", "name", "parent"}
WIDE, WIDEST = 24, 60  # of the column of values: shorter ones are filled up, longer ones cut


class Name(NamedTuple):
    """A macro or a parameter of a config, and what is known about it."""

    name: str
    value: str
    about: str


def changeable(files: Iterable[str]) -> list[Name]:
    """The macros and the parameters that the parsed config binds, which these files define; then those that it may.

    The latter are all other arguments of what a run of this config calls, with their defaults.
    """
    comments = dict(comments_in([*(f"{BASE}/{stem}.gin" for stem in LAYER_FILES), *files]))
    values = dict(re.findall(r"^([\w./]+) = (.*)", gin.config_str(max_line_length=1 << 20), re.MULTILINE))
    given = set(map(short, values))
    values |= {name: value for name, value in defaults() if short(name) not in given}
    return [Name(short(name), value, about(name, values, comments)) for name, value in values.items()]


def defaults() -> Iterator[tuple[str, str]]:
    """The arguments with a default value that can be bound, of training, of its mesh and of what the config calls."""
    called = {selector for _, selector in keys_within(("", TRAIN))} - {MACRO}
    for selector in (TRAIN, MESH, *sorted(called - {TRAIN, MESH})):
        with gin.unlock_config():
            register(selector)
        for parameter in inspect.signature(gin.config._REGISTRY.get_match(selector).wrapped).parameters.values():
            if parameter.name not in NOT_BOUND and is_a_value(parameter.default):
                yield f"{selector}.{parameter.name}", repr(parameter.default)


def is_a_value(default: object) -> bool:
    """Whether gin has a way to write it."""
    return default is None or isinstance(default, bool | int | float | str | tuple)


def show(names: Iterable[Name]) -> Iterator[str]:
    """Yields what can be changed, a line each."""
    names = list(names)
    widest = max(len(each.name) for each in names)
    for name, value, what in names:
        value = value if len(value) <= WIDEST else f"{value[: WIDEST - 3]}..."
        yield f"--gin.{name:<{widest}} = {value:<{WIDE}}  {what}".rstrip()


def short(name: str) -> str:
    """`train.rows` of `loop.train.rows`; what comes before a scope's slash stays."""
    scope, slash, selector = name.rpartition("/")
    return scope + slash + ".".join(selector.split(".")[-2:])


def about(name: str, values: dict[str, str], comments: dict[str, str]) -> str:
    """A line on a name: its comment in a gin file, or what is said of the parameters that it gives a value to."""
    used = {f"{key[1].rpartition('.')[2]}.{argument}": (key[1], argument) for key, argument in destinations(name)}
    told = [comments.get(short(name)), *map(comments.get, used), *(described(*each) for each in used.values())]
    if found := next((each for each in told if each), ""):
        return found
    if is_macro_name(name):
        return f"sets {', '.join(used)}"
    through = values[name][1:] if values[name].startswith("%") else None
    return about(through, values, comments) if through else types_of(name)


def types_of(name: str) -> str:
    """The types that a parameter may have, as they are annotated; for want of them, what it is a parameter of."""
    kinds = sorted(getattr(kind, "__name__", str(kind)) for kind in kinds_expected(name))
    return " or ".join(kinds) or f"an argument of {short(name).rpartition('.')[0]}"


def described(selector: str, argument: str) -> str:
    """What a docstring says of an argument, or the comment of its field, or its type."""
    function = gin.config._REGISTRY[selector].wrapped
    text = re.sub(r"\s+", " ", inspect.getdoc(function) or "")
    for sentence in re.split(r"(?<=[.:;]) ", text):
        if f"`{argument}`" in sentence:
            return sentence.rstrip(".:;")
    field = re.search(rf"^\s+{argument}: .*?  # (.*)", inspect.getsource(function), re.MULTILINE)
    return field[1] if field else ""


def comments_in(files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the names that gin files define and the comments behind them, those of included files first."""
    for file in files:
        block = ""
        for line in (Path(file) if Path(file).is_file() else ROOT / file).read_text().splitlines():
            if included := re.match(r"include '(.*)'", line):
                yield from comments_in([included[1]])
            elif re.match(r"[\w./]+:\s*(#|$)", line):
                block = f"{line.partition(':')[0]}."
            elif bound := re.match(r"(\s*)([\w./]+) *= .*?\s#\s*(.+)", line):
                yield short((block if bound[1] else "") + bound[2]), bound[3]
