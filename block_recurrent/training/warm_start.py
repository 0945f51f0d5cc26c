"""Warm start: a new run that begins with the parameters of another, and with nothing else of it.

Segment, window, rows, schedule and optimizer are the new run's own. Arrays go from the checkpoint straight to where the
new run has them; of the other run's config nothing is built.
"""

import functools
import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util

from block_recurrent.checkpoints import PARAMS, ending_reads
from block_recurrent.data import files
from block_recurrent.data.store import Mixture, Split, Store
from block_recurrent.errors import UserError, first_line
from block_recurrent.inference.evaluation import Evaluator, Score
from block_recurrent.inference.run import Run, open_weights, read_about, source_of
from block_recurrent.training.processes import PATIENCE, agree, before_agreeing, everyones
from block_recurrent.training.step import Trainer, TrainState

NAMED = 20  # parameters that an error names, at most
ADVISED = 8  # patterns that it advises, at most
READING = 1800.0  # seconds that a process waits for the others to read the parameters


@dataclass
class WarmStart:
    """Where a new run takes its parameters from.

    Those whose path matches a pattern of `fresh` start fresh; the same of the source's are left behind. `differing` are
    settings in which the two configs differ, to be shown.
    """

    place: str
    chosen: int | str | None = None  # a step, "best", or the newest
    fresh: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    note: dict[str, Any] = field(default_factory=dict)  # about the source, for run.json, once it is read

    def state(self, trainer: Trainer, store: Store, seed: int, patience: float = PATIENCE) -> TrainState:
        """The train state before the first step: the source's parameters, and the rest as any new run has it."""
        run, step = self.opened(store, patience)
        place = run.checkpoints.folder / str(step) / PARAMS
        wanted = by_name(trainer.abstract_state().params)
        with before_agreeing("shapes of the source"):
            taken = fitting(f"{self.place} at step {step}", wanted, saved_shapes(place), self.fresh)
        agree("shapes of the source", {}, READING)
        state = trainer.init(seed)
        structure, leaves = jax.tree.structure(state.params), by_name(state.params)
        leaves |= dict.fromkeys(taken)
        state = state.replace(params=None)  # the device may have no room for all parameters twice
        with before_agreeing("parameters of the source"):
            restored = read(place, {name: wanted[name] for name in taken})
        agree("parameters of the source", {}, READING)
        self.note = {
            "run": files.absolute(str(run.workdir)),
            "step": step,
            "parameters": fingerprint(restored),
            "fresh": [name for name in leaves if name not in restored],
        }
        return state.replace(params=jax.tree.unflatten(structure, (leaves | restored).values()))

    def opened(self, store: Store, patience: float) -> tuple[Run, int]:
        """The source and its step: process 0's, as a run that still trains may have a newer one for each that looks."""
        with before_agreeing("source"):
            run = open_weights(self.place)
            require_same_tokens(run, store)
        agree("source", {}, patience)
        with before_agreeing("step of the source"):
            step = run.step if self.chosen is None else run.at(self.chosen).step
        agree("step of the source", {}, patience)
        return run, everyones("chosen step of the source", {"step": step}, patience)[0]["step"]

    def __str__(self) -> str:
        """What the log says of it."""
        fresh, differing = ", ".join(self.note["fresh"]), ", ".join(self.differing)
        return "\n".join(
            [
                f"the parameters of {self.place} at step {self.note['step']} ({self.note['parameters']})",
                *([f"starting fresh: {fresh}"] if fresh else []),
                *([f"the config differs from that of {self.place} in {differing}"] if differing else []),
            ]
        )


def read_source(text: str) -> tuple[str, int | str | None]:
    """The run and the step of RUN, RUN@best or RUN@STEP."""
    place, _, step = text.rpartition("@")
    if place and step == "best":
        return place, step
    return (place, int(step)) if place and step.isdecimal() else (text, None)


def require_begun_with(workdir: epath.Path, text: str) -> None:
    """Refuses a source that a run, which goes on with its own parameters, did not begin with."""
    place, step = read_source(text)
    began = source_of(read_about(workdir)) or {}
    if began.get("run") != files.absolute(place) or (isinstance(step, int) and began.get("step") != step):
        since = f"began with {began.get('run')} at step {began.get('step')}" if began else "did not begin with another"
        raise UserError(
            f"--from={text}: {workdir} is a run already, which {since} and goes on with its own parameters: "
            "leave --from away, or choose another --workdir"
        )


def require_same_tokens(run: Run, store: Store) -> None:
    """Refuses a source that was trained on other tokens, or to tell other labels."""
    if run.about["vocabulary"] != store.manifest["vocabulary"]:
        raise UserError(
            f"--from={run.workdir} has another vocabulary than {store.folder} ({named(run.about['vocabulary'])} and "
            f"{named(store.manifest['vocabulary'])}): prepare the data with the run's own"
        )
    if run.about.get("labels") != store.manifest.get("labels"):
        raise UserError(f"--from={run.workdir} was trained to tell other labels than {store.folder} has, or none")


def named(vocabulary: Any) -> str:
    """A vocabulary as run.json and stores note it, for a person."""
    if not isinstance(vocabulary, dict):
        return "none"
    return f"{vocabulary.get('size')} {vocabulary.get('kind')}, {str(vocabulary.get('sha256'))[:12]}"


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, in its order."""
    return {"/".join(part.key for part in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def reader() -> ocp.Checkpointer:
    """Reads parts of a tree, by each process alone."""
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(here, {here}, barrier_sync_key_prefix=f"source_{here}")
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone)


def saved_shapes(place: epath.Path) -> dict[str, Any]:
    """Shapes and types of the parameters in a checkpoint, by name."""
    try:
        with ending_reads(), reader() as opened:
            return by_name(opened.metadata(place).item_metadata.tree)
    except Exception as error:
        raise unreadable(place, error) from error


def read(place: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Parameters of a checkpoint by name, each on the devices that its sharding says."""
    target = traverse_util.unflatten_dict(wanted, sep="/")
    where = ocp.checkpoint_utils.construct_restore_args(target)
    try:
        with ending_reads(), reader() as opened:
            found = opened.restore(place, ocp.args.PyTreeRestore(target, restore_args=where, partial_restore=True))
    except Exception as error:
        raise unreadable(place, error) from error
    found = by_name(found)
    return {name: found[name] for name in wanted}


def unreadable(place: epath.Path, error: Exception) -> UserError:
    why = first_line(error.__cause__ or error)[:300]
    return UserError(f"{place} cannot be read ({why}): give another step of this run, --from=RUN@STEP")


def fitting(source: str, wanted: Mapping[str, Any], saved: Mapping[str, Any], fresh: Collection[str]) -> list[str]:
    """Names of the parameters that are taken; a UserError over those that do not fit and are not to start fresh."""
    names = list(wanted | saved)
    for pattern in fresh:
        if not matching(names, [pattern]):
            raise UserError(f"--from_fresh={pattern} matches no parameter: they are called {', '.join(names[:5])} ...")
    left = set(matching(names, fresh))
    misfits = {name: why for name in names if name not in left and (why := misfit(wanted.get(name), saved.get(name)))}
    if len(misfits) == len(names):
        raise UserError(f"{source} has no parameter that fits this model, {listed(misfits)}")
    if misfits:
        raise UserError(f"{source} does not fit this model: {listed(misfits)}; {advice(misfits, names)}")
    taken = [name for name in wanted if name not in left]
    if not taken:
        raise UserError(f"--from_fresh leaves nothing to be taken from {source}: leave --from away, or match less")
    return taken


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def misfit(wanted: Any, saved: Any) -> str:
    """Why a parameter does not fit; nothing where it does."""
    if saved is None:
        return f"is {form(wanted)} here and not in the source"
    if wanted is None:
        return f"is {form(saved)} in the source and not in this model"
    return f"is {form(saved)} in the source and {form(wanted)} here" if form(wanted) != form(saved) else ""


def form(array: Any) -> str:
    """Shape and type, the type only where it is another than the usual."""
    kind = np.dtype(array.dtype).name
    shape = " x ".join(map(str, array.shape)) or "one number"
    return shape if kind == "float32" else f"{shape} {kind}"


def listed(misfits: Mapping[str, str]) -> str:
    more = f" and {len(misfits) - NAMED} more" if len(misfits) > NAMED else ""
    return ", ".join(f"{name} {why}" for name, why in list(misfits.items())[:NAMED]) + more


def advice(misfits: Iterable[str], names: Collection[str]) -> str:
    """The flags that have just these parameters start fresh, where a few will do."""
    misfits = list(misfits)
    tails = [f"*/{name.rpartition('/')[2]}" for name in misfits]
    layers = [f"{'/'.join(name.split('/')[:2])}/*" for name in misfits]
    exact = [each for each in (set(tails), set(layers), set(misfits)) if matching(names, each) == misfits]
    patterns = min(exact, key=len)
    flags = [f"--from_fresh='{pattern}'" for pattern in sorted(patterns)] if len(patterns) <= ADVISED else []
    return f"to start these fresh, add {' '.join(flags) or '--from_fresh=PATTERN for each'}"


def fingerprint(params: Any) -> str:
    """A short hash of parameters, the same however they are spread over devices."""
    params = by_name(params)
    sums = jax.device_get(jax.jit(lambda arrays: [checksum(array) for array in arrays])(list(params.values())))
    about = [
        f"{name} {array.shape} {array.dtype} {total}" for (name, array), total in zip(params.items(), sums, strict=True)
    ]
    return hashlib.sha256("\n".join(sorted(about)).encode()).hexdigest()[:12]


def checksum(array: jax.Array) -> jax.Array:
    """A sum over all numbers' bits and places, by integers alone, so that the order does not matter."""
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}")).astype(jnp.uint32)
    place = jnp.arange(array.size, dtype=jnp.uint32).reshape(array.shape)
    mixed = (bits ^ (place * jnp.uint32(0x9E3779B1))) * jnp.uint32(0x85EBCA77)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE3D)
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)


def first_score(evaluator: Evaluator, trainer: Trainer, params: Any, split: Split | Mixture) -> Score:
    """The score of a whole split as `evaluate` has it, which reads a running text as one document.

    Few documents are read in few rows and longer segments, as many tokens at once.
    """
    if not is_running(split):
        return evaluator(params, split)
    ways = trainer.mesh.shape["data"] * trainer.mesh.shape["fsdp"]
    documents = sum(len(part.lengths) for part, _ in split.parts)
    rows = min(-(-documents // ways) * ways, trainer.rows)
    uncut = Evaluator(
        trainer.model,
        rows,
        evaluator.segment * (trainer.rows // rows),
        evaluator.place,
        trainer.local_rows(rows),
        functools.partial(trainer.initial_memory, rows),
        uncut=True,
    )
    return uncut(params, split)


def is_running(split: Split | Mixture) -> bool:
    """Whether a split has a running text, which the evaluations of a run cut into rows."""
    return any(part.contiguous for part, _ in split.parts)


def comparable(split: Split | Mixture, batches: int | None) -> bool:
    """Whether the first score is of what later evaluations are of, and so may be the best of them."""
    return batches is None and not is_running(split)
