"""Sums a run up: its figures, its plots, where everything is, and the commands to go on.

python -m block_recurrent.report runs/quickstart
"""

import json
import math
import sys
from pathlib import Path

from block_recurrent.commandline import command_parser
from block_recurrent.errors import UserError, run_command


def plot(rows: list[dict], name: str, label: str, file: Path, factor: float = 1.0) -> bool:
    """Draws one metric over steps; False where a run has none of it yet."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [(row["step"], row[name] * factor) for row in rows if name in row]
    if not points:
        return False
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, color="#0072b2", marker="o" if len(points) < 40 else None, markersize=4)
    axes.annotate(f"{values[-1]:.3f}", (steps[-1], values[-1]), (6, 0), textcoords="offset points", va="center")
    axes.margins(x=0.09)
    axes.set(xlabel="step", ylabel=label, title=f"{file.parents[1].name}: {label}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return True


def main(arguments: list[str]) -> None:
    parser = command_parser("report", __doc__)
    parser.add_argument("workdir", type=Path)
    options = parser.parse_args(arguments)
    workdir = options.workdir

    from block_recurrent.training.reporting import read_metrics

    rows = read_metrics(workdir / "metrics.jsonl")
    if not rows:
        raise UserError(f"{workdir} has no metrics.jsonl with a row in it: give the --workdir of a training run")
    (workdir / "plots").mkdir(exist_ok=True)
    loss, held_out = workdir / "plots" / "loss.png", workdir / "plots" / "bits_per_byte.png"
    plots = [
        file
        for file, drawn in (
            (loss, plot(rows, "loss", "training loss, bits per token", loss, 1 / math.log(2))),
            (held_out, plot(rows, "validation_bits_per_byte", "held-out bits per byte", held_out)),
        )
        if drawn
    ]
    print(f"\n{workdir}, step {rows[-1]['step']:,}")
    for file in sorted((workdir / "evaluation").glob("*.json")):
        score = json.loads(file.read_text())
        print(f"  {score['bits_per_byte']:.3f} bits per byte on {score['of']} at step {score['step']:,}  ({file})")
    print(f"  checkpoints  {workdir / 'checkpoints'}")
    print(f"  TensorBoard  {Path(executable()).with_name('tensorboard')} --logdir={workdir / 'tensorboard'}")
    print(f"  plots        {' '.join(map(str, plots))}")
    print(f"  config       {workdir / 'config.gin'}\n")
    print(next_commands(workdir, rows[-1]["step"]))


def next_commands(workdir: Path, step: int) -> str:
    """The exact commands to go on with: resume, evaluate, generate, and the same on one's own text."""
    from block_recurrent.inference.run import read_about

    run = f"{executable()} -m block_recurrent"
    command = " ".join(word for word in read_about(workdir)["command"].split() if not word.startswith("--gin.STEPS="))
    mine = " ".join(word for word in command.split() if not word.startswith("--workdir="))
    return "\n".join(
        [
            "Go on:",
            f"  resume, longer    {run}.train {command} --gin.STEPS={2 * step}",
            f"  evaluate          {run}.evaluate {workdir} --text=README.md",
            f"  generate          {run}.generate {workdir} --prompt='class ' --samples=3 --top_p=0.9",
            "On your own folder of text:",
            f"  prepare           {run}.prepare --task=text_files --files=FOLDER --output=data/mine",
            f"  train             {run}.train {mine} --gin.STORE=\"'data/mine'\" --workdir=runs/mine",
        ]
    )


def executable() -> str:
    """This Python, as short as it can be typed here."""
    python = Path(sys.executable)
    return str(python.relative_to(Path.cwd())) if python.is_relative_to(Path.cwd()) else str(python)


if __name__ == "__main__":
    run_command(main)
