"""gin for the commands: parse, say clearly what is wrong, and save what a run needs to be opened again.

Only gin files and commands know about gin; the library takes plain arguments.
"""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gin

from block_recurrent.errors import UserError

ROOT = Path(__file__).parents[1]
CONFIG = "config.gin"
OPERATIVE = "operative.gin"
TRUSTED = ("__gin__", "block_recurrent", "models")

# A run may go on longer, or be watched more closely, without being another run.
MAY_CHANGE = ("STEPS", "train.steps", "train.log_every", "train.evaluate_every", "train.evaluation_batches")
MAY_CHANGE += ("train.checkpoint_every", "train.keep_checkpoints")


def parse(files: Iterable[str], bindings: Iterable[str]) -> None:
    """Parses gin files, then NAME=VALUE bindings over them; any mistake is a UserError."""
    gin.clear_config()
    gin.add_config_file_search_path(str(ROOT))
    for file in files:
        if not (Path(file).is_file() or (ROOT / file).is_file()):
            known = [str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.gin")]
            raise UserError(f"no gin file {file}{nearest(file, known)}")
        explained(lambda file=file: gin.parse_config_file(file))
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


def bindings_of(function: Callable | str) -> dict[str, Any]:
    """The arguments that the configuration gives to a function, built."""
    return explained(lambda: gin.get_bindings(function))


def configured(function: Callable, **supplied: Any) -> Callable:
    """The function with its arguments from the configuration, checked to be all there."""
    given = {**bindings_of(function), **supplied}
    parameters = inspect.signature(function).parameters.values()
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in given]
    if missing:
        raise UserError(f"the config gives no value for {', '.join(f'{function.__name__}.{name}' for name in missing)}")
    return functools.partial(gin.get_configurable(function), **supplied)


def save_config(workdir: Path) -> None:
    """Writes the flat configuration, or refuses a workdir whose run had another."""
    workdir.mkdir(parents=True, exist_ok=True)
    given, file = gin.config_str(), workdir / CONFIG
    if file.exists():
        differing = sorted(settings(file.read_text()) ^ settings(given))
        if differing:
            raise UserError(
                f"{workdir} holds a run of another config (first difference: {differing[0]}): "
                "choose another --workdir, or give the config it was started with"
            )
    file.write_text(given)


def save_operative(workdir: Path) -> None:
    """Writes every value that is in use, defaults included; complete once the run has been built."""
    (workdir / OPERATIVE).write_text(gin.operative_config_str())


def settings(text: str) -> set[str]:
    """The bindings of a flat config that make a run what it is, one line each."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"#.*", "", text))
    lines = {re.sub(r"\s+", " ", line).strip() for line in re.split(r"\n(?=\S)", joined)}
    return {line for line in lines if " = " in line and not line.partition(" =")[0].endswith(MAY_CHANGE)}


def load_config(workdir: Path, also_trust: Iterable[str] = ()) -> None:
    """Parses the config of a workdir, which may come from elsewhere: it may name this project's code, nothing else."""
    file = workdir / CONFIG
    if not file.is_file():
        raise UserError(f"{workdir} is not a run: it has no {CONFIG}; give the --workdir of a training run")
    trusted = (*TRUSTED, *also_trust)
    for line in file.read_text().splitlines():
        imported = re.match(r"\s*(?:import|from)\s+([\w]+)", line)
        if imported and imported[1] not in trusted:
            raise UserError(f"{file} imports {imported[1]}: if you trust it, pass --trust={imported[1]}")
        if re.match(r"\s*include\b", line):
            raise UserError(f"{file} includes other files: a saved config is flat")
    parse([str(file)], [])
    for configurable in referred_to():
        module = configurable.wrapped.__module__ or ""
        if module.partition(".")[0] not in (*trusted, "gin"):
            gin.clear_config()
            raise UserError(f"{file} refers to {module}.{configurable.name}, which is not this project's code")


def referred_to() -> list:
    """The functions and classes that the parsed configuration is about; gin has no public way to list them."""
    bound = [gin.config._REGISTRY[selector] for _, selector in gin.config._CONFIG]
    return bound + [reference.configurable for reference in gin.config.iterate_references(gin.config._CONFIG)]
