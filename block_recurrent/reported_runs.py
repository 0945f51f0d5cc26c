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
from block_recurrent.inference.run import METRICS, Run, open_run, read_about, read_metrics

TEMPERATURE = 0.8
PROMPT = 40  # tokens of a held-out document
TOKENS = 200  # of a sample

Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Part:
    """Bits per token of some of the tokens that were evaluated."""

    of: str
    tokens: int
    bits_per_token: float
    interval: Interval


@dataclass(frozen=True)
class Score:
    """What `evaluate` wrote into a file; what an older version did not write is empty."""

    file: str
    label: str
    step: int
    documents: int
    tokens: int
    bits_per_token: float
    interval: Interval
    bits_per_byte: float
    perplexity: float | None
    positions: dict[int, Part]  # by where the stretch ends
    history: dict[int, Part]  # by its tokens
    words: tuple[Part, ...]
    per_document: tuple[tuple[str, float, int, int], ...]  # name, nats, tokens and bytes


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
    rows: list[dict[str, float]]  # of metrics
    scores: list[Score]
    config: str
    parameters: int | None
    samples: Samples | None = None


def name_of(folder: epath.Path) -> str:
    return Path(absolute(str(folder))).name


def read_run(workdir: epath.Path) -> ReportedRun:
    """What is in a run's folder, which may come from elsewhere, from an older version, or from a run at work."""
    found = [row for row in read_metrics(workdir / METRICS) if isinstance(row, dict)]
    rows = [{name: value for name, value in row.items() if is_number(value)} for row in found]
    rows = [row for row in rows if "step" in row]
    if not rows:
        raise UserError(f"{workdir} has no {METRICS} with a row in it: give the --workdir of a training run")
    of_words = read_about(workdir)["vocabulary"]["kind"] == "words"
    counted = re.search(r"parameters: +([\d,]{1,20}) ", text_of(workdir / "train.log"))
    return ReportedRun(
        name_of(workdir),
        workdir,
        rows,
        [read_score(file, of_words) for file in sorted((workdir / "evaluation").glob("*.json"))],
        text_of(workdir / CONFIG),
        int(counted[1].replace(",", "")) if counted else None,
    )


def is_number(value: object) -> bool:
    """Whether a value of JSON can be drawn."""
    return isinstance(value, int | float) and abs(value) < 1e100


def text_of(file: epath.Path) -> str:
    return file.read_text() if file.exists() else ""


def read_score(file: epath.Path, of_words: bool) -> Score:
    try:
        found = json.loads(file.read_text())
        perplexity = found.get("perplexity" if of_words else "word_perplexity")
        history = found.get("history") or []
        without = float(history[0]["bits_per_token"]) if history else 0.0
        documents = found.get("per_document") or dict.fromkeys(("name", "nats", "tokens", "bytes"), ())
        return Score(
            file=str(file),
            label=", ".join(map(str, [found["of"], *found.get("changed", ())])),
            step=int(found["step"]),
            documents=int(found["documents"]),
            tokens=int(found["tokens"]),
            bits_per_token=float(found["bits_per_token"]),
            interval=bounds(found.get("bits_per_token_interval")),
            bits_per_byte=float(found["bits_per_byte"]),
            perplexity=None if perplexity is None else float(perplexity),
            positions={end_of(row["of"]): read_part(row) for row in found.get("by_position") or ()},
            history={int(row["tokens"]): history_part(row, without) for row in history},
            words=tuple(map(read_part, found.get("by_word") or ())),
            per_document=tuple(
                (str(name), float(nats), int(tokens), int(size))
                for name, nats, tokens, size in zip(
                    *(documents[key] for key in ("name", "nats", "tokens", "bytes")), strict=True
                )
                if tokens
            ),
        )
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"{file} is not what `evaluate` writes ({type(error).__name__}: {error}): remove it and evaluate again"
        ) from error


def read_part(row: dict) -> Part:
    return Part(str(row["of"]), int(row["tokens"]), float(row["bits_per_token"]), bounds(row["interval"]))


def history_part(row: dict, without: float) -> Part:
    """Figures with so much history; their interval is that of what it gains, seen from the figure `without` any."""
    gained = bounds(row["gain_interval"]) if row["blocks"] else None
    between = gained and (without - gained[1], without - gained[0])
    return Part(f"{int(row['blocks']):,} blocks", int(row["tokens"]), float(row["bits_per_token"]), between)


def bounds(found: Sequence[float] | None) -> Interval:
    return None if found is None else (float(found[0]), float(found[1]))


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
