"""Pictures of curves, drawn without a display: written to a file where one is given, and returned to be looked at,
or as SVG to be put into a page.

plots.readable()                                                     # in a notebook, once
plots.draw(None, "a run", {"bits per token": {"training": (steps, bits)}})
"""

import html
import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from block_recurrent.writing import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = tuple[Sequence[float], Sequence[float]]  # what goes along x, what goes up
Figures = Mapping[str, tuple[float, Sequence[float] | None]]  # values by name, with their intervals where they have one

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by every eye
MOST_LABELLED = 8  # curves of a panel
PAPER, INK = "#f7f7f7", "#262626"


def readable() -> None:
    """Gives all pictures from here on a paper of their own: they are read alike on a light page and on a dark one."""
    import matplotlib

    for name in ("figure.facecolor", "axes.facecolor"):
        matplotlib.rcParams[name] = PAPER
    for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        matplotlib.rcParams[name] = INK
    matplotlib.rcParams["figure.dpi"] = 110


def draw(file: Path | None, title: str, panels: Mapping[str, Mapping[str, Curve]], x_label: str = "step") -> "Figure":
    """Draws panels side by side, each with its label and its named curves, every curve's last value beside its end."""
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    size = (7, 4) if len(panels) == 1 else (4.2 * columns, 2.9 * rows)
    figure, grid = new_figure(size, rows, columns)
    figure.suptitle(plain(title))
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (label, curves) in zip(grid.flat, panels.items(), strict=False):
        plot_curves(axes, curves)
        if len(curves) > 1:
            axes.legend(frameon=False)
        axes.set(xlabel=plain(x_label), ylabel=plain(label))
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    return saved(figure, file)


def plot_curves(axes, curves: Mapping[str, Curve]) -> None:
    """Named curves, every one's last value beside its end where there is room for all of them."""
    places = apart({name: up[-1] for name, (_, up) in curves.items()}, [y for _, up in curves.values() for y in up])
    for (name, (along, up)), (line, colour) in zip(curves.items(), looks(), strict=False):
        marker = "o" if len(along) < 40 else None
        axes.plot(along, up, line, color=colour, marker=marker, markersize=4, label=plain(name))
        if len(curves) <= MOST_LABELLED:
            place = (along[-1], places[name])
            beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
            axes.annotate(f"{up[-1]:.3g}", place, color=colour, **beside)
    axes.margins(x=0.15)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def looks() -> Iterator[tuple[str, str]]:
    """Lines and colours, one after another."""
    return itertools.cycle(itertools.product(("-", "--", ":"), COLOURS))


def apart(ends: Mapping[str, float], drawn: Sequence[float]) -> dict[str, float]:
    """Heights for the labels of curves' ends: beside them, and a line of text from one to the next."""
    span = max(drawn) - min(drawn) or 0.1 * abs(max(drawn))  # what the axis shows of a constant
    line, below, places = 0.07 * span, -math.inf, {}
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        places[name] = below = max(end, below + line)
    return places


def draw_intervals(file: Path | None, title: str, values: Figures, label: str) -> "Figure":
    """A point for each name, the first on top, with a line over its interval where it has one."""
    figure, ((axes,),) = new_figure((7, 1.4 + 0.4 * len(values)))
    plot_intervals(axes, {"": values})
    axes.set(xlabel=plain(label))
    axes.set_title(plain(title))
    return saved(figure, file)


def plot_intervals(axes, groups: Mapping[str, Figures]) -> None:
    """Points and lines over their intervals: a row for each name, in it one of each group below another."""
    rows = list(dict.fromkeys(name for values in groups.values() for name in values))
    for number, ((group, values), (_, colour)) in enumerate(zip(groups.items(), looks(), strict=False)):
        down = (number + 0.5) / len(groups) - 0.5
        places = [rows.index(name) + 0.8 * down for name in values]
        axes.plot([value for value, _ in values.values()], places, "o", color=colour, label=plain(group))
        for y, (value, interval) in zip(places, values.values(), strict=True):
            axes.plot(interval or [], [y, y] if interval else [], color=colour, linewidth=2, alpha=0.5)
            axes.annotate(f"{value:.4g}", (value, y), (0, 7), textcoords="offset points", ha="center", fontsize=9)
    axes.set(ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), map(plain, rows))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def curves_svg(
    curves: Mapping[str, Curve],
    label: str,
    x_label: str = "step",
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    doubling: bool = False,
) -> str:
    """Curves as SVG, over what doubles from point to point if it is so; `bands` are where curves may lie as well.

    A curve whose name is empty is not in the legend.
    """
    legend_rows = sum(map(bool, curves))
    figure, ((axes,),) = new_figure((5, 2.9 + 0.2 * legend_rows))
    plot_curves(axes, curves)
    for line, name in zip(axes.get_lines(), curves, strict=True):
        if bands and name in bands:
            axes.fill_between(curves[name][0], *bands[name], color=line.get_color(), alpha=0.15, linewidth=0)
    if doubling:
        double(axes, sorted({x for along, _ in curves.values() for x in along}))
    axes.set(xlabel=plain(x_label), ylabel=plain(label))
    return svg(figure, legend=any(curves))


def double(axes, values: Sequence[float]) -> None:
    """An x axis on which doubling is a step of the same width, from nought if that is among the values."""
    axes.set_xscale("symlog", base=2, linthresh=next((x for x in values if x > 0), 1))
    shown = values[:: -(-len(values) // 6)]
    axes.set_xticks(shown, [f"{x:,}" for x in shown])
    axes.minorticks_off()


def intervals_svg(groups: Mapping[str, Figures], label: str) -> str:
    """Points with their intervals as SVG."""
    lines = sum(map(len, groups.values())) + sum(map(bool, groups))
    figure, ((axes,),) = new_figure((5, 1.2 + 0.35 * lines))
    plot_intervals(axes, groups)
    axes.set(xlabel=plain(label))
    axes.margins(x=0.15)
    return svg(figure, legend=any(groups))


def svg(figure, legend: bool) -> str:
    """A figure as an element of a page: black is the page's own colour, and no name in it is met elsewhere."""
    import matplotlib

    if legend:
        figure.legend(loc="outside upper left", frameon=False, fontsize=9)
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", transparent=True)
    root = ElementTree.fromstring(drawn.getvalue())
    used = set(re.findall(r"#(\w+)", drawn.getvalue()))
    for element in root.iter():
        attributes = {local_name(name): value for name, value in element.attrib.items()}
        element.attrib = {name: value for name, value in attributes.items() if name != "id" or value in used}
        element.tag = local_name(element.tag)
        if "style" in attributes:
            element.set("style", attributes["style"].replace("#000000", "currentColor"))
    root.remove(root.find("metadata"))
    root.remove(root.find("defs"))  # rules, which would be for the whole page
    for name in ("width", "height", "version"):
        del root.attrib[name]
    return ElementTree.tostring(root, encoding="unicode")


def local_name(name: str) -> str:
    """Of XML, without its namespace."""
    return name.rpartition("}")[2]


def curves_from_each(file: Path | None, words: Sequence[str], values, title: str, label: str) -> "Figure":
    """One curve [s, t >= s] for each word, from its place on, the words along x."""
    import matplotlib

    n = len(words)
    figure, ((axes,),) = new_figure((max(7, 0.28 * n + 2), 4.5))
    colours = matplotlib.colormaps["viridis"]
    for s in range(n):
        axes.plot(
            range(s, n), values[s][s:], color=colours(0.85 * s / max(n - 1, 1)), marker="o", markersize=2, linewidth=1.2
        )
    axes.set(title=title, xlabel="token", ylabel=label, ylim=(0, None))
    axes.set_xticks(range(n), [shown(word) for word in words], rotation=90)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    return saved(figure, file)


def heat_map(file: Path | None, words: Sequence[str], values, title: str, label: str, unit: str) -> "Figure":
    """Values [n d] as colours around zero, one row for each word."""
    n, d = values.shape
    figure, ((axes,),) = new_figure((min(12, 4 + 0.03 * d), max(3, 0.16 * n + 1)))
    limit = abs(values).max()
    picture = axes.imshow(values, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    axes.set(title=title, xlabel=label, ylabel="token")
    axes.set_yticks(range(n), [shown(word) for word in words], fontsize=7)
    figure.colorbar(picture, ax=axes, shrink=0.8, label=unit)
    return saved(figure, file)


def heat_maps(
    file: Path | None, title: str, panels: Mapping, x_label: str, y_label: str, unit: str, first: int = 0
) -> "Figure":
    """Named values [y x] as colours of one scale, side by side; what goes along x is counted from `first`."""
    low = min(float(values.min()) for values in panels.values())
    high = max(float(values.max()) for values in panels.values())
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    figure, grid = new_figure((1.5 + max(2.6 * columns, 5.5), 0.6 + max(2.6 * rows, 3)), rows, columns)
    figure.suptitle(title)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (name, values) in zip(grid.flat, panels.items(), strict=False):
        n, m = values.shape
        borders = (first - 0.5, first + m - 0.5, n - 0.5, -0.5)
        picture = axes.imshow(values, aspect="auto", vmin=low, vmax=high, interpolation="nearest", extent=borders)
        axes.set_title(name, fontsize=10)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True, nbins=5)
    figure.supxlabel(x_label, fontsize=10)
    figure.supylabel(y_label, fontsize=10)
    figure.colorbar(picture, ax=grid, label=unit)
    return saved(figure, file)


def histogram(file: Path | None, title: str, values: Mapping[str, Sequence[float]], label: str) -> "Figure":
    """How many values of each name fall where, on a logarithmic axis, one panel each."""
    import numpy as np

    figure, grid = new_figure((7, 1 + 1.7 * len(values)), len(values), sharex=True)
    figure.suptitle(plain(title))
    low = max(min(min(numbers) for numbers in values.values()), 1)
    high = max(max(max(numbers) for numbers in values.values()), low + 1)
    edges = np.geomspace(low, high * 1.001, 41)
    for axes, (name, numbers), colour in zip(grid.flat, values.items(), COLOURS, strict=False):
        axes.hist(numbers, edges, color=colour)
        middle = float(np.median(numbers))
        axes.axvline(middle, color="black", linewidth=1)
        axes.annotate(
            f" median {middle:,.0f}", (middle, 1.0), xycoords=("data", "axes fraction"), va="bottom", fontsize=9
        )
        axes.set(xscale="log", ylabel=f"{name} ({len(numbers):,})")
        axes.spines[["top", "right"]].set_visible(False)
    grid.flat[-1].set(xlabel=label)
    return saved(figure, file)


def shown(word: str) -> str:
    """A word whose blanks can be seen."""
    return plain(word.replace("\n", "\\n").replace("\t", "\\t").replace(" ", "\u2423"))


def plain(text: str) -> str:
    """Text that can be drawn: all of it printable, and a dollar sign begins no formula."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text).replace("$", r"\$")


def coloured_text(words: Sequence[str], values: Sequence[float], unit: str) -> str:
    """HTML of a text, the colour of each word as strong as its value is high; pointed at, a word tells its value."""
    known = [value for value in values if not math.isnan(value)] or [0.0]
    low, high = min(known), max(known)
    spans = []
    for word, value in zip(words, values, strict=True):
        strength = 0 if math.isnan(value) else 0.85 * (value - low) / ((high - low) or 1)
        text = html.escape(word).replace("\n", "\u21b5\n")
        colour = f"background: rgba(230, 159, 0, {strength:.2f})"
        spans.append(f'<span style="{colour}" title="{value:.3g} {unit}">{text}</span>')
    page = f"background: {PAPER}; color: {INK}; padding: 0.8em; white-space: pre-wrap"
    return f'<pre style="{page}">{"".join(spans)}</pre>no colour: {low:.3g} {unit}; strongest: {high:.3g}'


def new_figure(size: tuple[float, float], rows: int = 1, columns: int = 1, **how):
    """A figure that no display and no notebook knows of, and its axes [rows columns]."""
    from matplotlib.figure import Figure

    figure = Figure(size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **how)


def saved(figure: "Figure", file: Path | None) -> "Figure":
    if file is not None:
        content = io.BytesIO()
        figure.savefig(content, dpi=120)
        write_bytes(file, content.getvalue())
    return figure
