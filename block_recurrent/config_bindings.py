"""What --gin.NAME=VALUE may leave out: quotes around text, imports, and the gin files that a value rests on."""

import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
from gin import config_parser

from block_recurrent.errors import UserError

ROOT = Path(__file__).parents[1]
BASE = "configs/base"
MACRO = "gin.macro"
TRAIN = "block_recurrent.training.loop.train"
MESH = "block_recurrent.training.sharding.make_mesh"
PATTERN = ("", "block_recurrent.layers.stack.pattern")

# What a config that comes from elsewhere may import, refer to and call: modules, or packages that end in a dot.
TRUSTED = (
    "block_recurrent.layers.",
    "block_recurrent.training.loop",
    "block_recurrent.training.optimizers",
    "block_recurrent.training.plateau",
    "block_recurrent.training.sharding",
    "models.",
)

# Where layers are defined that any PATTERN may name; of several files that know a name, the first defines it.
LAYER_FILES = ("sliding_window", "block_recurrent", "memorizing", "recurrences", "baselines")

NO_VALUE = object()  # a text that gin cannot read as a value

Key = tuple[str, str]  # scope and selector, as gin has them
Bindings = dict[Key, dict[str, Any]]


class Inert(config_parser.ParserDelegate):
    """Reads statements without looking anything up."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> None:
        return None

    def macro(self, macro_name: str) -> None:
        return None


def read_value(text: str) -> Any:
    """Reads a gin value, with None for references; NO_VALUE where it is none."""
    try:
        (statement,) = config_parser.ConfigParser(f"x = {text}", Inert())
    except Exception:  # what tokenizers and parsers raise over any text
        return NO_VALUE
    return statement.value


def with_quotes(binding: str) -> str:
    """Quotes the value of NAME=VALUE where it is text without quotes, and text is expected."""
    name, _, text = (part.strip() for part in binding.partition("="))
    if text.startswith(("@", "%")):
        return binding
    value, now, expected = read_value(text), present_value(name), kinds_expected(name)
    if value is NO_VALUE and text[0] in "'\"":
        raise UserError(f"--gin.{binding}: the quotes do not match")
    if value is NO_VALUE and (str in expected or isinstance(now, str)):
        return f"{name}={text!r}"
    if value is NO_VALUE:
        raise UserError(f"--gin.{binding}: {text!r} is no gin value; {expected_form(name, now, expected)}")
    is_scalar = value is None or isinstance(value, bool | int | float)
    return f"{name}={text!r}" if is_scalar and expected == {str} else binding


def expected_form(name: str, now: Any, expected: set) -> str:
    """Says what a value of the same kind looks like."""
    if isinstance(now, bool) or expected == {bool}:
        return f"give True or False: --gin.{name}={bool(now)}"
    if isinstance(now, int | float) or expected & {int, float}:
        return f"give a number: --gin.{name}={now or 1}"
    if isinstance(now, gin.config.ConfigurableReference):
        return f"give a reference, which begins with @: --gin.{name}='{now!r}'"
    return f"text needs quotes inside quotes: --gin.{name}=\"'text'\""


def present_value(name: str) -> Any:
    """The value of a macro or a parameter, through macros; None for what has none."""
    key, argument = key_of(name)
    return through_macros(gin.config._CONFIG.get(key, {}).get(argument))


def through_macros(value: Any) -> Any:
    while is_macro(value):
        value = gin.config._CONFIG.get(value.config_key, {}).get("value")
    return value


def is_macro(value: Any) -> bool:
    return isinstance(value, gin.config.ConfigurableReference) and value.config_key[1] == MACRO


def key_of(name: str) -> tuple[Key, str]:
    """Where gin keeps the value of a macro or a parameter."""
    if is_macro_name(name):
        return (name, MACRO), "value"
    parsed = gin.config.ParsedBindingKey.parse(name)
    return parsed.config_key, parsed.arg_name


def is_macro_name(name: str) -> bool:
    return "." not in name.rpartition("/")[2]


def kinds_expected(name: str) -> set[type]:
    """The types that are annotated, or else those of the defaults, where a value ends up."""
    kinds = set()
    for (_, selector), argument in destinations(name):
        parameter = inspect.signature(gin.config._REGISTRY[selector].wrapped).parameters.get(argument)
        if parameter is None:
            continue
        is_union = typing.get_origin(parameter.annotation) in (types.UnionType, typing.Union)
        kinds |= set(typing.get_args(parameter.annotation)) if is_union else {parameter.annotation}
        if isinstance(parameter.default, str):
            kinds.add(str)
    return kinds


def destinations(name: str) -> Iterator[tuple[Key, str]]:
    """The parameters that a name gives a value to: itself, or those that a macro is bound to."""
    if not is_macro_name(name):
        yield key_of(name)
        return
    for key, given in list(gin.config._CONFIG.items()):
        for argument, value in given.items():
            if is_macro(value) and value.config_key[0] == name:
                yield from destinations(key[0]) if key[1] == MACRO else [(key, argument)]


def register_names(binding: str) -> None:
    """Makes known to gin what a binding names of this project's functions and classes, wherever they are."""
    name, _, text = (part.strip() for part in binding.partition("="))
    if not is_macro_name(name):
        register(name.rpartition("/")[2].rpartition(".")[0])
    for reference in re.findall(r"@([\w./]+)", text):
        register(reference.rpartition("/")[2])


def register(selector: str) -> None:
    """Makes a function or class known to gin by the end of its dotted name."""
    if gin.config._REGISTRY.matching_selectors(selector):
        return
    found = [name for name in dict.fromkeys(names_in_modules()) if f".{name}".endswith(f".{selector}")]
    if len(found) > 1:
        short = [".".join(name.split(".")[-2:]) for name in found]
        raise UserError(f"{selector} may be {' or '.join(short)}: give the longer name")
    if found:
        module, _, name = found[0].rpartition(".")
        gin.register(getattr(importlib.import_module(module), name), module=module)


def names_in_modules() -> Iterator[str]:
    """The dotted names of public functions and classes in trusted modules and in those that the config imports."""
    for module, file in {**trusted_files(), **imported_files()}.items():
        for name in re.findall(r"^(?:def|class) ([A-Za-z]\w*)", file.read_text(), re.MULTILINE):
            yield f"{module}.{name}"


def trusted_files() -> dict[str, Path]:
    """The files of trusted modules, by the modules' names."""
    paths = ((name, ROOT / name.replace(".", "/")) for name in TRUSTED)
    files = [
        file for name, path in paths for file in (path.glob("*.py") if name[-1] == "." else [path.with_suffix(".py")])
    ]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in sorted(files)}


def imported_files() -> dict[str, Path]:
    modules = {statement.module: sys.modules.get(statement.module) for statement in gin.config._IMPORTS}
    return {name: Path(module.__file__) for name, module in modules.items() if getattr(module, "__file__", None)}


def include_for_references(binding: str) -> str | None:
    """Includes configs/base/NAME.gin where a value calls NAME, whose arguments the config does not give.

    Returns what it has set, for those who want to say so.
    """
    for reference in re.findall(r"@([\w./]+)\(\)", binding.partition("=")[2]):
        configurable = gin.config._REGISTRY.get_match(reference.rpartition("/")[2])
        file = f"{BASE}/{configurable.name.lower()}.gin" if configurable else ""
        if (ROOT / file).is_file() and arguments_lacking(configurable):
            values = {key[0]: given["value"] for key, given in definitions(file).items() if key[1] == MACRO}
            gin.parse_config_file(file)
            return f"{file} goes with it: {', '.join(f'{name} = {value!r}' for name, value in values.items())}"
    return None


def arguments_lacking(configurable: Any) -> list[str]:
    """The arguments without a default that the config gives in no scope."""
    given = {
        name for (_, selector), each in gin.config._CONFIG.items() if selector == configurable.selector for name in each
    }
    parameters = inspect.signature(configurable.wrapped).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.name not in given]


def bound(key: Key) -> dict[str, Any]:
    return gin.config._CONFIG.get(key, {})


def definitions(file: str) -> Bindings:
    """What a gin file binds, read apart from the configuration."""
    config, imports = dict(gin.config._CONFIG), set(gin.config._IMPORTS)
    try:
        gin.config._CONFIG.clear()
        gin.parse_config_file(file)
        return dict(gin.config._CONFIG)
    finally:
        gin.config._CONFIG.clear()
        gin.config._CONFIG.update(config)
        gin.config._IMPORTS.clear()
        gin.config._IMPORTS.update(imports)


def add_missing_layers() -> None:
    """Defines the layers that patterns name and the config lacks, as configs/base has them; what is given stays."""
    for given in [given for (_, selector), given in gin.config._CONFIG.items() if selector == PATTERN[1]]:
        spec, layers = through_macros(given.get("spec")), through_macros(given.get("layers"))
        if isinstance(spec, str) and isinstance(layers, dict):
            lacking = [name for name in re.findall(r"[A-Za-z_]\w*", spec) if not is_defined(layers.get(name))]
            for name in dict.fromkeys(lacking):
                layers = {**project_layer(name, layers.get(name)), **layers}
            given["layers"] = layers


def is_defined(reference: Any) -> bool:
    """Whether the config gives a layer any argument."""
    if not isinstance(reference, gin.config.ConfigurableReference):
        return reference is not None
    return any(bound(key) for key in keys_of(reference))


def project_layer(name: str, present: Any) -> dict[str, Any]:
    """Adds what configs/base binds for a layer of this name; returns the name with its reference, or nothing.

    A reference that is `present` under the name is left alone where it is another layer's.
    """
    for file in LAYER_FILES:
        found = definitions(f"{BASE}/{file}.gin")
        reference = found[PATTERN]["layers"].get(name)
        if reference is not None and (present is None or present.configurable == reference.configurable):
            add_what_it_needs(reference, found)
            return {name: reference}
    return {}


def add_what_it_needs(reference: Any, found: Bindings) -> None:
    """Adds the bindings of a file that a reference rests on, where the config has none."""
    for key in keys_needed(reference, found) & set(found):
        here = gin.config._CONFIG.setdefault(key, {})
        for argument, value in found[key].items():
            here.setdefault(argument, value)


def keys_needed(reference: Any, found: Bindings) -> set[Key]:
    """The keys under which a file binds what a reference rests on, and what that rests on."""
    return set().union(*(keys_within(key, found) for key in keys_of(reference) & set(found)))


def keys_within(key: Key, found: Bindings | None = None, seen: set[Key] | None = None) -> set[Key]:
    """A key, and those of what its values refer to, and so on, called or bound."""
    found, seen = gin.config._CONFIG if found is None else found, set() if seen is None else seen
    if key not in seen:
        seen.add(key)
        for reference in gin.config.iterate_references(found.get(key, {})):
            for further in keys_of(reference):
                keys_within(further, found, seen)
    return seen


def keys_of(reference: Any) -> set[Key]:
    """The keys of the arguments that a reference is called with: those in its scope, and those of all scopes."""
    scope, selector = reference.config_key
    return {(scope, selector)} if selector == MACRO else {(scope, selector), ("", selector)}
