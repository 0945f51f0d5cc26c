"""Recurrent transformers for very long documents, in JAX and Flax.

import block_recurrent

run = block_recurrent.open("runs/quickstart")
print(run.score("def main():").bits_per_byte)
print(run.generate("def ", tokens=200))
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from block_recurrent.inference.run import Run

# etils.epath, and with it Orbax, reaches buckets through fsspec as data stores do, not through TensorFlow.
os.environ.setdefault("EPATH_USE_TF", "false")


def open(path: str | os.PathLike, trust: Sequence[str] = (), bindings: Sequence[str] = ()) -> "Run":
    """Opens a training run from its workdir, here or in a bucket: its config, metrics, vocabulary and parameters.

    `trust` names packages beyond this project that its config may import. `bindings` change its config, NAME=VALUE
    each, where that leaves the parameters as they are: "CONTEXT=3072" reads with a longer context than in training.
    """
    from block_recurrent.inference.run import open_run  # JAX is loaded when a run is opened

    return open_run(path, trust, bindings)
