"""Pages of a run, of several side by side, and of a comparison: what they show, part by part."""

import json
from collections.abc import Mapping, Sequence
from statistics import median
from urllib.parse import quote

from etils import epath

from block_recurrent.comparison import NOT_KNOWN, cells, notes_of, title_of, told
from block_recurrent.config import settings
from block_recurrent.errors import UserError
from block_recurrent.measures import LABELS, TEXT, Kind, Measure, kind_with
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
        found = json.loads((folder / COMPARISON).read_bytes())
        title, made = title_of(found), compared(found)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
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
    kind = kind_with(entries[0])
    name, label = kind.main.name, kind.main.label
    final = {cut(entry["name"]): (entry[name]["mean"], entry[name]["interval"]) for entry in entries}
    drawn = [picture(f"{capital(label)} on {found['split']}", intervals_svg({"": final}, label))]
    curves = {
        cut(entry["name"]): (entry["curve"]["tokens"], entry["curve"][name])
        for entry in entries
        if entry["curve"]["tokens"]
    }
    if curves:
        drawn.append(picture(f"Held-out {label} in training", curves_svg(curves, label, f"{kind.position}s")))
    about = [f"Evaluated on {found['split']}.", *notes_of(found)]
    about += [f"For every config: {', '.join(found['bindings'])}."] if found["bindings"] else []
    rows = [[cell.replace(" [", "\n[") for cell in row] for row in rows]
    return joined(table("Comparison", header, rows), *map(quiet, about), pictures(*drawn))


def sections(runs: Sequence[ReportedRun]) -> dict[str, Html]:
    """The parts of a page that there is something for, by their headings; the runs are of one kind."""
    scores, kind = newest_scores(runs), runs[0].kind
    made = {
        "Figures": figures(runs, kind),
        "Training": training(runs, kind),
        "State health": health(runs),
        "By class": by_class(scores, kind),
        "By position": by_position(scores, kind),
        "By history": by_history(scores, kind),
        "Rare words": rare_words(scores, kind),
        capital(kind.documents): documents(scores, kind),
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


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def figures(runs: Sequence[ReportedRun], kind: Kind) -> Html:
    header = ["run", "parameters", "steps", f"{kind.prediction}s", f"{kind.position}s per second"]
    header += [f"last training loss, {kind.loss.label}", *(f"last held-out {each.label}" for each in kind.held_out)]
    rows = [header, *map(training_cells, runs)]
    header, *rows = zip(*rows, strict=True) if len(runs) == 1 else rows
    made = [table("Figures of training", header, rows)]
    made += [quiet(f"{run.name} began with the parameters of {run.source}.") for run in runs if run.source]
    evaluated = [[run.name, *evaluation_cells(score, kind)] for run in runs for score in run.scores]
    if evaluated:
        rows = [["run", *evaluation_header(kind)], *evaluated]
        header, *rows = [row[1:] for row in rows] if len(runs) == 1 else rows
        made += [
            element("h3", "Evaluations"),
            table("Evaluations", header, rows),
            quiet(
                f"Intervals come from drawing the {kind.documents} anew: they tell of other {kind.documents}, not of "
                "other seeds."
            ),
        ]
    return joined(*made)


def training_cells(run: ReportedRun) -> list[str]:
    tokens, speeds = values(run, "tokens"), values(run, "tokens_per_second")
    losses, loss = values(run, "loss"), run.kind.loss
    return [
        run.name,
        told(run.parameters, "{:,}"),
        f"{run.rows[-1]['step']:,}",
        told(sum(tokens) if tokens else None, "{:,.0f}"),
        told(median(speeds) if speeds else None, "{:,.0f}"),
        format(losses[-1] / loss.unit, loss.layout) if losses else NOT_KNOWN,
        *(
            format(found[-1], measure.layout) if (found := values(run, measure.held_out)) else NOT_KNOWN
            for measure in run.kind.held_out
        ),
    ]


def evaluation_header(kind: Kind) -> list[str]:
    header = ["evaluated on", "step", kind.documents, *([f"{kind.position}s"] if kind is not LABELS else [])]
    for measure in kind.measures:
        header += [measure.label, *(["95 %"] if measure.interval else [])]
    return [*header, *(["perplexity per word"] if kind is TEXT else [])]


def evaluation_cells(score: Score, kind: Kind) -> list[str]:
    row = [score.label, f"{score.step:,}", f"{score.documents:,}"]
    row += [f"{score.tokens:,}"] if score.tokens is not None else []
    for measure, (value, interval) in score.figures.items():
        row += [format(value, measure.exact), *([between(interval, measure)] if measure.interval else [])]
    return [*row, *([told(score.perplexity, "{:.4g}")] if kind is TEXT else [])]


def between(interval: Interval, measure: Measure) -> str:
    return " to ".join(format(bound, measure.exact) for bound in interval) if interval else NOT_KNOWN


def values(run: ReportedRun, name: str) -> list[float]:
    return [row[name] for row in run.rows if name in row]


def curve(run: ReportedRun, name: str, unit: float = 1.0) -> Curve:
    found = [(row["step"], row[name] / unit) for row in run.rows if name in row]
    return tuple(step for step, _ in found), tuple(value for _, value in found)


def training(runs: Sequence[ReportedRun], kind: Kind) -> Html:
    made, names = [], {run.name: cut(run.name) if len(runs) > 1 else "" for run in runs}
    shown = [("loss", "Loss in training", kind.loss.label, kind.loss.unit)]
    for measure in kind.held_out:
        more = f", {measure.label}" if len(kind.held_out) > 1 else ""
        shown.append((measure.held_out, f"Held-out {kind.documents}{more}", measure.label, 1.0))
    for name, caption, label, unit in shown:
        curves = {names[run.name]: curve(run, name, unit) for run in runs if values(run, name)}
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


def by_position(scores: Mapping[str, Score], kind: Kind) -> Html:
    units = f"{kind.position}s"
    return by_tokens(
        f"How well {units} are predicted, by how far into their document they are. Bands are 95 % intervals.",
        {label: score.positions for label, score in scores.items() if len(score.positions) > 1},
        f"{units} into the document",
        [units, units],
        kind.loss,
    )


def by_history(scores: Mapping[str, Score], kind: Kind) -> Html:
    units = f"{kind.position}s"
    return by_tokens(
        f"The same {units}, predicted with more and more of their document before them. Bands are the 95 % intervals "
        "of what is gained over no history.",
        {label: score.history for label, score in scores.items() if score.history},
        f"{units} of history",
        ["history", units],
        kind.loss,
    )


def by_tokens(
    note: str, found: Mapping[str, Mapping[int, Part]], x_label: str, header: Sequence[str], measure: Measure
) -> Html:
    """A measure over a number of tokens: curves, and their tables."""
    if not found:
        return Html()
    curves = {label: (list(parts), [part.value for part in parts.values()]) for label, parts in found.items()}
    bands = {
        label: tuple(zip(*(part.interval or (part.value,) * 2 for part in parts.values()), strict=True))
        for label, parts in found.items()
    }
    drawing = curves_svg(curves, measure.label, x_label, bands, doubling=True)
    tables = [part_table(label, header, list(parts.values()), measure) for label, parts in found.items()]
    caption = f"{capital(measure.label)} by {x_label}"
    return joined(quiet(note), pictures(picture(caption, drawing), element("div", *tables)))


def part_table(label: str, header: Sequence[str], parts: Sequence[Part], measure: Measure) -> Html:
    rows = [
        [part.of, f"{part.count:,}", format(part.value, measure.exact), between(part.interval, measure)]
        for part in parts
    ]
    return folded(f"In figures: {label}", table(label, [*header, measure.label, "95 %"], rows))


def rare_words(scores: Mapping[str, Score], kind: Kind) -> Html:
    return in_groups(
        "Names and identifiers that few documents have: a model that remembers knows them when they come again. "
        "Lines are 95 % intervals.",
        {label: score.words for label, score in scores.items() if score.words},
        "kind of word",
        ["tokens of", "tokens"],
        kind.loss,
    )


def by_class(scores: Mapping[str, Score], kind: Kind) -> Html:
    return in_groups(
        f"How many {kind.documents} of each class are told right. Lines are 95 % intervals.",
        {label: score.classes for label, score in scores.items() if score.classes},
        "class",
        ["class", kind.documents],
        kind.main,
    )


def in_groups(note: str, found: Mapping[str, Sequence[Part]], by: str, header: Sequence[str], measure: Measure) -> Html:
    """A measure of groups that have names: points with intervals, and their tables."""
    if not found:
        return Html()
    groups = {label: {cut(part.of): (part.value, part.interval) for part in parts} for label, parts in found.items()}
    drawn = picture(f"{capital(measure.label)} by {by}", intervals_svg(groups, measure.label))
    tables = [part_table(label, header, parts, measure) for label, parts in found.items()]
    return joined(quiet(note), pictures(drawn, element("div", *tables)))


def documents(scores: Mapping[str, Score], kind: Kind) -> Html:
    """The documents that are predicted worst and best."""
    return joined(*(document_table(label, score, kind) for label, score in scores.items() if score.per_document))


def document_table(label: str, score: Score, kind: Kind) -> Html:
    ordered = sorted(score.per_document, key=lambda document: -document.loss)
    few = len(ordered) <= 2 * SHOWN_DOCUMENTS
    shown = ordered if few else [*ordered[:SHOWN_DOCUMENTS], *ordered[-SHOWN_DOCUMENTS:]]
    rows = [[each.name, *each.described, format(each.loss, kind.loss.layout)] for each in shown]
    which = "worst first" if few else f"the {SHOWN_DOCUMENTS} worst and the {SHOWN_DOCUMENTS} best"
    header = [kind.documents.removesuffix("s"), *dict(kind.described).values(), kind.loss.label]
    return folded(f"{label}: {len(ordered):,} {kind.documents}, {which}", table(label, header, rows))


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
