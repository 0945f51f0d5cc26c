"""A training run opened from its workdir alone: its config, vocabulary, data and parameters."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from flax import linen as nn

from block_recurrent.checkpoints import Checkpoints
from block_recurrent.data import files
from block_recurrent.data.store import Store, contents, open_store
from block_recurrent.data.vocabulary import Vocabulary, saved_vocabulary
from block_recurrent.errors import UserError

RUN = "run.json"
TRAIN = "block_recurrent.training.loop.train"  # what the config is of


def save_run(workdir: Path, store: Store, command: str) -> None:
    """Notes how a run was started, on which data, with which vocabulary; refuses other data than it began with."""
    about = {
        "command": command,
        "store": files.absolute(store.folder),
        "splits": contents(store),
        "vocabulary": store.manifest["vocabulary"],
    }
    file = epath.Path(workdir) / RUN
    if file.exists():
        before = read_about(epath.Path(workdir))
        if before["vocabulary"] != about["vocabulary"]:
            raise UserError(
                f"{store.folder} has another vocabulary than {workdir} was trained with: prepare it with the run's "
                "own, or choose another --workdir"
            )
        if before["splits"]["train"] != about["splits"]["train"]:
            raise UserError(
                f"{store.folder} is not the data that {workdir} was trained on: restore it, or choose another --workdir"
            )
    store.vocabulary.save(workdir)
    file.write_text(json.dumps(about, indent=2))


@dataclass(frozen=True)
class Run:
    """A run's workdir, and what its config built: `model`, `rows` and `segment`."""

    workdir: Path
    settings: dict[str, Any]
    about: dict[str, Any]

    @property
    def model(self) -> nn.Module:
        return self.settings["model"]

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        return saved_vocabulary(self.about["vocabulary"], self.workdir)

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        folder = self.workdir / "checkpoints"
        if not folder.is_dir():
            raise UserError(f"{self.workdir} has no checkpoint yet: train it first")
        return Checkpoints(folder)

    def store(self, folder: str | None = None) -> Store:
        """The store the run was trained on, or another of the same vocabulary."""
        store = open_store(folder or self.about["store"])
        if store.manifest["vocabulary"] != self.about["vocabulary"]:
            raise UserError(f"{store.folder} has another vocabulary than {self.workdir}: prepare it with the run's own")
        if folder is None and contents(store) != self.about["splits"]:
            raise UserError(
                f"{store.folder} has changed since {self.workdir} was trained: if you mean it, pass --store"
            )
        return store

    def step(self, step: int | None = None) -> int:
        """The given step, or the latest that was saved."""
        steps = self.checkpoints.steps()
        if not steps:
            raise UserError(f"{self.workdir} has no checkpoint yet: train it first")
        if step is not None and step not in steps:
            raise UserError(f"{self.workdir} has no checkpoint of step {step}: it has {', '.join(map(str, steps))}")
        return steps[-1] if step is None else step

    def params(self, step: int, dtype: Any = None) -> Any:
        """The parameters of a step, on one device; as bfloat16 or another type if asked."""
        tokens = jnp.zeros((1, self.model.block), jnp.int32)
        shapes = jax.eval_shape(
            lambda: self.model.init(jax.random.key(0), tokens, self.model.initial_state(1), tokens.astype(bool))
        )
        return self.checkpoints.restore_params(step, nn.unbox(shapes)["params"], dtype)


def open_run(workdir: str | Path, trust: list[str] | None = None, bindings: Sequence[str] = ()) -> Run:
    """Opens a workdir; `trust` names packages beyond this project that its config may import.

    `bindings` change its config, NAME=VALUE each, where that leaves the parameters as they are: CONTEXT=3072.
    """
    from block_recurrent import config

    workdir = Path(workdir)
    config.load_config(workdir, trust or (), bindings)
    return Run(workdir, config.bindings_of(TRAIN, "model", "rows", "segment"), read_about(workdir))


def read_about(workdir: Path) -> dict[str, Any]:
    """What save_run noted."""
    try:
        about = json.loads((workdir / RUN).read_text())
        if not {"command", "store", "splits", "vocabulary"} <= set(about):
            raise ValueError("it lacks what every run notes")
        return about
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{workdir / RUN} cannot be read ({error}): {workdir} is not a complete run") from error
