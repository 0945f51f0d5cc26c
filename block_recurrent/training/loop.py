"""The training loop: rows in, steps, evaluations, checkpoints; killed at any moment, it goes on where it was."""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import linen as nn
from jax.sharding import Mesh

from block_recurrent.checkpoints import Checkpoints
from block_recurrent.data.rows import Cursor, RowStream
from block_recurrent.data.store import Store, is_store, open_store, task_of
from block_recurrent.errors import Preempted, UserError, first_line
from block_recurrent.inference.evaluation import Evaluator
from block_recurrent.inference.run import RUN, STOPPED, read_about, run_folder
from block_recurrent.ranges import FINITE, RATE, SEED, WHOLE_0, WHOLE_1
from block_recurrent.training.optimizers import Optimizer
from block_recurrent.training.overview import overview
from block_recurrent.training.plateau import STEADY, Plateau, best
from block_recurrent.training.processes import PATIENCE, Attendance, agree, everyones, meet
from block_recurrent.training.profiling import Profile
from block_recurrent.training.progress import progress_file
from block_recurrent.training.reporting import LateMetrics, Reporter, unit_of
from block_recurrent.training.sharding import check_rows, in_mesh, make_mesh
from block_recurrent.training.step import Trainer, TrainState
from block_recurrent.training.stopping import Stopped, StopRequest
from block_recurrent.training.utilisation import seconds_at_peak
from block_recurrent.training.warm_start import WarmStart, comparable, first_score
from block_recurrent.writing import write_text

READING = 1800.0  # seconds that a process waits for the others to read a checkpoint; one that dies ends it sooner

# Kinds of data, and a config for each.
TEXT, MUSIC, PIXELS, LABELLED_TEXT = "text", "music", "images with labels", "text with labels"
EXAMPLES = {
    TEXT: "configs/quickstart.gin",
    MUSIC: "configs/music/lstm.gin",
    PIXELS: "configs/mnist/lstm.gin",
    LABELLED_TEXT: "configs/imdb/qrnn.gin",
}

COUNTS = ("steps", "rows", "segment", "accumulate", "log_every", "evaluate_every", "evaluation_batches")
COUNTS += ("checkpoint_every", "keep_checkpoints", "keep_every")
RANGES = dict.fromkeys(COUNTS, WHOLE_1) | {"seed": SEED, "patience": RATE, "profile_steps": WHOLE_0}
OPTIONAL = {"evaluation_batches", "keep_every", "mesh", "plateau"}
KINDS = {
    "model": (nn.Module, "a flax module, such as @language_model.LanguageModel()"),
    "optimizer": (Optimizer, "one of block_recurrent.training.optimizers, such as @optimizers.adam()"),
    "mesh": (Mesh, "@sharding.make_mesh()"),
    "plateau": (Plateau, "@plateau.Plateau()"),
    "store": (str, "the folder of a store, such as 'data/mine'"),
    "health": (bool, "True or False"),
    "keep_best": (bool, "True or False"),
}


def train(
    workdir: str,
    model: nn.Module,
    optimizer: Optimizer,
    store: str,
    steps: int,
    rows: int,
    segment: int,
    seed: int = 0,
    accumulate: int = 1,
    health: bool = False,
    mesh: Mesh | None = None,
    log_every: int = 50,
    evaluate_every: int = 1000,
    evaluation_batches: int | None = None,
    checkpoint_every: int = 1000,
    keep_checkpoints: int = 3,
    keep_every: int | None = None,
    keep_best: bool = False,
    plateau: Plateau | None = None,
    patience: float = PATIENCE,
    skip_damaged: bool = False,
    profile_steps: int = 0,
    warm_start: WarmStart | None = None,
    started: Callable[[Store], None] = lambda store: None,
    before_saving: Callable[[], None] = lambda: None,
) -> None:
    """Trains up to `steps`, from the latest checkpoint in `workdir` if there is one.

    `model` learns from the train split of `store` by `optimizer`; `seed` draws parameters, dropout and the order of
    documents. Metrics are written every `log_every` steps, a checkpoint every `checkpoint_every`.
    `rows` documents are read side by side, `segment` tokens of each a step; `accumulate` splits the rows of a step.
    The latest `keep_checkpoints` checkpoints stay, and those at multiples of `keep_every` steps; with `keep_best` each
    new best of the evaluations is saved, and stays until the next. `plateau` says how the evaluations lower the
    learning rate and end the run (block_recurrent/training/plateau.py).
    With `health` the metrics tell how recurrent states fare (block_recurrent/layers/health.py).
    Every `evaluate_every` steps the first `evaluation_batches` batches of the validation split are evaluated (all by
    default). With several processes none waits longer than `patience` seconds for another at the start. A checkpoint
    that cannot be read ends the run, or with `skip_damaged` is set aside for the one before it. `profile_steps` are
    traced into the workdir. A new run begins with the parameters that `warm_start` names, and evaluates them over the
    whole validation split before its first step. `started` is called once everything has been checked and nothing has
    been written, `before_saving` ahead of every checkpoint: it raises where the workdir is no longer this run's.
    """
    check_arguments(locals())
    progress = progress_file(steps, active=jax.process_index() == 0)
    folder = run_folder(workdir)
    data = open_store(store_of_run(folder, store))
    check_vocabulary(model, data)
    device = jax.local_devices()[0]
    facts = {"kind of device": device.device_kind, "number of devices": str(jax.local_device_count())}
    agree("devices", facts, patience)
    mesh = make_mesh() if mesh is None else mesh
    check_rows(rows, mesh, accumulate)
    trainer = Trainer(model, optimizer, mesh, rows, accumulate, health)
    trainer.require_room(segment)
    stream = RowStream(data.split("train"), rows, segment, model.block, seed, local=trainer.local_rows())
    held_out = data.split("validation") if data.has("validation") else None
    if held_out is None and (plateau or keep_best):
        raise UserError(f"{store} has no validation split: leave train.plateau and train.keep_best away")
    plateau = plateau or STEADY
    stop = StopRequest()

    def place_unless_stopped(batch):
        stop.check()  # an evaluation may last longer than the notice of a machine that is taken away
        report.batch()
        return trainer.place(batch)

    evaluator = Evaluator(model, rows, segment, place_unless_stopped, trainer.local_rows(), trainer.initial_memory)
    if held_out is not None and evaluation_batches and not evaluator.predicts(held_out, evaluation_batches):
        raise UserError(
            f"train.evaluation_batches is {evaluation_batches}: the validation split of {store} has nothing to predict "
            f"in its first {evaluation_batches * segment:,} positions, where its longest documents are; give more"
        )

    begun = warm_start.state(trainer, data, seed, patience) if warm_start else None
    started(data)
    losses: dict[int, float] = {}  # held-out, by step
    checkpoints = Checkpoints(folder / "checkpoints", keep_checkpoints, keep_every, losses if keep_best else None)
    resumed = resume(trainer, checkpoints, stream, skip_damaged)
    is_new, first = resumed is None, Position(stream.begin(), evaluated=-1 if warm_start else 0)
    state, position = resumed or (begun or trainer.init(seed), first)
    del begun, resumed  # a step donates the state
    resumed_at = step = int(state.step)
    check_finite(state.params, folder, step)
    cursor, evaluated = position.cursor, position.evaluated
    losses.update(position.losses)
    scale, stops = decided(plateau, losses)
    if jax.process_index() == 0 and not stops:
        (folder / STOPPED).unlink(missing_ok=True)  # with a larger `stop_after` a run that was over goes on
    unit, active = unit_of(model, data.vocabulary), jax.process_index() == 0
    report = Reporter(folder, steps, step, -1 if is_new else evaluated, unit, losses, progress, active)
    at_peak = seconds_at_peak(trainer, segment) if active else None
    metrics = LateMetrics(report, log_every, rows * segment, position.nats, position.tokens, at_peak)
    report.line(overview(model, state.params, mesh, rows, segment, steps, stream, with_table=step == 0))
    begins = f"starting from {warm_start or 'scratch'}"
    report.line(begins if is_new else f"resumed at step {step}")
    if held_out is None:
        report.line(f"{data.folder} has no validation split: this run is measured on nothing that is held out")

    meet("first step", patience)
    report.state("compiling")
    batches = stream.ahead(cursor, trainer.place)
    with (
        stop,
        closing(checkpoints),
        closing(report),
        closing(batches),
        closing(Attendance(patience)) as attendance,
        closing(Profile(folder / "profile", step, profile_steps)) as profile,
    ):
        while True:
            attendance.at(step)
            asked = stop.due()
            due = held_out is not None and evaluated < step and (step % evaluate_every == 0 or step == steps)
            is_best = False
            if due and not asked:
                metrics.flush()
                try:
                    with in_mesh(mesh), metrics.spending("evaluation"):
                        if step:
                            score = evaluator(state.params, held_out, evaluation_batches)
                        else:
                            score = first_score(evaluator, trainer, state.params, held_out)
                    evaluated = step
                    if step or comparable(held_out, evaluation_batches):
                        is_best = score.loss < min(losses.values(), default=math.inf)
                        losses[step] = math.inf if math.isnan(score.loss) else score.loss
                    report.validation(step, score, is_best)
                    before, (scale, stops) = scale, decided(plateau, losses)
                    if scale < before:
                        report.line(f"step {step}: the learning rate is now {scale:g} times its schedule")
                except Stopped as stopped:  # to be done again by the run that goes on from here
                    asked = str(stopped)
            to_save = asked or stops or step % checkpoint_every == 0 or step == steps or (keep_best and is_best)
            if to_save and (step > resumed_at or (keep_best and is_best)):  # a warm start may stay the best
                metrics.flush()  # a step that is not finite is found before it is saved
                before_saving()
                position = Position(cursor, metrics.nats, metrics.tokens, evaluated, tuple(losses.items()))
                with metrics.spending("checkpoint"):
                    checkpoints.save(step, state.params, all_but_params(state), asdict(position))
            if asked or stops or step >= steps:
                with report.during("saving"):
                    checkpoints.wait()
            if asked:
                done = f"saved step {step}" if step > resumed_at else f"nothing new to save at step {step}"
                raise Preempted(f"{asked}: {done} of {steps} in {workdir}; the same command goes on")
            if stops and step < steps:
                end_early(folder, report, step, steps, losses)
            if stops or step >= steps:
                report.state("done")
                break
            profile.at(step)
            with metrics.spending("data"):
                batch, cursor = next(batches)
            state, step_metrics = trainer.step(state, batch, scale)
            step += 1
            metrics.push(step, step_metrics)


@dataclass(frozen=True)
class Position:
    """Where a run stands apart from its arrays: in the data, in its row of metrics, and in its evaluations."""

    cursor: Cursor
    nats: float = 0.0
    tokens: float = 0.0
    evaluated: int = 0  # the last step that was
    losses: Sequence[tuple[int, float]] = ()  # step and held-out loss of every evaluation


def decided(plateau: Plateau, losses: dict[int, float]) -> tuple[float, bool]:
    """What the learning rate is multiplied by from here on, and whether the run is over."""
    so_far = list(losses.values())
    return plateau.scale(so_far), plateau.stops(so_far)


def end_early(folder: epath.Path, report: Reporter, step: int, steps: int, losses: dict[int, float]) -> None:
    """Tells why a run is over before its steps, and notes it for those who look whether it is."""
    place = best(list(losses.values()))
    lowest = f"{report.unit.of(list(losses.values())[place])} at step {list(losses)[place]}"
    why = f"the last {len(losses) - 1 - place} evaluations brought no lower loss than {lowest}"
    report.line(f"finished early, at step {step} of {steps}: {why}")
    if report.active:
        write_text(folder / STOPPED, json.dumps({"step": step, "why": why}) + "\n")


def position_of(saved: Any, stream: RowStream) -> Position:
    """The position that is saved in a checkpoint, checked: it may come from elsewhere."""
    if not isinstance(saved, dict) or not {"cursor"} <= set(saved) <= {field.name for field in fields(Position)}:
        raise ValueError("it has no position of a run")
    position = Position(**{**saved, "cursor": stream.cursor(saved["cursor"])})
    WHOLE_0.check("evaluated", position.evaluated)
    for name, value in (("nats", position.nats), ("tokens", position.tokens)):
        FINITE.check(name, value)
    for step, loss in position.losses:
        WHOLE_0.check("the step of a loss", step)
        if not isinstance(loss, float | int):
            raise ValueError(f"a loss is {loss!r}")
    return position


def resume(
    trainer: Trainer, checkpoints: Checkpoints, stream: RowStream, skip_damaged: bool
) -> tuple[TrainState, Position] | None:
    """State and position of the latest checkpoint, or None in a fresh workdir; damaged for one process is for all."""
    if not checkpoints.steps():
        return None
    target, step = trainer.abstract_state(), checkpoints.steps()[-1]
    try:
        *restored, saved = checkpoints.restore(step, target.params, all_but_params(target))
        try:
            position, failure = position_of(saved, stream), ""
        except (TypeError, ValueError, UserError) as error:
            raise checkpoints.damaged(step, first_line(error)) from error
    except UserError as error:
        restored, failure = None, str(error)
    told = everyones(f"checkpoint {step} was read", {"failure": failure}, READING)
    failures = [each["failure"] for each in told if each["failure"]]
    if not failures:
        params, rest = restored
        return TrainState(params=params, **rest), position
    if not skip_damaged or len(checkpoints.steps()) < 2:
        raise UserError(failures[0])
    print(f"set aside: {failures[0]}", flush=True)
    del restored  # the part that could be read: the device may have no room for two
    checkpoints.set_aside(step, meet)
    return resume(trainer, checkpoints, stream, skip_damaged)


def check_finite(params: Any, folder: epath.Path, step: int) -> None:
    """Raises a UserError over parameters that would make every loss NaN."""
    finite = jax.jit(lambda tree: jnp.stack([jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(tree)]))(params)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    spoilt = [path for path, good in zip(paths, np.asarray(finite), strict=True) if not good]
    if spoilt:
        place = f"checkpoint {step} of {folder}" if step else "the model at its start"
        raise UserError(f"{place} has parameters that are no finite numbers: {', '.join(spoilt[:3])}")


def store_of_run(folder: epath.Path, store: str) -> str:
    """Where the store that a config names is; of one that each version of Python has, that which the run began with."""
    named = task_of(store)
    if (
        named
        and named.of_interpreter
        and (folder / RUN).exists()
        and is_store(began_with := read_about(folder)["store"])
    ):
        return began_with
    return store


def all_but_params(state: TrainState) -> dict:
    return {"step": state.step, "optimizer": state.optimizer, "memory": state.memory, "rng": state.rng}


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuses arguments of `train` that are out of range, or of another kind."""
    for name, value in given.items():
        if value is None and name in OPTIONAL:
            continue
        if name in RANGES:
            RANGES[name].check(f"train.{name}", value)
        elif name in KINDS and not isinstance(value, KINDS[name][0]):
            what = "not called (@NAME without parentheses)" if inspect.isroutine(value) else repr(value)
            raise UserError(f"train.{name} is {what}: give {KINDS[name][1]}")


def check_vocabulary(model: nn.Module, store: Store) -> None:
    """Refuses data of another kind than the model's, then labels and token ids that it does not have."""
    head, size = model.head, store.vocabulary_size
    data, wanted = kind_of_data(store), kind_of_model(model)
    if data != wanted and not (has_labels(data) and has_labels(wanted)):
        raise UserError(
            f"{store.folder} holds {data}, and the model, whose head is {type(head).__name__}, is for {wanted}: give "
            f"another --gin.STORE, or a config for {data} such as --gin_file={EXAMPLES[data]}"
        )
    labels, classes = store.manifest.get("labels"), getattr(head, "classes", None)
    if labels and len(labels) != classes:
        raise UserError(
            f"{store.folder} has {len(labels)} labels, the model's head, {type(head).__name__}, is for {classes} of "
            f"them: give --gin.{type(head).__name__}.classes={len(labels)}"
        )
    exactly = store.manifest.get("record") != head.record(model.vocabulary_size)
    if size > model.vocabulary_size or exactly:
        ids = "keys" if data == MUSIC else "token ids"
        raise UserError(
            f"{store.folder} has {size} {ids}, the model's vocabulary_size is {model.vocabulary_size}: give "
            f"--gin.{type(model).__name__}.vocabulary_size={size}" + ("" if exactly else ", or more")
        )


def has_labels(kind: str) -> bool:
    return kind in (PIXELS, LABELLED_TEXT)


def kind_of_data(store: Store) -> str:
    if store.manifest.get("record"):
        return MUSIC
    if store.manifest.get("labels"):
        return PIXELS if store.manifest["vocabulary"]["kind"] == "pixels" else LABELLED_TEXT
    return TEXT


def kind_of_model(model: nn.Module) -> str:
    if model.head.record(model.vocabulary_size) is not None:
        return MUSIC
    if getattr(model.head, "classes", None):
        return PIXELS if getattr(model.head, "pixels", False) else LABELLED_TEXT
    return TEXT
