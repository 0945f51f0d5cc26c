"""What the parity tests of recurrences, convolutions and the R-Transformer have in common."""

import json

import numpy as np

from tests.parity.golden import GOLDEN, relative_error

TOLERANCE = 2e-5


def settings_of(file):
    """The case's settings, by its name in the folder's index."""
    cases = {}
    for index in ("index.json", "index_sru2.json"):
        if (GOLDEN / "fast" / index).exists():
            cases |= json.loads((GOLDEN / "fast" / index).read_text())
    return cases[file.stem]["kwargs"]


def under(arrays, prefix):
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def batch_major(array):
    return np.swapaxes(array, 0, 1)


def assert_close(actual, expected, what):
    error = relative_error(actual, expected)
    assert error < TOLERANCE, f"{what}: {error}"


def assert_params_close(actual, expected):
    scale = max(np.max(np.abs(array)) for arrays in expected.values() for array in arrays.values())
    for layer, arrays in expected.items():
        for name, array in arrays.items():
            # A gradient that is zero but for rounding is compared with the largest of its kind.
            # The bias of keys adds the same to all scores of a query: it has no gradient at all.
            size = scale if name == "keys_bias" else max(np.max(np.abs(array)), 1e-3 * scale)
            error = np.max(np.abs(np.asarray(actual[layer][name]) - array)) / size
            assert error < TOLERANCE, f"gradient of {layer}/{name}: {error}"
