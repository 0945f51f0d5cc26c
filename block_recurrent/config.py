"""gin for the commands: parse, say clearly what is wrong, and save what a run needs to be opened again.

Only gin files and commands know about gin; the library takes plain arguments.
"""

import copy
import difflib
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

from block_recurrent.errors import UserError
from block_recurrent.writing import write_text

ROOT = Path(__file__).parents[1]
CONFIG = "config.gin"
OPERATIVE = "operative.gin"

# What a config that comes from elsewhere may import, refer to and call: modules, or packages that end in a dot.
TRUSTED = (
    "block_recurrent.layers.",
    "block_recurrent.training.loop",
    "block_recurrent.training.optimizers",
    "block_recurrent.training.plateau",
    "block_recurrent.training.sharding",
    "models.",
)

# A run may go on longer, be watched more closely or run on other devices without being another run.
LENGTH = {"STEPS", "train.steps", "STOP_AFTER", "Plateau.stop_after"}
MAY_CHANGE = LENGTH | {"STORE", "DATA", "FSDP", "TENSOR"}
MAY_CHANGE |= {"train.log_every", "train.evaluate_every", "train.evaluation_batches"}
MAY_CHANGE |= {"train.checkpoint_every", "train.keep_checkpoints", "train.keep_every", "train.keep_best"}
MAY_CHANGE |= {"train.mesh", "train.store", "make_mesh.data", "make_mesh.fsdp", "make_mesh.tensor"}


def parse(files: Iterable[str], bindings: Iterable[str], saved: str = "") -> None:
    """Parses gin files and the text of a saved config, then NAME=VALUE bindings over them; a mistake is a UserError."""
    gin.clear_config()
    gin.config._LOCATION_PREFIXES[:] = ["", str(ROOT)]
    del gin.config._FILE_READERS[1:]  # a reader of package resources stumbles over folders that are not packages
    for file in files:
        if not (Path(file).is_file() or (ROOT / file).is_file()):
            known = [str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.gin")]
            raise UserError(f"no gin file {file}{nearest(file, known)}")
        explained(lambda file=file: gin.parse_config_file(file))
    explained(lambda: gin.parse_config(saved))
    for binding in bindings:
        name = binding.partition("=")[0].strip()
        if "=" not in binding:
            raise UserError(f"--gin.{binding} has no value: write --gin.NAME=VALUE")
        if "." not in name and name not in defined_names():
            raise UserError(f"no gin name {name}{nearest(name, defined_names())}")
        explained(lambda binding=binding: gin.parse_config(binding))
    explained(gin.finalize)
    gin.unlock_config()


def explained(call: Callable) -> Any:
    """Calls gin, turning what it raises into one line with the nearest name."""
    try:
        return call()
    except UserError:
        raise
    except Exception as error:
        message = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
        unknown = re.search(r"doesn't have a parameter named '(\w+)'", message)
        if unknown:
            hint = nearest(unknown[1], parameters_named_in(message))
        else:
            unknown = re.search(
                r"(?:[Nn]o configurable matching|matching reference|find|macro) '?@?%?([\w./]+)", message
            )
            hint = nearest(unknown[1], [*selectors(), *defined_names()]) if unknown else ""
        if "malformed node" in message:
            hint = "; text needs quotes inside quotes: --gin.NAME=\"'text'\""
        raise UserError(f"gin: {message.rstrip('. ')}{hint}") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name most like a mistyped one."""
    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f": did you mean {close[0]}?"
    return f": known are {', '.join(known)}" if 0 < len(known) <= 20 else ""


def defined_names() -> list[str]:
    """The left-hand sides of the configuration: macros, and parameters of what it binds."""
    return re.findall(r"^([\w./]+) =", gin.config_str(max_line_length=1 << 20), re.MULTILINE)


def selectors() -> list[str]:
    return [name.rpartition("/")[2].rpartition(".")[0] for name in defined_names() if "." in name]


def parameters_named_in(message: str) -> list[str]:
    """The parameters of the configurable that one of gin's messages is about."""
    selector = re.search(r"Configurable '?([\w./]+)'?", message)
    try:
        return list(inspect.signature(gin.get_configurable(selector[1])).parameters)
    except (TypeError, ValueError, KeyError):
        return []


def names_given_to(function: Callable) -> set[str]:
    """Names of the arguments that the configuration gives to a function; none where it does not mention it."""
    if function not in gin.config._INVERSE_REGISTRY:
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
    parse([], bindings, text)
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


class Inert(config_parser.ParserDelegate):
    """Reads statements without looking anything up."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> None:
        return None

    def macro(self, macro_name: str) -> None:
        return None
