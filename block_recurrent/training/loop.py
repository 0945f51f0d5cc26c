"""The training loop: rows in, steps, evaluations, checkpoints; killed at any moment, it goes on where it was."""

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from block_recurrent.checkpoints import Checkpoints
from block_recurrent.data.rows import Cursor, RowStream
from block_recurrent.data.store import Store, open_store
from block_recurrent.errors import Preempted, UserError
from block_recurrent.inference.evaluation import Evaluator
from block_recurrent.training.optimizers import Optimizer
from block_recurrent.training.overview import overview
from block_recurrent.training.reporting import Reporter
from block_recurrent.training.sharding import RULES, check_rows, make_mesh
from block_recurrent.training.step import Trainer, TrainState


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
    mesh: Mesh | None = None,
    log_every: int = 50,
    evaluate_every: int = 1000,
    evaluation_batches: int | None = None,
    checkpoint_every: int = 1000,
    keep_checkpoints: int = 3,
    started: Callable[[Store], None] = lambda store: None,
) -> None:
    """Trains up to `steps`, from the latest checkpoint in `workdir` if there is one.

    `rows` documents are read side by side, `segment` tokens of each a step; `accumulate` splits the rows of a step.
    Every `evaluate_every` steps the first `evaluation_batches` batches of the validation split are evaluated (all by
    default). `started` is called once everything has been checked and nothing has been written.
    """
    data = open_store(store)
    check_vocabulary(model, data)
    mesh = make_mesh() if mesh is None else mesh
    check_rows(rows, mesh, accumulate)
    trainer = Trainer(model, optimizer, mesh, rows, accumulate)
    stream = RowStream(data.split("train"), rows, segment, model.block, seed, local=trainer.local_rows())
    held_out = data.split("validation") if data.has("validation") else None
    evaluator = Evaluator(model, rows, segment, trainer.place, trainer.local_rows())

    started(data)
    checkpoints = Checkpoints(Path(workdir) / "checkpoints", keep_checkpoints)
    state, cursor = resume(trainer, checkpoints) or (trainer.init(seed), stream.begin())
    step = int(state.step)
    report = Reporter(Path(workdir), steps, step, active=jax.process_index() == 0)
    report.line(overview(model, state.params, mesh, rows, segment, steps, stream))
    report.line(f"resumed at step {step}" if step else "starting from scratch")

    def save() -> None:
        rest = {"step": state.step, "optimizer": state.optimizer, "memory": state.memory, "rng": state.rng}
        checkpoints.save(step, state.params, rest, cursor.to_json())

    def evaluate() -> None:
        if held_out is None:
            return
        with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
            score = evaluator(state.params, held_out, evaluation_batches)
        values = {
            "validation_bits_per_token": score.bits_per_token,
            "validation_bits_per_byte": score.bits_per_byte,
        }
        text = f"step {step}: validation {score.bits_per_byte:.4f} bits per byte, {score.bits_per_token:.4f} per token"
        report.metrics(step, values, text)

    pending = Pending(report, log_every, segment * rows)
    with StopRequest() as stop:
        try:
            while step < steps:
                batch, after = stream.read(cursor)
                state, metrics = trainer.step(state, batch)
                step, cursor = step + 1, after
                pending.push(step, metrics)
                if stop.requested or step % checkpoint_every == 0 or step == steps:
                    pending.flush()  # a step that is not finite is found before it is saved
                    save()
                if stop.requested:
                    checkpoints.wait()
                    raise Preempted(
                        f"{stop.requested}: saved step {step} of {steps} in {workdir}; the same command goes on"
                    )
                if step % evaluate_every == 0 or step == steps:
                    pending.flush()
                    evaluate()
                    pending.restart_clock()
            checkpoints.wait()
        finally:
            report.close()
            checkpoints.close()


def resume(trainer: Trainer, checkpoints: Checkpoints) -> tuple[TrainState, Cursor] | None:
    """State and data position of the latest checkpoint, or None in a fresh workdir."""
    if not checkpoints.steps():
        return None
    target = trainer.abstract_state()
    rest = {"step": target.step, "optimizer": target.optimizer, "memory": target.memory, "rng": target.rng}
    params, rest, cursor = checkpoints.restore(checkpoints.steps()[-1], target.params, rest)
    return TrainState(params=params, **rest), Cursor(**cursor)


def check_vocabulary(model: nn.Module, store: Store) -> None:
    size = store.manifest["vocabulary"]["size"]
    if size > model.vocabulary_size:
        raise UserError(
            f"{store.folder} has {size} token ids, the model's vocabulary_size is {model.vocabulary_size}: "
            f"set it to {size} or more"
        )


class Pending:
    """Metrics of the last step, fetched one step late so that the device never waits for the host."""

    def __init__(self, report: Reporter, log_every: int, tokens_per_step: int):
        self.report, self.log_every, self.tokens_per_step = report, log_every, tokens_per_step
        self.waiting = None
        self.recent: list[tuple[float, float]] = []  # (nats, tokens) since the last row of metrics
        self.restart_clock()

    def restart_clock(self) -> None:
        self.clock, self.timed_steps = time.perf_counter(), 0

    def push(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self.flush()
        self.waiting = (step, metrics)

    def flush(self) -> None:
        if self.waiting is None:
            return
        step, metrics = self.waiting[0], {name: float(value) for name, value in self.waiting[1].items()}
        self.waiting = None
        if not all(map(math.isfinite, (metrics["loss"], metrics["gradient_norm"], metrics["update_norm"]))):
            raise UserError(
                f"step {step}: loss {metrics['loss']}, gradient norm {metrics['gradient_norm']}: the run has diverged "
                "and stops; its last checkpoint is good. Lower the learning rate, lengthen the warm-up or clip "
                "gradients, in a new workdir"
            )
        self.timed_steps += 1
        speed = self.timed_steps * self.tokens_per_step / max(time.perf_counter() - self.clock, 1e-9)
        self.recent.append((metrics["loss"] * metrics["tokens"], metrics["tokens"]))
        self.report.advance(step, metrics["loss"], speed)
        if step % self.log_every == 0:
            nats, tokens = np.sum(self.recent, axis=0)
            values = {
                **metrics,
                "loss": nats / max(tokens, 1),
                "tokens": float(tokens),
                "tokens_per_second": speed,
            }
            bits = values["loss"] / math.log(2)
            self.report.metrics(
                step, values, f"step {step}: loss {values['loss']:.4f} ({bits:.3f} bits), {speed:,.0f} tokens/s"
            )
            self.recent = []
            self.restart_clock()


class StopRequest:
    """Remembers SIGTERM or Ctrl-C until the current step is done; a second Ctrl-C is not waited for."""

    def __enter__(self) -> "StopRequest":
        self.requested = ""
        self.previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _note(self, number: int, frame) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name

    def __exit__(self, *exception) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
