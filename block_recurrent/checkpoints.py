"""Orbax behind a small facade: one atomic save of everything, and parameters alone for those who only look."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from block_recurrent.errors import UserError, first_line

PARAMS, TRAINING, CURSOR = "params", "training", "cursor"


class Checkpoints:
    """The checkpoints of a run, by step: parameters, the rest of the training state, and the data cursor.

    The latest `keep` stay, those at multiples of `keep_every`, and the best by `losses`: held-out losses by step, to
    which the run adds as it goes.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int = 3,
        keep_every: int | None = None,
        losses: Mapping[int, float] | None = None,
    ):
        # Orbax reports every file it touches, and a failed save once for each of its parts; what matters it raises.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        self.folder = epath.Path(folder)
        if "://" not in str(folder):
            self.folder = epath.Path(Path(folder).absolute())
        kept = [checkpoint_managers.LatestN(keep)]
        kept += [checkpoint_managers.EveryNSteps(keep_every)] if keep_every else []
        kept += [Best(losses)] if losses is not None else []
        self.manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=checkpoint_managers.AnyPreservationPolicy(kept),
                enable_async_checkpointing=True,
            ),
            item_handlers=handlers(),
        )
        # Each process reads alone: where one fails, none waits for it at a barrier of Orbax's.
        here = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(here, {here}, barrier_sync_key_prefix=f"process_{here}")
        self.reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers()), multiprocessing_options=alone)

    def steps(self) -> list[int]:
        return sorted(self.manager.all_steps())

    def save(self, step: int, params: Any, training: Any, cursor: dict) -> None:
        """Starts an atomic save: until it is complete, the step is not there. `wait` for it before exit."""
        self.manager.save(
            step,
            args=ocp.args.Composite(
                **{
                    PARAMS: ocp.args.StandardSave(params),
                    TRAINING: ocp.args.StandardSave(without_empty(training)),
                    CURSOR: ocp.args.JsonSave(cursor),
                }
            ),
        )

    def restore(self, step: int, params: Any, training: Any) -> tuple[Any, Any, dict]:
        """Everything saved at a step, given trees of ShapeDtypeStructs with shardings; of each process, its part."""
        restored = self._restore(
            step,
            params,
            {
                PARAMS: ocp.args.StandardRestore(params),
                TRAINING: ocp.args.StandardRestore(without_empty(training)),
                CURSOR: ocp.args.JsonRestore(),
            },
            self.damaged,
        )
        return restored[PARAMS], with_empty(restored[TRAINING], training), restored[CURSOR]

    def restore_params(self, step: int, params: Any, dtype: Any = None) -> Any:
        """The parameters alone, given a tree of shapes, onto one device of this process, in another type if asked."""
        # A target without a sharding asks for the devices of the training run.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype or a.dtype, sharding=here), params)
        return self._restore(step, target, {PARAMS: ocp.args.StandardRestore(target)}, self.damaged_params)[PARAMS]

    def _restore(self, step: int, params: Any, items: dict, damaged: Callable[[int, str], UserError]) -> dict:
        try:
            with ending_reads():
                return self.reader.restore(self.folder / str(step), args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax and its storage raise many kinds: all mean an unreadable checkpoint
            if differs := self._difference(step, params):
                raise UserError(
                    f"checkpoint {self.folder / str(step)} is of another model than the config: {differs}; the config "
                    "was changed, or a --gin binding changes what only training can"
                ) from error
            why = first_line(error.__cause__ or error)[:300]  # the cause names the array, and what is wrong with it
            raise damaged(step, why) from error

    def _difference(self, step: int, params: Any) -> str:
        """The first parameter that a checkpoint has in another shape than asked for; nothing if it does not tell."""
        try:
            with ending_reads():
                saved = shapes(self.reader.metadata(self.folder / str(step)).item_metadata[PARAMS].tree)
        except Exception:  # what cannot be read is damaged
            return ""
        asked = shapes(params)
        for name in sorted({*saved, *asked}):
            if saved.get(name) != asked.get(name):
                there, here = (described(found.get(name)) for found in (saved, asked))
                return f"{name} is {there} there, {here} by the config"
        return ""

    def damaged(self, step: int, why: str) -> UserError:
        """The error over a checkpoint that training cannot go on from."""
        return self._damaged(step, why, "--skip_damaged goes on from step {}")

    def damaged_params(self, step: int, why: str) -> UserError:
        """The error over a checkpoint that cannot be evaluated."""
        return self._damaged(step, why, "evaluate and generate read another with --step={}")

    def _damaged(self, step: int, why: str, advice: str) -> UserError:
        others = [other for other in self.steps() if other != step]
        advice = advice.format(max(others)) if others else "it is the only one of this run"
        return UserError(f"checkpoint {self.folder / str(step)} is damaged ({why}); {advice}")

    def set_aside(self, step: int, together: Callable[[str], None]) -> None:
        """Renames a step's folder, so that it is no checkpoint any more; `together` waits for a run's processes."""
        together(f"checkpoint {step} is damaged")
        if jax.process_index() == 0:
            (self.folder / str(step)).rename(self.folder / f"damaged_{step}")
        together(f"checkpoint {step} is set aside")
        self.manager.reload()

    def wait(self) -> None:
        self.manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self.manager.close()
        self.reader.close()


@dataclass(frozen=True)
class Best:
    """Preserves the checkpoint of the lowest loss, of those that are there.

    Orbax's BestN knows a loss only if it was there when the checkpoint was saved. A run that was told to stop saves
    first, and evaluates when it goes on.
    """

    losses: Mapping[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        there = [checkpoint.step for checkpoint in checkpoints]
        best = min((step for step in there if step in self.losses), key=self.losses.__getitem__, default=None)
        return [step == best for step in there]


class EndingReads(asyncio.SelectorEventLoop):
    """An event loop that waits for what is under way before it closes: TensorStore would call a closed one."""

    def close(self) -> None:
        if not self.is_closed() and (left := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        super().close()


class EndingReadsPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> EndingReads:
        return EndingReads()


@contextlib.contextmanager
def ending_reads() -> Iterator[None]:
    """Where one array cannot be read, the others are read to their end: Orbax leaves them to a closed loop."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(EndingReadsPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a tree's arrays, by their names."""
    return {
        "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def described(shape: tuple[int, ...] | None) -> str:
    return "not" if shape is None else f"[{', '.join(map(str, shape))}]"


def without_empty(tree: Any) -> Any:
    """None for arrays without a number in them, which Orbax refuses: a window of one token has such a tail."""
    return jax.tree.map(lambda a: a if a.size else None, tree)


def with_empty(tree: Any, like: Any) -> Any:
    """What `without_empty` made of a tree that was `like` this one, as it was."""
    return jax.tree.map(
        lambda a, found: found if a.size else jnp.zeros(a.shape, a.dtype, device=a.sharding), like, tree
    )


def handlers() -> dict:
    return {
        PARAMS: ocp.StandardCheckpointHandler(),
        TRAINING: ocp.StandardCheckpointHandler(),
        CURSOR: ocp.JsonCheckpointHandler(),
    }
