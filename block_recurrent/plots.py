"""Pictures of curves, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = tuple[Sequence[float], Sequence[float]]  # what goes along x, what goes up

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by every eye


def draw(file: Path, title: str, panels: Mapping[str, Mapping[str, Curve]], x_label: str = "step") -> None:
    """Draws panels side by side, each with its label and its named curves, every curve's last value beside its end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    size = (7, 4) if len(panels) == 1 else (4.2 * columns, 2.9 * rows)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(title)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (label, curves) in zip(grid.flat, panels.items(), strict=False):
        for (name, (along, up)), colour in zip(curves.items(), COLOURS, strict=False):
            axes.plot(along, up, color=colour, marker="o" if len(along) < 40 else None, markersize=4, label=name)
            axes.annotate(
                f"{up[-1]:.3g}", (along[-1], up[-1]), (6, 0), textcoords="offset points", va="center", color=colour
            )
        if len(curves) > 1:
            axes.legend(frameon=False)
        axes.margins(x=0.15)
        axes.set(xlabel=x_label, ylabel=label)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
