"""What a run tells: TensorBoard through clu, metrics.jsonl, a progress bar on a terminal and plain lines in a log."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator

import jax
from etils import epath
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from block_recurrent.data import files
from block_recurrent.errors import UserError
from block_recurrent.inference.evaluation import Score
from block_recurrent.inference.run import METRICS, held_out_loss, read_metrics
from block_recurrent.quiet import import_tensorflow


class Reporter:
    """Writes a run's metrics and lines; only the main process has one that writes."""

    def __init__(
        self, workdir: epath.Path, steps: int, resumed_at: int, evaluated: int, positions: str, active: bool = True
    ):
        self.active, self.steps, self.positions = active, steps, positions
        if not active:
            return
        self.metrics_file = workdir / METRICS
        drop_after(self.metrics_file, resumed_at, evaluated)
        self.log_file = workdir / "train.log"
        self.console = Console()
        self.bar = None
        if sys.stdout.isatty():
            self.bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task("training", total=steps, completed=resumed_at, status="compiling ...")
            self.bar.start()
        import_tensorflow()  # seconds: only the process that writes needs it
        from clu import metric_writers

        self.events = files.Mirror(workdir / "tensorboard")
        self.tensorboard = metric_writers.AsyncWriter(metric_writers.SummaryWriter(self.events.folder))

    def line(self, text: str) -> None:
        """A line for the log and the screen."""
        if self.active:
            append(self.log_file, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def metrics(self, step: int, values: dict[str, float], text: str) -> None:
        """A row of metrics, and the same as a line where there is no bar to show it."""
        if not self.active:
            return
        append(self.metrics_file, json.dumps({"step": step, **values}) + "\n")
        self.tensorboard.write_scalars(step, values)
        if files.is_remote(self.events.place):
            self.tensorboard.flush()
            self.events.upload()
        if self.bar is None:
            self.line(text)
        else:
            append(self.log_file, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def validation(self, step: int, score: Score, is_best: bool) -> None:
        """An evaluation's row."""
        values = {"validation_loss": score.loss}
        if score.hits is not None:
            values["validation_accuracy"] = score.accuracy
            text = f"{score.accuracy:.2%} right, {score.loss:.4f} nats per label"
        elif self.positions != "tokens":
            text = f"{score.loss:.4f} nats per {self.positions.removesuffix('s')}"
        else:
            values |= {
                "validation_bits_per_token": score.bits_per_token,
                "validation_bits_per_byte": score.bits_per_byte,
            }
            text = f"{score.bits_per_byte:.4f} bits per byte, {score.bits_per_token:.4f} per token"
        text += f"; step {step} is the best so far, loss {score.loss:.4f}" if is_best else ""
        self.metrics(step, values, f"step {step}: validation {text}")

    def advance(self, step: int, loss: float, tokens_per_second: float) -> None:
        if self.active and self.bar is not None:
            self.bar.update(self.task, completed=step, status=f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s")

    def close(self) -> None:
        if self.active:
            if self.bar is not None:
                self.bar.stop()
            self.tensorboard.flush()
            self.tensorboard.close()
            self.events.upload()


class LateMetrics:
    """Metrics of the steps, fetched one step late so that the device never waits for the host."""

    def __init__(self, report: Reporter, log_every: int, tokens_per_step: int, nats: float, tokens: float):
        self.report, self.log_every, self.tokens_per_step = report, log_every, tokens_per_step
        self.waiting = None
        self.nats, self.tokens = nats, tokens  # since the last row of metrics
        self.restart_clock()

    def restart_clock(self) -> None:
        self.clock, self.timed_steps, self.spent = time.perf_counter(), 0, dict.fromkeys(("data", "checkpoint"), 0.0)

    @contextlib.contextmanager
    def spending(self, on: str) -> Iterator[None]:
        """Counts the time of what is done inside towards "data" or "checkpoint"; the rest is the device's."""
        began = time.perf_counter()
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
            values = ", ".join(f"{name} {metrics[name]:.4g}" for name in watched)
            raise UserError(
                f"step {step} has diverged ({values}), on ids in range and from finite parameters: the run stops, "
                "and nothing of this step was saved. "
                "Lower the learning rate, lengthen the warm-up or clip gradients, in a new workdir"
            )
        self.timed_steps += 1
        speed = self.timed_steps * self.tokens_per_step / max(time.perf_counter() - self.clock, 1e-9)
        self.nats += metrics["loss"] * metrics["tokens"]
        self.tokens += metrics["tokens"]
        self.report.advance(step, metrics["loss"], speed)
        if step % self.log_every == 0:
            loss = self.nats / max(self.tokens, 1.0)
            seconds = max(time.perf_counter() - self.clock, 1e-9)
            shares = {f"{name}_share": spent / seconds for name, spent in self.spent.items()}
            values = {**metrics, "loss": loss, "tokens": self.tokens, "tokens_per_second": speed, **shares}
            text = f"step {step}: loss {loss:.4f} ({loss / math.log(2):.3f} bits), {speed:,.0f} tokens/s"
            waits = ", ".join(f"{share:.0%} {name}" for name, share in zip(self.spent, shares.values(), strict=True))
            text += f" ({waits}, {1 - sum(shares.values()):.0%} device)"
            self.report.metrics(step, values, text)
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
    """Forgets what a killed run wrote after the checkpoint that it resumes from, whose last evaluation is given."""
    rows = read_metrics(file)
    kept = [row for row in rows if row["step"] <= (step if held_out_loss(row) is None else evaluated)]
    if len(kept) < len(rows):
        files.write_bytes(str(file), "".join(json.dumps(row) + "\n" for row in kept).encode())
