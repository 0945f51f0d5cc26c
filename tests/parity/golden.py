"""Fixtures made by the papers' authors' own code; the folder comes from BR_GOLDEN."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(os.environ.get("BR_GOLDEN", Path(__file__).parents[3] / "shared" / "golden"))


def fixture_files(folder: str, *patterns: str) -> list:
    """One pytest parameter per fixture, its id of folder and file name; a single skipped one where there are none."""
    files = sorted(file for pattern in patterns for file in (GOLDEN / folder).glob(f"{pattern}.npz"))
    if not files:
        skip = pytest.mark.skip(reason=f"no fixtures {patterns} in {GOLDEN / folder}: set BR_GOLDEN to their folder")
        return [pytest.param(None, id=f"{folder}-absent", marks=skip)]
    return [pytest.param(file, id=f"{folder}-{file.stem}") for file in files]


def load(file: Path) -> tuple[dict[str, np.ndarray], dict]:
    """The arrays of a fixture and its metadata (sizes)."""
    with np.load(file, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    return arrays, json.loads(bytes(arrays.pop("meta_json"))) if "meta_json" in arrays else {}


def relative_error(actual, expected) -> float:
    """Largest absolute error over largest absolute value."""
    return float(np.max(np.abs(np.asarray(actual) - expected)) / max(np.max(np.abs(expected)), 1e-30))
