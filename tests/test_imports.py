"""Imports go one way, and commands do not load what they do not need."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Part of the code, what it may import of the others.
ALLOWED = {
    "block_recurrent.device_memory": {"block_recurrent.errors"},
    "block_recurrent.errors": set(),
    "block_recurrent.flops": set(),
    "block_recurrent.kept_memory": set(),
    "block_recurrent.quiet": set(),
    "block_recurrent.ranges": {"block_recurrent.errors"},
    "block_recurrent.slices": {"block_recurrent.errors"},
    "block_recurrent.writing": set(),
    "block_recurrent.prices": {"block_recurrent.errors", "block_recurrent.ranges", "block_recurrent.slices"},
    "block_recurrent.data": {
        "block_recurrent.errors",
        "block_recurrent.quiet",
        "block_recurrent.ranges",
        "block_recurrent.writing",
    },
    "block_recurrent.layers": {"block_recurrent.errors", "block_recurrent.ranges"},
    "models": {"block_recurrent.layers", "block_recurrent.errors", "block_recurrent.ranges"},
    "block_recurrent.checkpoints": {"block_recurrent.errors"},
    "block_recurrent.config": {
        "block_recurrent.config_bindings",
        "block_recurrent.config_hints",
        "block_recurrent.errors",
        "block_recurrent.writing",
    },
    "block_recurrent.config_bindings": {"block_recurrent.errors"},
    "block_recurrent.config_hints": {"block_recurrent.config_bindings"},
    "block_recurrent.config_names": {"block_recurrent.config_bindings"},
    "block_recurrent.plots": {"block_recurrent.writing"},
    "block_recurrent.inference": {
        "block_recurrent.checkpoints",
        "block_recurrent.config",
        "block_recurrent.data",
        "block_recurrent.device_memory",
        "block_recurrent.errors",
        "block_recurrent.layers",
        "block_recurrent.plots",
        "block_recurrent.ranges",
        "block_recurrent.writing",
    },
    "block_recurrent.training": {
        "block_recurrent.checkpoints",
        "block_recurrent.data",
        "block_recurrent.device_memory",
        "block_recurrent.errors",
        "block_recurrent.flops",
        "block_recurrent.inference",
        "block_recurrent.layers",
        "block_recurrent.quiet",
        "block_recurrent.ranges",
        "block_recurrent.slices",
        "block_recurrent.writing",
    },
    "block_recurrent.planning": {
        "block_recurrent.device_memory",
        "block_recurrent.errors",
        "block_recurrent.flops",
        "block_recurrent.prices",
        "block_recurrent.slices",
        "block_recurrent.training",
    },
    "block_recurrent.comparison": {
        "block_recurrent.errors",
        "block_recurrent.inference",
        "block_recurrent.measures",
        "block_recurrent.plots",
        "block_recurrent.training",
        "block_recurrent.writing",
    },
    "block_recurrent.measures": set(),
    "block_recurrent.pages": set(),
    "block_recurrent.reported_runs": {
        "block_recurrent.config",
        "block_recurrent.data",
        "block_recurrent.errors",
        "block_recurrent.inference",
        "block_recurrent.measures",
    },
    "block_recurrent.run_pages": {
        "block_recurrent.comparison",
        "block_recurrent.config",
        "block_recurrent.errors",
        "block_recurrent.measures",
        "block_recurrent.pages",
        "block_recurrent.plots",
        "block_recurrent.reported_runs",
    },
}
FILES = [*(ROOT / "block_recurrent").rglob("*.py"), *(ROOT / "models").rglob("*.py")]


def part_of(module: str) -> str | None:
    """The part of the table that a module belongs to; None for a command and for other packages."""
    return next((part for part in ALLOWED if module == part or module.startswith(part + ".")), None)


def imported_by(file: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_imports_go_one_way(file):
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    part, imported = part_of(module), imported_by(file)
    parts = {part_of(name) for name in imported} - {None, part}
    if part is not None:
        assert parts <= ALLOWED[part]
    if not module.startswith("models"):
        assert "models" not in parts, "gin imports models; the library does not"
    if not module.startswith("block_recurrent.config"):
        assert "gin" not in imported, "only gin files and commands know about gin"


@pytest.mark.parametrize("command", ["train", "evaluate", "generate", "plan", "prepare", "report", "compare"])
def test_help_answers_without_loading_jax_or_tensorflow(command):
    program = (
        "import sys\n"
        f"from block_recurrent import {command}\n"
        f"try: {command}.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'jax', 'tensorflow', 'matplotlib'} & set(sys.modules)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert f"python -m block_recurrent.{command}" in told.stdout
