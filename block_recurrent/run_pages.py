"""Pages of a run, of several side by side, and of a comparison: what they show, part by part."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from urllib.parse import quote

from etils import epath

from block_recurrent.comparison import NOT_KNOWN, NOTES, cells, told
from block_recurrent.config import settings
from block_recurrent.errors import UserError
from block_recurrent.pages import Html, element, folded, joined, page, picture, pictures, quiet, table
from block_recurrent.plots import Curve, curves_svg, intervals_svg
from block_recurrent.reported_runs import Interval, Part, ReportedRun, Score, name_of

REPORT = "report.html"
COMPARISON = "comparison.json"
LONGEST_NAME = 40  # letters, of what is named in pictures
SHOWN_DOCUMENTS = 10  # at each end


def run_page(run: ReportedRun) -> str:
    return page(run.name, f"{run.workdir}, step {run.rows[-1]['step']:,}", sections([run]))


def runs_page(runs: Sequence[ReportedRun]) -> str:
    names = [run.name for run in runs]
    return page(f"{len(runs)} runs side by side", ", ".join(names), sections(runs))


def comparison_page(folder: epath.Path, runs: Sequence[ReportedRun]) -> str:
    """A comparison's own table and pictures, links to the pages of its runs, and then those runs side by side."""
    try:
        found = json.loads((folder / COMPARISON).read_text())
        title = f"{int(found['tokens']):,} tokens of {Path(found['store']).name}"
        made = compared(found)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder / COMPARISON} is not what `compare` writes ({type(error).__name__}: {error}): "
            "give its command again with --table_only"
        ) from error
    links = [element("li", element("a", run.name, href=f"./{quote(run.name)}/{REPORT}")) for run in runs]
    pages = element("ul", *links) if links else quiet("None of its runs is in this folder any more.")
    more = sections(runs) if runs else {}
    return page(f"{name_of(folder)}: {title}", str(folder), {"Comparison": made, "Its runs": pages, **more})


def compared(found: dict) -> Html:
    entries = found["configs"]
    header, *rows = cells(entries)
    final = {
        cut(entry["name"]): (entry["bits_per_byte"]["mean"], entry["bits_per_byte"]["interval"]) for entry in entries
    }
    drawn = [picture(f"Bits per byte on {found['split']}", intervals_svg({"": final}, "bits per byte"))]
    curves = {
        cut(entry["name"]): (entry["curve"]["tokens"], entry["curve"]["bits_per_byte"])
        for entry in entries
        if entry["curve"]["tokens"]
    }
    if curves:
        drawn.append(picture("Held-out bits per byte in training", curves_svg(curves, "bits per byte", "tokens")))
    about = [f"Evaluated on {found['split']}.", *NOTES]
    about += [f"For every config: {', '.join(found['bindings'])}."] if found["bindings"] else []
    about += [f"Not finished: {', '.join(found['missing'])}."] if found["missing"] else []
    rows = [[cell.replace(" [", "\n[") for cell in row] for row in rows]
    return joined(table("Comparison", header, rows), *map(quiet, about), pictures(*drawn))


def sections(runs: Sequence[ReportedRun]) -> dict[str, Html]:
    """The parts of a page that there is something for, by their headings."""
    scores = newest_scores(runs)
    made = {
        "Figures": figures(runs),
        "Training": training(runs),
        "State health": health(runs),
        "By position": by_position(scores),
        "By history": by_history(scores),
        "Rare words": rare_words(scores),
        "Documents": documents(scores),
        "Samples": samples(runs),
        "Config" if len(runs) == 1 else "Configs": config(runs[0]) if len(runs) == 1 else config_differences(runs),
    }
    return {heading: part for heading, part in made.items() if part}


def newest_scores(runs: Sequence[ReportedRun]) -> dict[str, Score]:
    """The latest evaluation of each kind, by what it is called in pictures."""
    found = {}
    for run in runs:
        for score in sorted(run.scores, key=lambda score: score.step):
            found[cut(f"{run.name}, {score.label}" if len(runs) > 1 else score.label)] = score
    return found


def cut(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def figures(runs: Sequence[ReportedRun]) -> Html:
    header = ["run", "parameters", "steps", "tokens", "tokens per second", "last training loss, bits per token"]
    rows = [[*header, "last held-out bits per byte"], *map(training_cells, runs)]
    header, *rows = zip(*rows, strict=True) if len(runs) == 1 else rows
    made = [table("Figures of training", header, rows)]
    evaluated = [[run.name, *evaluation_cells(score)] for run in runs for score in run.scores]
    if evaluated:
        header = ["run", "evaluated on", "step", "documents", "tokens", "bits per token", "95 %", "bits per byte"]
        rows = [[*header, "perplexity per word"], *evaluated]
        header, *rows = [row[1:] for row in rows] if len(runs) == 1 else rows
        made += [
            element("h3", "Evaluations"),
            table("Evaluations", header, rows),
            quiet("Intervals come from drawing the documents anew: they tell of other documents, not of other seeds."),
        ]
    return joined(*made)


def training_cells(run: ReportedRun) -> list[str]:
    tokens, speeds = values(run, "tokens"), values(run, "tokens_per_second")
    losses, held_out = values(run, "loss"), values(run, "validation_bits_per_byte")
    return [
        run.name,
        told(run.parameters, "{:,}"),
        f"{run.rows[-1]['step']:,}",
        told(sum(tokens) if tokens else None, "{:,.0f}"),
        told(median(speeds) if speeds else None, "{:,.0f}"),
        told(losses[-1] / math.log(2) if losses else None, "{:.3f}"),
        told(held_out[-1] if held_out else None, "{:.3f}"),
    ]


def evaluation_cells(score: Score) -> list[str]:
    return [
        score.label,
        f"{score.step:,}",
        f"{score.documents:,}",
        f"{score.tokens:,}",
        f"{score.bits_per_token:.4f}",
        between(score.interval),
        f"{score.bits_per_byte:.4f}",
        told(score.perplexity, "{:.4g}"),
    ]


def between(interval: Interval) -> str:
    return f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else NOT_KNOWN


def values(run: ReportedRun, name: str) -> list[float]:
    return [row[name] for row in run.rows if name in row]


def curve(run: ReportedRun, name: str, factor: float = 1.0) -> Curve:
    found = [(row["step"], factor * row[name]) for row in run.rows if name in row]
    return tuple(step for step, _ in found), tuple(value for _, value in found)


def training(runs: Sequence[ReportedRun]) -> Html:
    made, names = [], {run.name: cut(run.name) if len(runs) > 1 else "" for run in runs}
    for name, caption, label, factor in (
        ("loss", "Loss in training", "bits per token", 1 / math.log(2)),
        ("validation_bits_per_byte", "Held-out documents", "bits per byte", 1.0),
    ):
        curves = {names[run.name]: curve(run, name, factor) for run in runs if values(run, name)}
        if curves:
            made.append(picture(caption, curves_svg(curves, label)))
    return pictures(*made) if made else Html()


def health(runs: Sequence[ReportedRun]) -> Html:
    """A picture for each measure of "health/LAYER/MEASURE", with a curve for each layer of each run."""
    found: dict[str, dict[str, Curve]] = {}
    for run in runs:
        for name in dict.fromkeys(name for row in run.rows for name in row if name.startswith("health/")):
            *_, layer, measure = ["", *name.split("/")]
            label = cut(f"{run.name}, {layer}" if len(runs) > 1 else layer)
            found.setdefault(measure.replace("_", " "), {})[label] = curve(run, name)
    made = [picture(measure.capitalize(), curves_svg(curves, "")) for measure, curves in found.items()]
    return pictures(*made) if made else Html()


def by_position(scores: Mapping[str, Score]) -> Html:
    return by_tokens(
        "How well tokens are predicted, by how far into their document they are. Bands are 95 % intervals.",
        {label: score.positions for label, score in scores.items() if len(score.positions) > 1},
        "tokens into the document",
        "tokens",
    )


def by_history(scores: Mapping[str, Score]) -> Html:
    return by_tokens(
        "The same tokens, predicted with more and more of their document before them. Bands are the 95 % intervals of "
        "what is gained over no history.",
        {label: score.history for label, score in scores.items() if score.history},
        "tokens of history",
        "history",
    )


def by_tokens(note: str, found: Mapping[str, Mapping[int, Part]], x_label: str, heading: str) -> Html:
    """Bits per token over a number of tokens: curves, and their tables."""
    if not found:
        return Html()
    curves = {label: (list(parts), [part.bits_per_token for part in parts.values()]) for label, parts in found.items()}
    bands = {
        label: tuple(zip(*(part.interval or (part.bits_per_token,) * 2 for part in parts.values()), strict=True))
        for label, parts in found.items()
    }
    drawing = curves_svg(curves, "bits per token", x_label, bands, doubling=True)
    tables = [part_table(label, heading, list(parts.values())) for label, parts in found.items()]
    return joined(quiet(note), pictures(picture(f"Bits per token by {x_label}", drawing), element("div", *tables)))


def part_table(label: str, heading: str, parts: Sequence[Part]) -> Html:
    rows = [[part.of, f"{part.tokens:,}", f"{part.bits_per_token:.4f}", between(part.interval)] for part in parts]
    return folded(f"In figures: {label}", table(label, [heading, "tokens", "bits per token", "95 %"], rows))


def rare_words(scores: Mapping[str, Score]) -> Html:
    found = {label: score.words for label, score in scores.items() if score.words}
    if not found:
        return Html()
    groups = {
        label: {cut(part.of): (part.bits_per_token, part.interval) for part in parts} for label, parts in found.items()
    }
    return joined(
        quiet(
            "Names and identifiers that few documents have: a model that remembers knows them when they come again. "
            "Lines are 95 % intervals."
        ),
        pictures(
            picture("Bits per token by kind of word", intervals_svg(groups, "bits per token")),
            element("div", *(part_table(label, "tokens of", parts) for label, parts in found.items())),
        ),
    )


def documents(scores: Mapping[str, Score]) -> Html:
    """The documents that are predicted worst and best."""
    return joined(*(document_table(label, score) for label, score in scores.items() if score.per_document))


def document_table(label: str, score: Score) -> Html:
    ordered = sorted(score.per_document, key=lambda document: -document[1] / document[2])
    few = len(ordered) <= 2 * SHOWN_DOCUMENTS
    shown = ordered if few else [*ordered[:SHOWN_DOCUMENTS], *ordered[-SHOWN_DOCUMENTS:]]
    rows = [
        [name, f"{tokens:,}", f"{size:,}", f"{nats / math.log(2) / tokens:.3f}"] for name, nats, tokens, size in shown
    ]
    which = "worst first" if few else f"the {SHOWN_DOCUMENTS} worst and the {SHOWN_DOCUMENTS} best"
    header = ["document", "tokens", "bytes", "bits per token"]
    return folded(f"{label}: {len(ordered):,} documents, {which}", table(label, header, rows))


def samples(runs: Sequence[ReportedRun]) -> Html:
    made = []
    for run in runs:
        if run.samples is not None:
            made += [element("h3", run.name)] if len(runs) > 1 else []
            made.append(quiet(run.samples.about))
            for sample in run.samples.texts:
                given, written = sample.text[: sample.given], sample.text[sample.given :]
                made.append(element("pre", element("b", given), written, class_="wrapped"))
    return joined(*made)


def config(run: ReportedRun) -> Html:
    return folded("config.gin, all that the run was started with", element("pre", run.config, tabindex="0"))


def config_differences(runs: Sequence[ReportedRun]) -> Html:
    """The bindings in which runs differ, side by side."""
    found = [dict(line.split(" = ", 1) for line in settings(run.config, ())) for run in runs]
    names = sorted({name for bindings in found for name in bindings})
    rows = [[name, *(bindings.get(name, NOT_KNOWN) for bindings in found)] for name in names]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return quiet("Their configs are the same.")
    return table("Bindings that differ", ["binding", *(run.name for run in runs)], differing, class_="text")
