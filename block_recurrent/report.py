"""Sums a run up: its figures, its plots, where everything is, and the commands to go on.

python -m block_recurrent.report runs/quickstart
"""

import json
import math
import sys
from pathlib import Path

from etils import epath

from block_recurrent.commandline import command_parser
from block_recurrent.errors import UserError, run_command
from block_recurrent.plots import draw


def curves(rows: list[dict], prefix: str, factor: float = 1.0) -> dict[str, dict]:
    """The metrics whose names begin so, over steps: by measure, then by layer ("health/LAYER/MEASURE")."""
    found: dict[str, dict] = {}
    for name in dict.fromkeys(name for row in rows for name in row if name.startswith(prefix)):
        steps, values = zip(*((row["step"], row[name] * factor) for row in rows if name in row), strict=True)
        *_, layer, measure = ["", *name.split("/")]
        found.setdefault(measure.replace("_", " "), {})[layer] = (steps, values)
    return found


def draw_plots(workdir: epath.Path, rows: list[dict]) -> list[epath.Path]:
    """Draws what the metrics have; the files that were drawn."""
    pictures = {
        "loss": ("training loss, bits per token", curves(rows, "loss", 1 / math.log(2))),
        "bits_per_byte": ("held-out bits per byte", curves(rows, "validation_bits_per_byte")),
        "health": ("health of the recurrent states", curves(rows, "health/")),
    }
    files = []
    for name, (title, panels) in pictures.items():
        if panels:
            files.append(workdir / "plots" / f"{name}.png")
            draw(files[-1], f"{workdir.name}: {title}", panels)
    return files


def main(arguments: list[str]) -> None:
    parser = command_parser("report", __doc__)
    parser.add_argument("workdir", help="the run's folder, or gs://...")
    options = parser.parse_args(arguments)

    from block_recurrent.inference.run import read_metrics, run_folder

    workdir = run_folder(options.workdir)
    rows = read_metrics(workdir / "metrics.jsonl")
    if not rows:
        raise UserError(f"{workdir} has no metrics.jsonl with a row in it: give the --workdir of a training run")
    plots = draw_plots(workdir, rows)
    print(f"\n{workdir}, step {rows[-1]['step']:,}")
    for file in sorted((workdir / "evaluation").glob("*.json")):
        score = json.loads(file.read_text())
        print(f"  {score['bits_per_byte']:.3f} bits per byte on {score['of']} at step {score['step']:,}  ({file})")
    print(f"  checkpoints  {workdir / 'checkpoints'}")
    print(f"  TensorBoard  {Path(executable()).with_name('tensorboard')} --logdir={workdir / 'tensorboard'}")
    print(f"  plots        {' '.join(map(str, plots))}")
    print(f"  config       {workdir / 'config.gin'}\n")
    print(next_commands(workdir, rows[-1]["step"]))


def next_commands(workdir: epath.Path, step: int) -> str:
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
            f"  prepare           {run}.prepare --task=text_files --input=FOLDER --output=data/mine",
            f"  train             {run}.train {mine} --gin.STORE=\"'data/mine'\" --workdir=runs/mine",
        ]
    )


def executable() -> str:
    """This Python, as short as it can be typed here."""
    python = Path(sys.executable)
    return str(python.relative_to(Path.cwd())) if python.is_relative_to(Path.cwd()) else str(python)


if __name__ == "__main__":
    run_command(main)
