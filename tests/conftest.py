"""Shared by all tests: a tiny corpus, and quick compilation."""

import atexit
import os
import shutil
import tempfile

# Before jax is imported. Tests run what they compile once or twice: cheap code generation is faster overall.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
QUICKLY = ("backend_optimization_level=0", "llvm_disable_expensive_passes=true", "cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(f"--xla_{flag}" for flag in QUICKLY))

# Whole runs compile the same step again and again, in this process and in those that tests start.
COMPILED = tempfile.mkdtemp(prefix="block_recurrent_compiled_")
atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", COMPILED)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import numpy as np
import pytest

from block_recurrent.data.store import Store
from block_recurrent.prepare import prepare


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_go():
    """Every compiled program holds some of the memory maps that a process may have; a whole suite's are too many."""
    yield
    import jax

    jax.clear_caches()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Store:
    """A store of a few short documents of text in every split."""
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon\n"]

    folder = tmp_path_factory.mktemp("data")
    for split, count in {"train": 12, "validation": 4, "test": 5}.items():
        (folder / "texts" / split).mkdir(parents=True)
        for i in range(count):
            text = " ".join(rng.choice(words, rng.integers(5, 60)))
            (folder / "texts" / split / f"{i:02d}.txt").write_text(text)
    return prepare("text_files", folder / "corpus", input=str(folder / "texts"))[0]
