"""gin for the commands: parse, say clearly what is wrong, and save what a run needs to be opened again.

Only gin files and commands know about gin; the library takes plain arguments.
"""

import copy
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import gin
from etils import epath
from gin import config_parser

from block_recurrent.config_bindings import (
    MACRO,
    MESH,
    ROOT,
    TRAIN,
    TRUSTED,
    Inert,
    add_missing_layers,
    bound,
    destinations,
    include_for_references,
    is_macro,
    is_macro_name,
    key_of,
    keys_of,
    keys_within,
    names_in_modules,
    register,
    register_names,
    through_macros,
    with_quotes,
)
from block_recurrent.config_hints import nearest, unknown_macro
from block_recurrent.errors import UserError
from block_recurrent.writing import write_text

Reference = gin.config.ConfigurableReference

CONFIG = "config.gin"
OPERATIVE = "operative.gin"

OF_EVALUATION = {"model", "rows", "segment"}  # arguments of training that what is trained depends on

# A run may go on longer, be watched more closely or run on other devices without being another run.
LENGTH = {"STEPS", "train.steps", "STOP_AFTER", "Plateau.stop_after"}
MAY_CHANGE = LENGTH | {"STORE", "DATA", "FSDP", "TENSOR"}
MAY_CHANGE |= {"train.log_every", "train.evaluate_every", "train.evaluation_batches"}
MAY_CHANGE |= {"train.checkpoint_every", "train.keep_checkpoints", "train.keep_every", "train.keep_best"}
MAY_CHANGE |= {"train.mesh", "train.store", "make_mesh.data", "make_mesh.fsdp", "make_mesh.tensor"}


def parse(files: Iterable[str], bindings: Iterable[str], saved: str = "", takes_files: bool = True) -> list[str]:
    """Parses gin files and the text of a saved config, then NAME=VALUE bindings over them; a mistake is a UserError.

    Returns a line about each further file that the bindings needed. Only where the command `takes_files` does a message
    advise one.
    """
    gin.clear_config()
    gin.config._LOCATION_PREFIXES[:] = ["", str(ROOT)]
    del gin.config._FILE_READERS[1:]  # a reader of package resources stumbles over folders that are not packages
    for file in files:
        if not (Path(file).is_file() or (ROOT / file).is_file()):
            known = [str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.gin")]
            raise UserError(f"no gin file {file}{nearest(file, known)}")
        explained(lambda file=file: gin.parse_config_file(file))
    explained(lambda: gin.parse_config(saved))
    bindings = list(bindings)
    notes = bind(bindings, takes_files)
    explained(add_missing_layers)
    use_mesh()
    require_macros()
    for binding in bindings:
        require_effect(binding)
    explained(gin.finalize)
    return notes


def bind(bindings: list[str], takes_files: bool) -> list[str]:
    """Binds NAME=VALUE, over what the values need of further files; returns a line about each of those."""
    for binding in bindings:
        if not binding.partition("=")[2].strip():
            raise UserError(f"--gin.{binding} has no value: write --gin.NAME=VALUE")
        explained(lambda binding=binding: register_names(binding))
    notes = [explained(lambda binding=binding: include_for_references(binding)) for binding in bindings]
    later = [binding for binding in bindings if not is_known(binding)]
    for binding in bindings:
        if binding not in later:
            bind_one(binding)
    if later:  # a pattern brings the names of its layers with it
        explained(add_missing_layers)
    for binding in later:
        if not is_known(binding):
            name = binding.partition("=")[0].strip()
            raise UserError(f"no gin name {name}{unknown_macro(name, defined_names(), takes_files)}")
        bind_one(binding)
    return [note for note in notes if note]


def bind_one(binding: str) -> None:
    explained(lambda: gin.parse_config(with_quotes(binding)))


def is_known(binding: str) -> bool:
    """Whether a binding is of a parameter, or of a macro that the config defines or uses."""
    name = binding.partition("=")[0].strip()
    return "." in name or name in defined_names() or name in macros_without_value()


def macros_without_value() -> list[str]:
    used = [reference for reference in gin.config.iterate_references(gin.config._CONFIG) if is_macro(reference)]
    return list(dict.fromkeys(each.config_key[0] for each in used if "value" not in bound(each.config_key)))


def use_mesh() -> None:
    """Gives training the mesh whose sizes are bound; refuses a config that gives it another."""
    sizes = [name for (_, selector), given in gin.config._CONFIG.items() if selector == MESH for name in given]
    training = gin.config._CONFIG.get(("", TRAIN))
    if not sizes or training is None:
        return
    if "mesh" not in training:
        explained(lambda: register(MESH))
        gin.parse_config(f"{TRAIN}.mesh = @{MESH}()")
    mesh = through_macros(training["mesh"])
    if not isinstance(mesh, Reference) or mesh.config_key[1] != MESH:
        raise UserError(
            f"make_mesh.{sizes[0]} is given, but train.mesh is {mesh!r}: give --gin.train.mesh='@make_mesh()' too"
        )


def require_macros() -> None:
    """Refuses a config that uses macros without a value; the size of the vocabulary is left to the data store."""
    if (size := vocabulary_size()) and size[0] in macros_without_value():
        gin.bind_parameter((size[0], MACRO, "value"), None)
    if missing := macros_without_value():
        flags = " ".join(f"--gin.{name}=VALUE" for name in missing)
        raise UserError(f"the config gives no value for {', '.join(missing)}: give {flags}")


def require_effect(binding: str) -> None:
    """Refuses an argument of what training never calls."""
    name = binding.partition("=")[0].strip()
    training = ("", TRAIN)
    if is_macro_name(name) or training not in gin.config._CONFIG:
        return
    selector = key_of(name)[0][1]
    if selector != TRAIN and selector not in {key[1] for key in keys_within(training)}:
        function = selector.rpartition(".")[2]
        raise UserError(f"--gin.{name} has no effect: nothing in the config calls {function}")


def require_effect_on_model(binding: str) -> None:
    """Refuses to bind, over a saved config, what neither the model nor the shape of its batches depends on."""
    name = binding.partition("=")[0].strip()
    model = bound(("", TRAIN)).get("model")
    within = set().union(*map(keys_within, keys_of(model))) if isinstance(model, Reference) else set()
    if not any(key in within or argument in OF_EVALUATION for key, argument in destinations(name)):
        raise UserError(f"--gin.{name} has no effect on a run that is trained: its model does not depend on it")


def vocabulary_size() -> tuple[str, Any] | None:
    """The name that the size of the model's vocabulary has, and its value, None if the config gives none.

    None for a model that has no such argument.
    """
    model = through_macros(bound(("", TRAIN)).get("model"))
    if not isinstance(model, Reference):
        return None
    scope, selector = model.config_key
    if "vocabulary_size" not in inspect.signature(gin.config._REGISTRY[selector].wrapped).parameters:
        return None
    value = {**bound(("", selector)), **bound((scope, selector))}.get("vocabulary_size")
    name = f"{scope}/{selector}.vocabulary_size".lstrip("/")
    while is_macro(value):
        name, value = value.config_key[0], bound(value.config_key).get("value")
    return name, value


def fill_vocabulary(size_of: Callable[[str], int]) -> None:
    """Gives the model the size that `size_of` says of the configured store, where the config gives none."""
    size = vocabulary_size()
    if size is None or size[1] is not None or "store" not in names_given_to(TRAIN):
        return
    found = size_of(bindings_of(TRAIN, "store")["store"])
    with gin.unlock_config():
        gin.parse_config(f"{size[0]} = {found}")


def explained(call: Callable) -> Any:
    """Calls gin, turning what it raises into one line with the nearest name."""
    try:
        return call()
    except UserError:
        raise
    except Exception as error:
        message = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
        if missing := re.search(r"(?:required argument:|arguments: \[)\s*'(\w+)'.* configurable '(\w+)'", message):
            name = f"{missing[2]}.{missing[1]}"
            raise UserError(f"the config gives no value for {name}: give --gin.{name}=VALUE") from error
        unknown = re.search(r"doesn't have a parameter named '(\w+)'", message)
        if unknown:
            hint = nearest(unknown[1], parameters_named_in(message))
        else:
            unknown = re.search(r"(?:[Nn]o configurable matching(?: reference)?|find|macro) '?@?%?([\w./]+)", message)
            known = [*selectors(), *short_names()]
            known += [name.rpartition(".")[2] for name in known] + defined_names()
            hint = nearest(unknown[1], known) if unknown else ""
        raise UserError(f"gin: {message.rstrip('. ')}{hint}") from error


def defined_names() -> list[str]:
    """The left-hand sides of the configuration: macros, and parameters of what it binds."""
    return re.findall(r"^([\w./]+) =", gin.config_str(max_line_length=1 << 20), re.MULTILINE)


def selectors() -> list[str]:
    return [name.rpartition("/")[2].rpartition(".")[0] for name in defined_names() if "." in name]


def short_names() -> list[str]:
    """The functions and classes of trusted modules as configs call them."""
    return [".".join(name.split(".")[-2:]) for name in names_in_modules()]


def parameters_named_in(message: str) -> list[str]:
    """The parameters of the configurable that one of gin's messages is about."""
    selector = re.search(r"Configurable '?([\w./]+)'?", message)
    try:
        return list(inspect.signature(gin.get_configurable(selector[1])).parameters)
    except (TypeError, ValueError, KeyError):
        return []


def names_given_to(function: Callable | str) -> set[str]:
    """Names of the arguments that the configuration gives to a function; none where it does not mention it."""
    if function not in gin.config._INVERSE_REGISTRY and function not in gin.config._REGISTRY:
        return set()
    return set(gin.get_bindings(function, resolve_references=False))


def bindings_of(function: Callable | str, *names: str) -> dict[str, Any]:
    """The arguments that the configuration gives to a function, built: all, or those named."""

    def build() -> dict[str, Any]:
        given = gin.get_bindings(function, resolve_references=False)
        return copy.deepcopy({name: given[name] for name in names or given})  # copying a reference calls it

    return explained(build)


def configured(function: Callable, **supplied: Any) -> Callable:
    """The function with its arguments from the configuration, checked to be all there."""
    given = {**bindings_of(function), **supplied}
    parameters = inspect.signature(function).parameters.values()
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in given]
    if missing:
        raise UserError(f"the config gives no value for {', '.join(f'{function.__name__}.{name}' for name in missing)}")
    return functools.partial(gin.get_configurable(function), **supplied)


def fingerprint() -> str:
    """A short hash of the configuration."""
    return hashlib.sha256(gin.config_str().encode()).hexdigest()[:12]


def save_config(workdir: epath.Path) -> None:
    """Writes the flat configuration and every value in use, or refuses a workdir whose run had another."""
    if was_edited := edited(workdir):
        raise UserError(was_edited)
    if differing := differences(workdir):
        raise UserError(
            f"{workdir} holds a run of another config (first difference: {differing[0]}): "
            "choose another --workdir, or give the config it was started with"
        )
    write_text(workdir / CONFIG, gin.config_str())
    write_text(workdir / OPERATIVE, gin.operative_config_str())


def differences(workdir: epath.Path, may_change: Collection[str] = MAY_CHANGE) -> list[str]:
    """The bindings that the parsed configuration and that of a workdir's run do not share.

    None without a run: nor of one that ended before its first checkpoint, which the corrected command begins anew.
    """
    file = workdir / CONFIG
    if not file.exists() or not has_checkpoint(workdir):
        return []
    return sorted(settings(file.read_text(), may_change) ^ settings(gin.config_str(), may_change))


def edited(workdir: epath.Path) -> str | None:
    """Says how a run's config was changed by hand after training wrote it; None if it was not."""
    files = workdir / CONFIG, workdir / OPERATIVE
    if not has_checkpoint(workdir) or not all(file.exists() for file in files):
        return None
    now, then = (dict(line.split(" = ", 1) for line in settings(file.read_text(), MAY_CHANGE)) for file in files)
    for name in sorted(set(now) & set(then)):
        if now[name] != then[name]:
            return (
                f"{files[0]} was edited: {name} = {now[name]} there was {name} = {then[name]} in training; "
                "write that there again"
            )
    return None


def has_checkpoint(workdir: epath.Path) -> bool:
    """Whether a run's folder has a checkpoint to go on from."""
    folder = workdir / "checkpoints"
    return folder.is_dir() and any(place.name.isdecimal() for place in folder.iterdir())


def settings(text: str, may_change: Collection[str]) -> set[str]:
    """The bindings of a flat config that make a run what it is, one line each."""
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    bindings = (re.sub(r"\s+", " ", re.sub(r"\\\n", "", part)).strip() for part in re.split(r"\n(?=\S)", kept))
    return {line for line in bindings if " = " in line and short_name(line) not in may_change}


def short_name(binding: str) -> str:
    """`train.steps` of `loop.train.steps = 3`."""
    return ".".join(binding.partition(" =")[0].split(".")[-2:])


def load_config(workdir: epath.Path, also_trust: Iterable[str] = (), bindings: Iterable[str] = ()) -> None:
    """Parses the config of a workdir, which may come from elsewhere: it may name this project's layers and trainer.

    NAME=VALUE bindings are set over it.
    """
    file = workdir / CONFIG
    text = file.read_text()
    trusted = (*TRUSTED, *(f"{package}." for package in also_trust))
    for statement in explained(lambda: list(config_parser.ConfigParser(text, Inert()))):
        if isinstance(statement, config_parser.IncludeStatement):
            raise UserError(f"{file} includes other files: a saved config is flat")
        if isinstance(statement, config_parser.ImportStatement) and not is_trusted(statement.module, trusted):
            package = statement.module.partition(".")[0]
            raise UserError(f"{file} imports {statement.module}: if you trust all of {package}, pass --trust={package}")
    parse([], bindings, text, takes_files=False)
    for binding in bindings:
        require_effect_on_model(binding)
    bound = [gin.config._REGISTRY[selector] for _, selector in gin.config._CONFIG]
    called = [reference.configurable for reference in gin.config.iterate_references(gin.config._CONFIG)]
    for configurable in (*bound, *called):
        module, name = configurable.wrapped.__module__ or "", configurable.name
        is_macro = configurable.wrapped in (gin.config.macro, gin.config._retrieve_constant)
        starts_a_run = name == "train" and configurable in called
        if starts_a_run or not (is_macro or is_trusted(module, trusted)):
            gin.clear_config()
            raise UserError(f"{file} refers to {module}.{name}, which a config from elsewhere may not")


def is_trusted(module: str, trusted: tuple[str, ...]) -> bool:
    """Whether a module is one of `trusted`, or below one of its packages."""
    return module == "__gin__.dynamic_registration" or any(
        module == name or (name.endswith(".") and f"{module}.".startswith(name)) for name in trusted
    )
