"""Finished runs side by side: their figures as one document, a table of it, and pictures."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

from block_recurrent.errors import UserError
from block_recurrent.inference.statistics import paired_interval, ratio_interval
from block_recurrent.plots import draw, draw_intervals

MEASURES = {"bits_per_token": "tokens", "bits_per_byte": "bytes"}  # and what each is per, in a document
NOT_KNOWN = "-"
NOTES = (
    "In brackets: 95 % intervals over documents, of differences over pairs of them; they tell of other documents, not "
    "of other seeds.",
    "FLOPs are of training, as `plan` counts them. Times are of runs one after another, on a machine that may have had "
    "other work: no benchmark.",
)


@dataclass(frozen=True)
class Contender:
    """A config of a comparison."""

    name: str
    config: str
    tokens_per_step: int
    steps: int


@dataclass(frozen=True)
class Run:
    """A contender with a seed: where it is, and the bindings that `train` takes for it."""

    contender: Contender
    seed: int
    workdir: Path
    arguments: tuple[str, ...]

    @property
    def last_step(self) -> int:
        """The last of its steps, or that at which its held-out losses have ended it."""
        try:
            return json.loads((self.workdir / "stopped.json").read_text())["step"]
        except (FileNotFoundError, json.JSONDecodeError):
            return self.contender.steps

    def is_trained(self) -> bool:
        return (self.workdir / "checkpoints" / str(self.last_step)).is_dir()

    def score(self, split: str) -> dict | None:
        """What `evaluate` wrote; None before, or where it was killed in writing."""
        try:
            return json.loads((self.workdir / "evaluation" / f"{split}-{self.last_step}.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None


def write(output: Path, about: dict, scores: dict[Run, dict], costs: dict[Contender, dict]) -> None:
    """Writes comparison.json, comparison.md and the plots of runs that are finished, and prints the table."""
    from rich.console import Console
    from rich.table import Table

    entries = compared(scores, costs)
    (output / "comparison.json").write_text(json.dumps({**about, "configs": entries}, indent=2) + "\n")
    header, *rows = cells(entries)
    title = f"{about['tokens']:,} tokens of {Path(about['store']).name}"
    early = [f"{run.workdir.name} at step {run.last_step:,}" for run in scores if run.last_step < run.contender.steps]
    told_of = {"Stopped early by held-out losses": early, "Not finished": about["missing"]}
    notes = [*NOTES, *(f"{what}: {', '.join(names)}." for what, names in told_of.items() if names)]
    lines = [f"{title}, evaluated on {about['split']}", "", *markdown(header, rows), "", *notes]
    (output / "comparison.md").write_text("\n".join(lines) + "\n")
    plots = draw_plots(output / "plots", title, about["split"], entries)

    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(title=lines[0])
    table.add_column(header[0], no_wrap=True)
    for name in header[1:]:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace(" [", "\n[") for cell in row))
    console.print(table)
    for line in (*notes, f"written to {output}: comparison.json, comparison.md, {', '.join(map(str, plots))}"):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def compared(scores: dict[Run, dict], costs: dict[Contender, dict]) -> list[dict]:
    """An entry for each contender, in the order of `costs`; differences are to the first."""
    from block_recurrent.inference.run import read_metrics

    by_seed: dict[Contender, dict[int, dict]] = {}
    metrics: dict[Contender, list[list[dict]]] = {}
    for run, score in scores.items():
        by_seed.setdefault(run.contender, {})[run.seed] = score
        metrics.setdefault(run.contender, []).append(read_metrics(run.workdir / "metrics.jsonl"))
    check_documents(scores)
    first = next(iter(costs))
    speeds = {contender: speed(rows) for contender, rows in metrics.items()}
    return [
        {
            **asdict(contender),
            **cost,
            "tokens": contender.steps * contender.tokens_per_step,
            "seeds": list(by_seed[contender]),
            "tokens_per_second": speeds[contender],
            "relative_time_per_token": speeds[first] and speeds[contender] and speeds[first] / speeds[contender],
            **{name: figure(name, list(by_seed[contender].values())) for name in MEASURES},
            "difference": difference(by_seed[contender], by_seed[first]) if contender != first else None,
            "curve": curve(metrics[contender], contender.tokens_per_step),
        }
        for contender, cost in costs.items()
    ]


def check_documents(scores: dict[Run, dict]) -> None:
    """Refuses scores of different documents, which cannot be paired."""
    seen = {run: score["per_document"] for run, score in scores.items()}
    for run, documents in seen.items():
        first, expected = next(iter(seen.items()))
        if any(documents[key] != expected[key] for key in ("name", "tokens", "bytes")):
            raise UserError(
                f"{run.workdir} was evaluated on other documents than {first.workdir}: remove its evaluation/ and give "
                "the same command again"
            )


def figure(name: str, scores: Sequence[dict]) -> dict:
    """A measure of one contender: its mean over seeds, how far they are apart, and an interval over documents."""
    values = [score[name] for score in scores]
    interval = in_bits(ratio_interval(mean_nats(scores), scores[0]["per_document"][MEASURES[name]]))
    return {"mean": fmean(values), "by_seed": values, "spread": max(values) - min(values), "interval": interval}


def difference(own: dict[int, dict], first: dict[int, dict]) -> dict | None:
    """Each measure less the first contender's, on the seeds that both have."""
    shared = [seed for seed in own if seed in first]
    if not shared:
        return None
    ours, theirs = [own[seed] for seed in shared], [first[seed] for seed in shared]
    found: dict = {"seeds": shared}
    for name, unit in MEASURES.items():
        value = fmean(a[name] - b[name] for a, b in zip(ours, theirs, strict=True))
        interval = paired_interval(mean_nats(ours), mean_nats(theirs), ours[0]["per_document"][unit])
        found[name] = {"mean": value, "interval": in_bits(interval)}
    return found


def mean_nats(scores: Sequence[dict]) -> np.ndarray:
    """Nats of each document, averaged over seeds."""
    return np.mean([score["per_document"]["nats"] for score in scores], axis=0)


def in_bits(interval: tuple[float, float] | None) -> list[float] | None:
    return interval and [bound / math.log(2) for bound in interval]


def speed(runs: Sequence[list[dict]]) -> float | None:
    """Tokens a second, from rows of metrics: the median without each run's first, in which it compiles."""
    timed = [[row["tokens_per_second"] for row in rows if "tokens_per_second" in row] for rows in runs]
    speeds = [speed for each in timed for speed in each[1:]]
    return median(speeds) if speeds else None


def curve(runs: Sequence[list[dict]], tokens_per_step: int) -> dict[str, list[float]]:
    """Held-out bits per byte in the course of training, averaged over seeds."""
    name = "validation_bits_per_byte"
    by_step = [{row["step"]: row[name] for row in rows if name in row} for rows in runs]
    steps = [step for step in by_step[0] if all(step in each for each in by_step)]
    bits = [fmean(each[step] for each in by_step) for step in steps]
    return {"tokens": [step * tokens_per_step for step in steps], "bits_per_byte": bits}


def cells(entries: Sequence[dict]) -> list[list[str]]:
    """The table, its header first; a column that nothing is known of is left out."""
    columns = {
        "config": [entry["name"] for entry in entries],
        "parameters": [short(entry["parameters"]) for entry in entries],
        "model FLOPs per token": [short(entry["model_flops_per_token"]) for entry in entries],
        "hardware FLOPs": [short(entry["hardware_flops_per_token"]) for entry in entries],
        "relative time per token": [told(entry["relative_time_per_token"], "{:.2f}") for entry in entries],
        "bits per token": [with_interval(entry["bits_per_token"], "{:.3f}") for entry in entries],
        "bits per byte": [with_interval(entry["bits_per_byte"], "{:.3f}") for entry in entries],
        "spread of seeds": [spread(entry) for entry in entries],
        "difference per byte": [
            with_interval(entry["difference"]["bits_per_byte"], "{:+.3f}") if entry["difference"] else NOT_KNOWN
            for entry in entries
        ],
    }
    shown = {name: column for name, column in columns.items() if set(column) != {NOT_KNOWN}}
    return [list(shown), *map(list, zip(*shown.values(), strict=True))]


def short(number: float) -> str:
    """1,234,567 as 1.23M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def told(value: float | None, layout: str) -> str:
    return NOT_KNOWN if value is None else layout.format(value)


def spread(entry: dict) -> str:
    """How far the seeds' bits per byte are apart, and how many there are."""
    count = len(entry["seeds"])
    return f"{entry['bits_per_byte']['spread']:.3f} of {count}" if count > 1 else NOT_KNOWN


def with_interval(figure: dict, layout: str) -> str:
    bounds = figure["interval"]
    return layout.format(figure["mean"]) + (f" [{', '.join(map(layout.format, bounds))}]" if bounds else "")


def markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def draw_plots(folder: Path, title: str, split: str, entries: Sequence[dict]) -> list[Path]:
    """Draws what there is to draw; the files that were drawn."""
    files = [folder / "final.png"]
    draw_intervals(
        files[0],
        title,
        {entry["name"]: (entry["bits_per_byte"]["mean"], entry["bits_per_byte"]["interval"]) for entry in entries},
        f"bits per byte on {split}",
    )
    curves = {entry["name"]: tuple(entry["curve"].values()) for entry in entries if entry["curve"]["tokens"]}
    if curves:
        files.append(folder / "bits_per_byte.png")
        draw(files[-1], title, {"bits per byte on validation": curves}, "tokens")
    return files
