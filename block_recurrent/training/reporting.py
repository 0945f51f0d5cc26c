"""What a run tells: TensorBoard through clu, metrics.jsonl, a progress bar on a terminal and plain lines in a log."""

import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from block_recurrent.quiet import quiet_stderr


class Reporter:
    """Writes a run's metrics and lines; only the main process has one that writes."""

    def __init__(self, workdir: Path, steps: int, resumed_at: int, active: bool = True):
        self.active, self.steps = active, steps
        if not active:
            return
        self.metrics_file = workdir / "metrics.jsonl"
        drop_after(self.metrics_file, resumed_at)
        self.log_file = open(workdir / "train.log", "a", buffering=1)  # noqa: SIM115
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
        with quiet_stderr():  # TensorFlow: seconds to import
            from clu import metric_writers
        self.tensorboard = metric_writers.AsyncWriter(metric_writers.SummaryWriter(str(workdir / "tensorboard")))

    def line(self, text: str) -> None:
        """A line for the log and the screen."""
        if self.active:
            self.log_file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def metrics(self, step: int, values: dict[str, float], text: str) -> None:
        """A row of metrics, and the same as a line where there is no bar to show it."""
        if not self.active:
            return
        with open(self.metrics_file, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        self.tensorboard.write_scalars(step, values)
        if self.bar is None:
            self.line(text)
        else:
            self.log_file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def advance(self, step: int, loss: float, tokens_per_second: float) -> None:
        if self.active and self.bar is not None:
            self.bar.update(self.task, completed=step, status=f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s")

    def close(self) -> None:
        if self.active:
            if self.bar is not None:
                self.bar.stop()
            self.tensorboard.flush()
            self.tensorboard.close()
            self.log_file.close()


def read_metrics(file: Path) -> list[dict]:
    """The rows of a metrics file; a last line cut short by a kill is left out."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def drop_after(file: Path, step: int) -> None:
    """Forgets what a killed run wrote after the checkpoint that it resumes from."""
    rows = read_metrics(file)
    kept = [row for row in rows if row["step"] <= step]
    if len(kept) < len(rows):
        file.write_text("".join(json.dumps(row) + "\n" for row in kept))
