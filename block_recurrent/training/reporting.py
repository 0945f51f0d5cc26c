"""What a run tells: TensorBoard through clu, metrics.jsonl, a bar below the lines on a terminal, and a log."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
from etils import epath
from flax import linen as nn
from rich.console import Console

from block_recurrent.data import files
from block_recurrent.data.vocabulary import Vocabulary
from block_recurrent.errors import UserError
from block_recurrent.inference.evaluation import Score
from block_recurrent.inference.run import METRICS, held_out_loss, read_metrics
from block_recurrent.quiet import import_tensorflow
from block_recurrent.training.bar import Bar
from block_recurrent.training.progress import ProgressFile


@dataclass(frozen=True)
class Unit:
    """What losses are shown in: bits of a token of text, nats of a frame or of a label."""

    name: str
    nats: float = 1.0  # in one of it
    positions: str = "tokens"  # what is read

    def of(self, loss: float) -> str:
        return f"{loss / self.nats:.4f} {self.name}"


def unit_of(model: nn.Module, vocabulary: Vocabulary) -> Unit:
    positions = vocabulary.positions
    if hasattr(model.head, "classes"):
        return Unit("nats per label", positions=positions)
    if positions == "tokens":
        return Unit("bits per token", math.log(2))
    return Unit(f"nats per {positions.removesuffix('s')}", positions=positions)


class Reporter:
    """Writes a run's metrics and lines; only the main process has one that writes.

    `losses` are the held-out losses by step, to which the run adds as it goes.
    """

    def __init__(
        self,
        workdir: epath.Path,
        steps: int,
        resumed_at: int,
        evaluated: int,
        unit: Unit,
        losses: Mapping[int, float],
        progress: ProgressFile,
        active: bool = True,
    ):
        self.active, self.steps, self.unit, self.losses = active, steps, unit, losses
        self.progress, self.step, self.bar, self.pace = progress, resumed_at, None, None
        self.begun = self.entered = time.perf_counter()  # the run, and its present state
        self.evaluating = 0.0  # seconds of evaluations that are over
        if not active:
            return
        self.metrics_file = workdir / METRICS
        drop_after(self.metrics_file, resumed_at, evaluated)
        self.log_file = workdir / "train.log"
        self.console = Console()
        if sys.stdout.isatty() and not self.console.is_dumb_terminal:
            self.bar = Bar(self.console, steps, resumed_at)
        self.state("starting")
        import_tensorflow()  # seconds: only the process that writes needs it
        from clu import metric_writers

        self.events = files.Mirror(workdir / "tensorboard")
        self.tensorboard = metric_writers.AsyncWriter(metric_writers.SummaryWriter(self.events.folder))

    def line(self, text: str, style: str | None = None) -> None:
        """A line for the log and the screen."""
        if self.active:
            append(self.log_file, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            whole = self.bar is None  # where a person reads, lines break between words
            self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=whole)

    def metrics(self, step: int, values: dict[str, float], text: str, style: str | None = None) -> None:
        """A row of metrics, and the same as a line."""
        if not self.active:
            return
        append(self.metrics_file, json.dumps({"step": step, **values}) + "\n")
        self.tensorboard.write_scalars(step, values)
        if files.is_remote(self.events.place):
            self.tensorboard.flush()
            self.events.upload()
        self.line(text, style)
        self.progress.tell(self.progress.state, step)

    def validation(self, step: int, score: Score, is_best: bool) -> None:
        """An evaluation's row."""
        values = {"validation_loss": score.loss}
        text = self.unit.of(score.loss)
        if score.hits is not None:
            values["validation_accuracy"] = score.accuracy
            text = f"{score.accuracy:.2%} right, {text}"
        elif self.unit.positions == "tokens":
            values |= {
                "validation_bits_per_token": score.bits_per_token,
                "validation_bits_per_byte": score.bits_per_byte,
            }
            text = f"{score.bits_per_byte:.4f} bits per byte, {score.bits_per_token:.4f} per token"
        text += "; the best so far" if is_best else ""
        self._show(self.progress.state, now=True)
        self.metrics(step, values, f"step {step}: validation {text}", style="bold")

    def advance(self, step: int, loss: float, pace: "Pace") -> None:
        """Shows a step that is finished."""
        self.step, self.loss, self.pace = step, loss, pace
        if self.bar is not None:
            self.bar.advance(step)
        if self.progress.state != "training":
            self.state("training")
        else:
            self.progress.alive(step)
            self._show("training")

    def state(self, name: str) -> None:
        """Shows what the run does from here on: starting, compiling, training, evaluating, saving or done."""
        now = time.perf_counter()
        self.evaluating, self.entered, self.batches = self._seconds_in_evaluation(now), now, 0
        self.progress.tell(name, self.step)
        self._show(f"saving step {self.step:,}" if name == "saving" else name, now=True)

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Shows another state for what is done inside."""
        before = self.progress.state
        self.state(name)
        yield
        self.state(before)

    def batch(self) -> None:
        """Shows that an evaluation has come to its next batch."""
        self.batches += 1
        self.progress.alive(self.step)
        self._show(f"evaluating, batch {self.batches:,}")

    def _show(self, state: str, now: bool = False) -> None:
        if self.bar is not None:
            loss = "" if self.pace is None else f"loss {self.unit.of(self.loss)}"
            pace = () if self.pace is None else self.pace.pieces(self.unit.positions)
            now = time.perf_counter()
            spent = self._seconds_in_evaluation(now)
            spent = f"{spent / (now - self.begun):.0%} of time in evaluation" if spent else ""
            self.bar.show(state, [piece for piece in (loss, self._held_out(), *pace, spent) if piece], now)

    def _seconds_in_evaluation(self, now: float) -> float:
        return self.evaluating + (now - self.entered if self.progress.state == "evaluating" else 0.0)

    def _held_out(self) -> str:
        """The last and the best held-out loss, in the unit of the training loss."""
        if not self.losses:
            return ""
        last, best = next(reversed(self.losses.values())), min(self.losses, key=self.losses.__getitem__)
        return f"held out {last / self.unit.nats:.4f}, best {self.losses[best] / self.unit.nats:.4f} at step {best:,}"

    def close(self) -> None:
        if self.active:
            if self.bar is not None:
                self.bar.close(done=self.progress.state == "done")
            self.tensorboard.flush()
            self.tensorboard.close()
            self.events.upload()


@dataclass(frozen=True)
class Pace:
    """How fast a run goes, and at which learning rate."""

    learning_rate: float
    tokens_per_second: float | None  # while it trains; None before there is a step to time
    utilisation: float | None  # None where the device's peak is not known

    def pieces(self, positions: str) -> Iterator[str]:
        """The figures that are known, one by one."""
        if self.tokens_per_second is not None:
            yield f"{self.tokens_per_second:,.0f} {positions}/s"
            if self.utilisation is not None:
                yield f"{self.utilisation:.1%} MFU"
        yield f"learning rate {self.learning_rate:.3g}"


STATES = {"checkpoint": "saving", "evaluation": "evaluating"}  # of what time is spent on


class LateMetrics:
    """Metrics of the steps, fetched one step late so that the device never waits for the host.

    `at_peak` are the seconds that a token takes at the devices' peak, where that is known.
    """

    def __init__(
        self,
        report: Reporter,
        log_every: int,
        tokens_per_step: int,
        nats: float,
        tokens: float,
        at_peak: float | None = None,
    ):
        self.report, self.log_every, self.tokens_per_step, self.at_peak = report, log_every, tokens_per_step, at_peak
        self.waiting = None
        self.nats, self.tokens = nats, tokens  # since the last row of metrics
        self.compiled = False
        self.restart_clock()

    def restart_clock(self) -> None:
        self.clock, self.timed_steps = time.perf_counter(), 0
        self.spent = dict.fromkeys(("data", "checkpoint", "evaluation"), 0.0)
        self.compiling = (0, 0.0)  # steps and seconds that tell nothing of the pace

    @contextlib.contextmanager
    def spending(self, on: str) -> Iterator[None]:
        """Counts the time of what is done inside towards "data", "checkpoint" or "evaluation"."""
        began = time.perf_counter()
        with self.report.during(STATES[on]) if on in STATES else contextlib.nullcontext():
            yield
        self.spent[on] += time.perf_counter() - began

    def push(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes a step's metrics, which may not be there yet, and reports those of the step before."""
        self.flush()
        self.waiting = (step, metrics)

    def flush(self) -> None:
        """Waits for the last step's metrics and reports them; a step that is not finite ends the run."""
        if self.waiting is None:
            return
        step, metrics = self.waiting[0], {name: float(value) for name, value in self.waiting[1].items()}
        self.waiting = None
        watched = ("loss", "gradient_norm", "update_norm")
        if not all(math.isfinite(metrics[name]) for name in watched):
            values = ", ".join(
                (f"loss {self.report.unit.of(metrics['loss'])}", *(f"{n} {metrics[n]:.4g}" for n in watched[1:]))
            )
            raise UserError(
                f"step {step} has diverged ({values}), on ids in range and from finite parameters: the run stops, "
                "and nothing of this step was saved. "
                "Lower the learning rate, lengthen the warm-up or clip gradients, in a new workdir"
            )
        self.timed_steps += 1
        self.nats += metrics["loss"] * metrics["tokens"]
        self.tokens += metrics["tokens"]
        seconds = max(time.perf_counter() - self.clock, 1e-9)
        training = seconds - self.spent["evaluation"]
        if not self.compiled:
            self.compiled, self.compiling = True, (1, training)
        self.report.advance(step, metrics["loss"], self._pace(metrics["learning_rate"], training))
        if step % self.log_every == 0:
            self._row(step, metrics, seconds, training)

    def _pace(self, learning_rate: float, training: float) -> Pace:
        steps, compiling = self.compiling
        timed = self.timed_steps - steps
        speed = timed * self.tokens_per_step / max(training - compiling, 1e-9) if timed else None
        return Pace(learning_rate, speed, speed and self.at_peak and speed * self.at_peak)

    def _row(self, step: int, metrics: dict[str, float], seconds: float, training: float) -> None:
        """Reports all steps since the last row: their mean loss, their speed without evaluations, their waits."""
        loss, unit = self.nats / max(self.tokens, 1.0), self.report.unit
        speed = self.timed_steps * self.tokens_per_step / max(training, 1e-9)
        shares = {name: spent / seconds for name, spent in self.spent.items()}
        values = {**metrics, "loss": loss, "tokens": self.tokens, "tokens_per_second": speed}
        values |= {f"{name}_share": share for name, share in shares.items()}
        text = f"step {step}: loss {unit.of(loss)}, {speed:,.0f} {unit.positions}/s"
        if self.at_peak is not None:
            values["model_flops_utilisation"] = speed * self.at_peak
            text += f", {speed * self.at_peak:.1%} MFU"
        shares["compiling"] = self.compiling[1] / seconds
        waits = ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share >= 0.015)
        self.report.metrics(step, values, text + (f" ({waits})" if waits else ""))
        self.nats = self.tokens = 0.0
        self.restart_clock()


def append(file: epath.Path, text: str) -> None:
    """Adds lines to a file, never to a line that was cut short; a bucket's file, which cannot grow, is written anew."""
    if files.is_remote(file):
        before = file.read_text() if file.exists() else ""
        file.write_text(before + ("\n" if before and not before.endswith("\n") else "") + text)
        return
    with open(file, "ab+") as stream:
        if stream.tell() and (stream.seek(-1, os.SEEK_END), stream.read(1))[1] != b"\n":
            stream.write(b"\n")
        stream.write(text.encode())


def drop_after(file: epath.Path, step: int, evaluated: int) -> None:
    """Forgets what a killed run wrote after the checkpoint that it resumes from, whose last evaluation is given.

    A row that was cut short goes too.
    """
    rows, lines = read_metrics(file), file.read_bytes().splitlines() if file.exists() else []
    kept = [row for row in rows if row["step"] <= (step if held_out_loss(row) is None else evaluated)]
    if len(kept) < len(lines):
        files.write_bytes(str(file), "".join(json.dumps(row) + "\n" for row in kept).encode())
