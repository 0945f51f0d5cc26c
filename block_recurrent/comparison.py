"""Finished runs side by side: their figures as one document, a table of it, and pictures."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

from block_recurrent.errors import UserError
from block_recurrent.inference.statistics import paired_interval, ratio_interval
from block_recurrent.measures import TEXT, Kind, Measure, kind_with
from block_recurrent.plots import draw, draw_intervals
from block_recurrent.writing import write_text

NOT_KNOWN = "-"
NOTES = (
    "In brackets: 95 % intervals over documents, of differences over pairs of them; they tell of other documents, not "
    "of other seeds.",
    "FLOPs are of training, as `plan` counts them. Times are of runs one after another, on a machine that may have had "
    "other work: no benchmark.",
)
TOLD_OF_RUNS = {  # where it is true of any
    "stopped": "Stopped early by held-out losses",
    "best": "Evaluated at the best checkpoint by held-out loss",
    "missing": "Not finished",
}


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
    keeps_best: bool = False

    @property
    def last_step(self) -> int:
        """The last of its steps, or that at which its held-out losses have ended it."""
        try:
            return int(json.loads((self.workdir / "stopped.json").read_bytes())["step"])
        except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError):
            return self.contender.steps

    def is_trained(self) -> bool:
        return (self.workdir / "checkpoints" / str(self.last_step)).is_dir()

    @property
    def evaluated_step(self) -> int:
        """The best step of a run that is trained and keeps it; else the last."""
        from block_recurrent.inference.run import best_step

        if not (self.keeps_best and self.is_trained()):
            return self.last_step
        names = [folder.name for folder in (self.workdir / "checkpoints").iterdir()]
        return best_step(self.workdir, sorted(int(name) for name in names if name.isdigit()))

    def score(self, split: str) -> dict | None:
        """What `evaluate` wrote; None before, or where it was killed in writing."""
        try:
            found = json.loads((self.workdir / "evaluation" / f"{split}-{self.evaluated_step}.json").read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


def write(output: Path, about: dict, scores: dict[Run, dict], costs: dict[Contender, dict], kind: Kind = TEXT) -> None:
    """Writes comparison.json, comparison.md and the plots of runs that are finished, and prints the table."""
    from rich.console import Console
    from rich.table import Table

    entries = compared(scores, costs, kind, timed=about["tokens"] is None)
    early = [f"{run.workdir.name} at step {run.last_step:,}" for run in scores if run.last_step < run.contender.steps]
    best = [f"{run.workdir.name} at step {run.evaluated_step:,}" for run in scores if run.keeps_best]
    about = {**about, **({"stopped": early} if early else {}), **({"best": best} if best else {})}
    write_text(output / "comparison.json", json.dumps({**about, "configs": entries}, indent=2) + "\n")
    header, *rows = cells(entries)
    title, notes = title_of(about), notes_of(about)
    lines = [f"{title}, evaluated on {about['split']}", "", *markdown(header, rows), "", *notes]
    write_text(output / "comparison.md", "\n".join(lines) + "\n")
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


def title_of(about: dict) -> str:
    """What was done with which data."""
    data, tokens = Path(about["store"]).name, about["tokens"]
    return f"{data}, each config's own steps" if tokens is None else f"{int(tokens):,} tokens of {data}"


def notes_of(about: dict) -> list[str]:
    told_of = {what: about.get(name) for name, what in TOLD_OF_RUNS.items()}
    return [*NOTES, *(f"{what}: {', '.join(names)}." for what, names in told_of.items() if names)]


def compared(scores: dict[Run, dict], costs: dict[Contender, dict], kind: Kind, timed: bool) -> list[dict]:
    """An entry for each contender, in the order of `costs`; differences are to the first."""
    from block_recurrent.inference.run import read_metrics

    by_seed: dict[Contender, dict[int, dict]] = {}
    metrics: dict[Contender, list[list[dict]]] = {}
    for run, score in scores.items():
        by_seed.setdefault(run.contender, {})[run.seed] = score
        metrics.setdefault(run.contender, []).append(read_metrics(run.workdir / "metrics.jsonl"))
    check_documents(scores, kind)
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
            **({"minutes": minutes(metrics[contender], contender.tokens_per_step)} if timed else {}),
            **{measure.name: figure(measure, list(by_seed[contender].values())) for measure in kind.measures},
            "difference": difference(kind, by_seed[contender], by_seed[first]) if contender != first else None,
            "curve": curve(kind.main, metrics[contender], contender.tokens_per_step),
        }
        for contender, cost in costs.items()
    ]


def check_documents(scores: dict[Run, dict], kind: Kind) -> None:
    """Refuses scores of different documents, which cannot be paired."""
    seen = {run: score["per_document"] for run, score in scores.items()}
    for run, documents in seen.items():
        first, expected = next(iter(seen.items()))
        if any(documents[key] != expected[key] for key in ("name", *dict(kind.described))):
            raise UserError(
                f"{run.workdir} was evaluated on other documents than {first.workdir}: remove its evaluation/ and give "
                "the same command again"
            )


def figure(measure: Measure, scores: Sequence[dict]) -> dict:
    """A measure of one contender: its mean over seeds, how far they are apart, and an interval over documents."""
    values = [measure.factor * score[measure.source] for score in scores]
    interval = in_unit(measure, ratio_interval(summed(measure, scores), counted(measure, scores)))
    return {"mean": fmean(values), "by_seed": values, "spread": max(values) - min(values), "interval": interval}


def difference(kind: Kind, own: dict[int, dict], first: dict[int, dict]) -> dict | None:
    """Each measure less the first contender's, on the seeds that both have."""
    shared = [seed for seed in own if seed in first]
    if not shared:
        return None
    ours, theirs = [own[seed] for seed in shared], [first[seed] for seed in shared]
    found: dict = {"seeds": shared}
    for measure in kind.measures:
        source, factor = measure.source, measure.factor
        value = fmean(factor * (a[source] - b[source]) for a, b in zip(ours, theirs, strict=True))
        interval = paired_interval(summed(measure, ours), summed(measure, theirs), counted(measure, ours))
        found[measure.name] = {"mean": value, "interval": in_unit(measure, interval)}
    return found


def summed(measure: Measure, scores: Sequence[dict]) -> np.ndarray:
    """What a measure sums up, of each document, averaged over seeds."""
    return np.mean([score["per_document"][measure.of] for score in scores], axis=0)


def counted(measure: Measure, scores: Sequence[dict]) -> Sequence[float]:
    """What it is per, of each document."""
    documents = scores[0]["per_document"]
    return documents[measure.per] if measure.per else np.ones(len(documents["name"]))


def in_unit(measure: Measure, interval: tuple[float, float] | None) -> list[float] | None:
    return interval and [bound / measure.unit for bound in interval]


def speed(runs: Sequence[list[dict]]) -> float | None:
    """Tokens a second, from rows of metrics: the median without each run's first, in which it compiles."""
    timed = [[row["tokens_per_second"] for row in rows if "tokens_per_second" in row] for rows in runs]
    speeds = [speed for each in timed for speed in each[1:]]
    return median(speeds) if speeds else None


def minutes(runs: Sequence[list[dict]], tokens_per_step: int) -> float | None:
    """Of training, without evaluations, from rows of metrics, averaged over seeds."""
    seconds = []
    for rows in runs:
        timed = [(row["step"], row["tokens_per_second"]) for row in rows if "tokens_per_second" in row]
        begins = [0, *(step for step, _ in timed)]
        steps = [(step - begin, speed) for begin, (step, speed) in zip(begins, timed, strict=False)]
        seconds.append(sum(count * tokens_per_step / speed for count, speed in steps))
    return fmean(seconds) / 60 if all(seconds) else None


def curve(measure: Measure, runs: Sequence[list[dict]], tokens_per_step: int) -> dict[str, list[float]]:
    """A measure of held-out data in the course of training, averaged over seeds."""
    name = measure.held_out
    by_step = [{row["step"]: row[name] for row in rows if name in row} for rows in runs]
    steps = [step for step in by_step[0] if all(step in each for each in by_step)]
    means = [fmean(each[step] for each in by_step) for step in steps]
    return {"tokens": [step * tokens_per_step for step in steps], measure.name: means}


def cells(entries: Sequence[dict]) -> list[list[str]]:
    """The table, its header first; a column that nothing is known of is left out."""
    kind = kind_with(entries[0])
    main, position = kind.main, kind.position
    columns = {
        "config": [entry["name"] for entry in entries],
        "parameters": [short(entry["parameters"]) for entry in entries],
        f"model FLOPs per {position}": [short(entry["model_flops_per_token"]) for entry in entries],
        "hardware FLOPs": [short(entry["hardware_flops_per_token"]) for entry in entries],
        f"relative time per {position}": [told(entry["relative_time_per_token"], "{:.2f}") for entry in entries],
        "minutes of training": [told(entry.get("minutes"), "{:.1f}") for entry in entries],
        **{each.label: [with_interval(entry[each.name], each.layout) for entry in entries] for each in kind.measures},
        "spread of seeds": [spread(entry, main) for entry in entries],
        main.difference: [
            with_interval(entry["difference"][main.name], f"+{main.layout}") if entry["difference"] else NOT_KNOWN
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


def spread(entry: dict, measure: Measure) -> str:
    """How far the seeds' figures are apart, and how many there are."""
    count = len(entry["seeds"])
    return f"{entry[measure.name]['spread']:{measure.layout}} of {count}" if count > 1 else NOT_KNOWN


def with_interval(figure: dict, layout: str) -> str:
    bounds = figure["interval"]
    within = ", ".join(format(bound, layout) for bound in bounds or ())
    return format(figure["mean"], layout) + (f" [{within}]" if within else "")


def markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def draw_plots(folder: Path, title: str, split: str, entries: Sequence[dict]) -> list[Path]:
    """Draws what there is to draw; the files that were drawn."""
    kind, files = kind_with(entries[0]), [folder / "final.png"]
    main = kind.main
    finals = {entry["name"]: (entry[main.name]["mean"], entry[main.name]["interval"]) for entry in entries}
    draw_intervals(files[0], title, finals, f"{main.label} on {split}")
    curves = {entry["name"]: tuple(entry["curve"].values()) for entry in entries if entry["curve"]["tokens"]}
    if curves:
        files.append(folder / f"{main.name}.png")
        draw(files[-1], title, {f"{main.label} on validation": curves}, f"{kind.position}s")
    return files
