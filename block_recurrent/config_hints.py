"""What to do about a gin name that a config does not have."""

import difflib
import inspect
import re
from collections.abc import Iterable

import gin

from block_recurrent.config_bindings import (
    BASE,
    LAYER_FILES,
    MACRO,
    MESH,
    PATTERN,
    ROOT,
    TRAIN,
    definitions,
    keys_needed,
)

# What a file of configs/base may set of training and still be added to any config.
ADDED = {"optimizer", "plateau", "keep_best"}


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name most like a mistyped one."""
    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if close:
        return f": did you mean {close[0]}?"
    return f": known are {', '.join(known)}" if 0 < len(known) <= 20 else ""


def unknown_macro(name: str, known: Iterable[str], takes_files: bool) -> str:
    """A hint at what sets what a name that is not in the config seems to mean, or at a name like it."""
    if parameter := parameter_called(name.lower(), known):
        return f": --gin.{parameter}=VALUE sets it"
    if files := [file for file in sorted((ROOT / BASE).glob("*.gin")) if defines(file.read_text(), name)]:
        return where_defined(name, [file.stem for file in files], takes_files)
    macros = [each for each in known if "." not in each]
    listed = "; block_recurrent.train with this --gin_file and --names lists what there is" if takes_files else ""
    return nearest(name, macros) or listed


def parameter_called(argument: str, known: Iterable[str]) -> str | None:
    """The parameter of that name: of training, of the mesh, or of what else the config gives arguments to."""
    for function in (TRAIN, MESH):
        if argument in parameters_of(function):
            return f"{function.rpartition('.')[2]}.{argument}"
    found = [each for each in known if each.rpartition(".")[2] == argument]
    return found[0] if len(found) == 1 else None


def parameters_of(selector: str) -> list[str]:
    configurable = gin.config._REGISTRY.get_match(selector)
    return list(inspect.signature(configurable.wrapped).parameters) if configurable else []


def defines(text: str, name: str) -> bool:
    return re.search(rf"^{re.escape(name)} *=", text, re.MULTILINE) is not None


def where_defined(name: str, stems: list[str], takes_files: bool) -> str:
    """Says which files of configs/base define a name, and what brings it into a config."""
    for stem in (stem for stem in LAYER_FILES if stem in stems and takes_files):
        if layers := layers_with(name, stem):
            return f": it is of layers of {BASE}/{stem}.gin; give a --gin.PATTERN that names {' or '.join(layers)}"
    files = [f"{BASE}/{stem}.gin" for stem in stems]
    if len(files) > 1:
        return f": {', '.join(files)} define it, and the config includes none of them"
    if takes_files and (sets := what_it_adds(files[0])):
        return f": {files[0]} defines it; add --gin_file={files[0]}, which sets {', '.join(sets)}"
    return f": {files[0]} defines it, which the config does not include"


def layers_with(macro: str, stem: str) -> list[str]:
    """The layers of a file that are given a macro."""
    found = definitions(f"{BASE}/{stem}.gin")
    layers = found[PATTERN]["layers"]
    return [name for name, reference in layers.items() if (macro, MACRO) in keys_needed(reference, found)]


def what_it_adds(file: str) -> list[str]:
    """The arguments of training that a file sets; none if it is more than an addition to a config."""
    found = definitions(file)
    given = set(found.get(("", TRAIN), {}))
    is_addition = given <= ADDED and not any("language_model" in selector for _, selector in found)
    return [f"train.{argument}" for argument in sorted(given)] if is_addition else []
