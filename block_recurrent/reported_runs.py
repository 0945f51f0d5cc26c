"""What is in the folders of runs, as a page shows it: metrics, evaluations, config, and text that the model writes."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from etils import epath

from block_recurrent.config import CONFIG
from block_recurrent.data.files import absolute
from block_recurrent.errors import UserError, first_line
from block_recurrent.inference.generation import Sampling
from block_recurrent.inference.run import METRICS, Run, open_run, read_about, read_metrics, source_of
from block_recurrent.measures import LABELS, Kind, Measure, kind_of

TEMPERATURE = 0.8
PROMPT = 40  # tokens of a held-out document
TOKENS = 200  # of a sample

Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Part:
    """A figure of some of what was evaluated, and how many tokens or documents that is."""

    of: str
    count: int
    value: float
    interval: Interval


@dataclass(frozen=True)
class Document:
    """What is told of a document beside its loss, and that."""

    name: str
    described: tuple[str, ...]
    loss: float


@dataclass(frozen=True)
class Score:
    """What `evaluate` wrote into a file; what an older version did not write is empty."""

    file: str
    label: str
    step: int
    documents: int
    tokens: int | None
    figures: dict[Measure, tuple[float, Interval]]
    perplexity: float | None
    positions: dict[int, Part]  # by where the stretch ends
    history: dict[int, Part]  # by its tokens
    words: tuple[Part, ...]
    classes: tuple[Part, ...]
    per_document: tuple[Document, ...]


@dataclass(frozen=True)
class Sample:
    """Text that a model has written, and how much of it was the prompt's."""

    text: str
    given: int


@dataclass(frozen=True)
class Samples:
    """What a run's page shows as samples, with a line about them, or why there are none."""

    about: str
    texts: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class ReportedRun:
    """A run as a page shows it."""

    name: str
    workdir: epath.Path
    kind: Kind
    rows: list[dict[str, float]]  # of metrics
    scores: list[Score]
    config: str
    parameters: int | None
    source: str | None = None  # whose parameters it began with
    samples: Samples | None = None


def name_of(folder: epath.Path) -> str:
    return Path(absolute(str(folder))).name


def read_run(workdir: epath.Path) -> ReportedRun:
    """What is in a run's folder, which may come from elsewhere, from an older version, or from a run at work."""
    found = [row for row in read_metrics(workdir / METRICS) if isinstance(row, dict)]
    rows = [{name: value for name, value in row.items() if is_number(value)} for row in found]
    rows = [row for row in rows if "step" in row]
    if not rows:
        what = f"{METRICS} without a row" if (workdir / METRICS).exists() else f"no {METRICS}"
        raise UserError(f"{workdir} has {what}: give the folder of a training run")
    about = read_about(workdir)
    kind = LABELS if any("validation_accuracy" in row for row in rows) else kind_of(about)
    of_words = about["vocabulary"]["kind"] == "words"
    counted = re.findall(r"parameters: +([\d,]{1,20}) ", text_of(workdir / "train.log"))  # the last start's counts
    return ReportedRun(
        name_of(workdir),
        workdir,
        kind,
        rows,
        [read_score(file, kind, of_words) for file in sorted((workdir / "evaluation").glob("*.json"))],
        text_of(workdir / CONFIG),
        int(counted[-1].replace(",", "")) if counted else None,
        source_text(about),
    )


def source_text(about: dict) -> str | None:
    """Whose parameters a run began with, and of these which started fresh."""
    source = source_of(about)
    if source is None:
        return None
    fresh = f"; fresh: {', '.join(map(str, source['fresh']))}" if source["fresh"] else ""
    return f"{source['run']} at step {source['step']:,} ({source['parameters']}){fresh}"


def is_number(value: object) -> bool:
    """Whether a value of JSON can be drawn."""
    return isinstance(value, int | float) and abs(value) < 1e100


def text_of(file: epath.Path) -> str:
    return file.read_bytes().decode(errors="replace") if file.exists() else ""


def read_score(file: epath.Path, kind: Kind, of_words: bool) -> Score:
    try:
        found = json.loads(file.read_bytes())
        perplexity = found.get("perplexity" if of_words else "word_perplexity")
        history = found.get("history") or []
        return Score(
            file=str(file),
            label=", ".join(map(str, [found["of"], *found.get("changed", ())])),
            step=int(found["step"]),
            documents=int(found["documents"]),
            tokens=None if kind is LABELS else int(found["tokens"]),
            figures={measure: read_figure(measure, found, measure.interval) for measure in kind.measures},
            perplexity=None if perplexity is None else float(perplexity),
            positions={end_of(row["of"]): read_part(row, kind.loss) for row in found.get("by_position") or ()},
            history={int(row["tokens"]): history_part(row, history[0], kind.loss) for row in history},
            words=tuple(read_part(row, kind.loss) for row in found.get("by_word") or ()),
            classes=tuple(read_part(row, kind.main) for row in found.get("by_class") or ()),
            per_document=read_documents(found, kind) if found.get("per_document") else (),
        )
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise UserError(
            f"{file} is not what `evaluate` writes ({type(error).__name__}: {error}): remove it and evaluate again"
        ) from error


def read_figure(measure: Measure, found: dict, interval: str | None) -> tuple[float, Interval]:
    """A measure's value where it is written, and its interval by that name."""
    return measure.factor * float(found[measure.source]), bounds(found.get(interval), measure.factor)


def read_part(row: dict, measure: Measure) -> Part:
    count = row["tokens"] if "tokens" in row else row["documents"]
    return Part(str(row["of"]), int(count), *read_figure(measure, row, "interval"))


def history_part(row: dict, without: dict, measure: Measure) -> Part:
    """Figures with so much history; their interval is that of what it gains, seen from the figure `without` any."""
    value, gained = read_figure(measure, row, "gain_interval")
    least, _ = read_figure(measure, without, None)
    between = (least - gained[1], least - gained[0]) if gained and row["blocks"] else None
    return Part(f"{int(row['blocks']):,} blocks", int(row["tokens"]), value, between)


def read_documents(found: dict, kind: Kind) -> tuple[Document, ...]:
    """Those that anything was predicted of."""
    documents, loss = found["per_document"], kind.loss
    names = dict(zip(sorted(set(documents.get("label", ()))), found.get("by_class") or (), strict=False))
    columns = [
        [str(names[value]["of"]) if key == "label" else f"{int(value):,}" for value in documents[key]]
        for key, _ in kind.described
    ]
    counts = documents[loss.per] if loss.per else [1] * len(documents["name"])
    return tuple(
        Document(str(name), tuple(described), float(nats) / int(count) / loss.unit)
        for name, nats, count, *described in zip(documents["name"], documents["nats"], counts, *columns, strict=True)
        if count
    )


def bounds(found: Sequence[float] | None, factor: float) -> Interval:
    return None if found is None else (factor * float(found[0]), factor * float(found[1]))


def end_of(stretch: str) -> int:
    """1024 of "512 to 1,024"."""
    return int(stretch.rpartition(" ")[2].replace(",", ""))


def told_apart(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Runs of one name are called by the whole of their folders'."""
    names = [run.name for run in runs]
    return [replace(run, name=str(run.workdir)) if names.count(run.name) > 1 else run for run in runs]


def samples_of(workdir: epath.Path, trust: Sequence[str]) -> Samples:
    """What the newest checkpoint makes of the beginnings of held-out documents; where that cannot be had, why not."""
    try:
        run = open_run(workdir, trust)
        about, prompts = beginnings(run)
        drawn = np.stack(list(run.generator(Sampling(TEMPERATURE))(prompts, TOKENS)), axis=1)
        decode = run.vocabulary.decode
    except UserError as error:
        return Samples(f"There are no samples: {first_line(error)}.")
    texts = []
    for prompt, row in zip(prompts, drawn, strict=True):
        given, text = decode(prompt), decode([*prompt, *row[row >= 0]])
        texts.append(Sample(text, len(given) if text.startswith(given) else 0))
    about = f"Step {run.step:,}, temperature {TEMPERATURE}, {TOKENS} tokens each, {about}."
    return Samples(about, tuple(texts))


def beginnings(run: Run) -> tuple[str, list[np.ndarray]]:
    """Prompts, with what they are: of the first held-out document and of one in the middle, or only a newline."""
    try:
        held_out = run.split("validation").parts[0][0]
    except UserError:
        return "after a newline, as the data is not here", [run.vocabulary.encode(b"\n")]
    places = sorted({0, len(held_out.lengths) // 2})
    prompts = [
        held_out.tokens[begin : min(begin + PROMPT, end)]
        for begin, end in ((int(held_out.offsets[i]), int(held_out.offsets[i + 1])) for i in places)
    ]
    return "after the beginnings of held-out documents, in bold", prompts
