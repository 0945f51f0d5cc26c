"""Pictures of curves, drawn without a display."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = tuple[Sequence[float], Sequence[float]]  # what goes along x, what goes up

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by every eye


def draw(file: Path, title: str, panels: Mapping[str, Mapping[str, Curve]], x_label: str = "step") -> None:
    """Draws panels side by side, each with its label and its named curves, every curve's last value beside its end."""
    pyplot = without_display()
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    size = (7, 4) if len(panels) == 1 else (4.2 * columns, 2.9 * rows)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(title)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (label, curves) in zip(grid.flat, panels.items(), strict=False):
        places = apart({name: up[-1] for name, (_, up) in curves.items()}, [y for _, up in curves.values() for y in up])
        looks = itertools.cycle(itertools.product(("-", "--", ":"), COLOURS))
        for (name, (along, up)), (line, colour) in zip(curves.items(), looks, strict=False):
            marker = "o" if len(along) < 40 else None
            axes.plot(along, up, line, color=colour, marker=marker, markersize=4, label=name)
            place = (along[-1], places[name])
            axes.annotate(f"{up[-1]:.3g}", place, (6, 0), textcoords="offset points", va="center", color=colour)
        if len(curves) > 1:
            axes.legend(frameon=False)
        axes.margins(x=0.15)
        axes.set(xlabel=x_label, ylabel=label)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, file)


def apart(ends: Mapping[str, float], drawn: Sequence[float]) -> dict[str, float]:
    """Heights for the labels of curves' ends: beside them, and a line of text from one to the next."""
    line, below, places = 0.06 * (max(drawn) - min(drawn)), -math.inf, {}
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        places[name] = below = max(end, below + line)
    return places


def draw_intervals(
    file: Path, title: str, values: Mapping[str, tuple[float, Sequence[float] | None]], label: str
) -> None:
    """A point for each name, the first on top, with a line over its interval where it has one."""
    pyplot = without_display()
    figure, axes = pyplot.subplots(figsize=(7, 1.4 + 0.4 * len(values)), layout="constrained")
    for y, (value, interval) in enumerate(values.values()):
        axes.plot(interval or [], [y, y] if interval else [], color=COLOURS[0], linewidth=2, alpha=0.5)
        axes.plot(value, y, "o", color=COLOURS[0])
        axes.annotate(f"{value:.4g}", (value, y), (0, 5), textcoords="offset points", ha="center", fontsize=9)
    axes.set(xlabel=label, ylim=(len(values) - 0.5, -0.5))
    axes.set_title(title, parse_math=False)
    axes.set_yticks(range(len(values)), values, parse_math=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, file)


def curves_from_each(file: Path, words: Sequence[str], values, title: str, label: str) -> None:
    """One curve [s, t >= s] for each word, from its place on, the words along x."""
    pyplot = without_display()
    n = len(words)
    figure, axes = pyplot.subplots(figsize=(max(7, 0.28 * n + 2), 4.5), layout="constrained")
    colours = pyplot.get_cmap("viridis")
    for s in range(n):
        axes.plot(range(s, n), values[s][s:], color=colours(s / max(n - 1, 1)), marker="o", markersize=2, linewidth=1.2)
    axes.set(title=title, ylabel=label, ylim=(0, None))
    axes.set_xticks(range(n), [shown(word) for word in words], rotation=90)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    save(figure, file)


def heat_map(file: Path, words: Sequence[str], values, title: str, label: str) -> None:
    """Values [n d] as colours around zero, one row for each word."""
    pyplot = without_display()
    n, d = values.shape
    figure, axes = pyplot.subplots(figsize=(min(12, 3 + 0.03 * d), max(3, 0.16 * n + 1)), layout="constrained")
    limit = abs(values).max()
    picture = axes.imshow(values, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    axes.set(title=title, xlabel=label)
    axes.set_yticks(range(n), [shown(word) for word in words], fontsize=7)
    figure.colorbar(picture, ax=axes, shrink=0.8)
    save(figure, file)


def histogram(file: Path, title: str, values: Mapping[str, Sequence[float]], label: str) -> None:
    """How many values of each name fall where, on a logarithmic axis, one panel each."""
    import numpy as np

    pyplot = without_display()
    figure, grid = pyplot.subplots(
        len(values), 1, figsize=(7, 1 + 1.7 * len(values)), layout="constrained", squeeze=False, sharex=True
    )
    figure.suptitle(title, parse_math=False)  # a $ in a folder's name begins no formula
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
    save(figure, file)


def shown(word: str) -> str:
    """A word whose blanks can be seen; a dollar sign is not the beginning of a formula."""
    return word.replace("\n", "\\n").replace("\t", "\\t").replace(" ", "\u2423").replace("$", r"\$")


def without_display():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure, file: Path) -> None:
    from matplotlib import pyplot

    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:  # a bucket's too
        figure.savefig(stream, dpi=120)
    pyplot.close(figure)
