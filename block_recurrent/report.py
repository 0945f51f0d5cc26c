"""Makes a page of a run, of several side by side, or of a comparison, and tells the commands to go on.

python -m block_recurrent.report runs/quickstart               # writes runs/quickstart/report.html
python -m block_recurrent.report runs/srupp runs/lrn           # writes runs/side_by_side.html
python -m block_recurrent.report runs/two                      # a folder of `compare`, and each of its runs

A page is one file that needs no server and no network.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from block_recurrent.commandline import command_parser
from block_recurrent.errors import UserError, run_command
from block_recurrent.writing import write_text

if TYPE_CHECKING:
    from etils import epath

NAMES = ("STEPS", "STORE")  # of a run's length and data, where its config has names for them


def main(arguments: list[str]) -> None:
    parser = command_parser("report", __doc__)
    parser.add_argument("workdir", nargs="+", help="a run's folder, or gs://..., or a folder of `compare`")
    parser.add_argument(
        "--output",
        help="the page's file (default: WORKDIR/report.html, and of several runs side_by_side.html beside the first)",
    )
    parser.add_argument("--no_samples", action="store_true", help="no text written by the newest checkpoint")
    parser.add_argument("--trust", action="append", default=[], help="a package that the run's config may import")
    options = parser.parse_args(arguments)
    if options.no_samples and options.trust:
        raise UserError("--trust is for samples, which --no_samples leaves out: leave one of them away")

    from etils import epath

    from block_recurrent.data.files import require_contained
    from block_recurrent.inference.run import METRICS, run_folder
    from block_recurrent.measures import TEXT
    from block_recurrent.reported_runs import read_run, samples_of, told_apart
    from block_recurrent.run_pages import COMPARISON, REPORT, comparison_page, run_page, runs_page

    folders = list(dict.fromkeys(map(run_folder, options.workdir)))
    for folder in folders:
        require_contained(folder)
    comparison = next((folder for folder in folders if (folder / COMPARISON).exists()), None)
    if comparison and (len(folders) > 1 or options.output):
        raise UserError(f"{comparison} is a folder of `compare`, whose page is in it: give it alone, without --output")
    workdirs = sorted(file.parent for file in comparison.glob(f"*/{METRICS}")) if comparison else folders
    runs = told_apart([read_run(workdir) for workdir in workdirs])
    for run in runs[1:]:
        if run.kind != runs[0].kind:
            one, other = (f"{each.workdir} is judged by {each.kind.main.label}" for each in (runs[0], run))
            raise UserError(f"{one}, {other}: give runs of one kind")
    if runs and runs[0].kind is TEXT and not options.no_samples:
        runs = [replace(run, samples=samples_of(run.workdir, options.trust)) for run in runs]
    if comparison:
        for run in runs:
            write_text(run.workdir / REPORT, run_page(run))
        file, page = comparison / REPORT, comparison_page(comparison, runs)
    elif len(runs) == 1:
        file, page = runs[0].workdir / REPORT, run_page(runs[0])
    else:
        file, page = runs[0].workdir.parent / "side_by_side.html", runs_page(runs)
    file = epath.Path(options.output or file)
    write_text(file, page)

    for run in runs:
        print(summary(run))
    print(f"  report       {file}\n")
    if len(runs) == 1:
        print(next_commands(runs[0].workdir, runs[0].rows[-1]["step"], runs[0].kind is TEXT))


def summary(run) -> str:
    """Where everything of a run is, and its figures."""
    main = run.kind.main
    scores = [
        f"  {score.figures[main][0]:{main.layout}} {main.label} on {score.label} at step {score.step:,}  ({score.file})"
        for score in run.scores
    ]
    tensorboard = Path(executable()).with_name("tensorboard")
    return "\n".join(
        [
            f"\n{run.workdir}, step {run.rows[-1]['step']:,}",
            *([f"  began with   the parameters of {run.source}"] if run.source else []),
            *scores,
            f"  checkpoints  {run.workdir / 'checkpoints'}",
            f"  TensorBoard  {tensorboard} --logdir={run.workdir / 'tensorboard'}",
            f"  config       {run.workdir / 'config.gin'}",
        ]
    )


def next_commands(workdir: "epath.Path", step: int, writes_text: bool) -> str:
    """The exact commands to go on with: resume, evaluate, and, of a language model, generate and one's own text."""
    from block_recurrent.config import CONFIG
    from block_recurrent.inference.run import read_about
    from block_recurrent.reported_runs import text_of

    run, place = f"{executable()} -m block_recurrent", shlex.quote(str(workdir))
    config = text_of(workdir / CONFIG)
    steps, store = (name if re.search(rf"^{name} =", config, re.M) else f"train.{name.lower()}" for name in NAMES)
    words = without(words_of(read_about(workdir)["command"]), "--workdir", f"--gin.{steps}", "--take_over")
    twice = [f"--gin.{steps}={2 * step}"] if step else []  # a warm start has a row of step 0
    longer = shlex.join([*words, f"--workdir={workdir}", *twice])
    resume = ["Go on:", f"  resume, longer    {run}.train {longer}"]
    if not writes_text:
        return "\n".join([*resume, f"  evaluate          {run}.evaluate {place}"])
    mine = shlex.join(without(words, f"--gin.{store}", "--from", "--from_fresh"))
    return "\n".join(
        [
            *resume,
            f"  evaluate          {run}.evaluate {place} --text=README.md",
            f"  generate          {run}.generate {place} --prompt='class ' --samples=3 --top_p=0.9",
            "On your own folder of text:",
            f"  prepare           {run}.prepare --task=text_files --input=FOLDER --output=data/mine",
            f"  train             {run}.train {mine} --gin.{store}=data/mine --workdir=runs/mine",
        ]
    )


def words_of(command: str) -> list[str]:
    """The words of a command, which may have quotes without an end where a run comes from elsewhere."""
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def without(words: Sequence[str], *flags: str) -> list[str]:
    """The words of a command but for some flags and their values."""
    left, words = [], list(words)
    while words:
        word = words.pop(0)
        if word in flags and word in ("--workdir", "--from", "--from_fresh") and words:
            words.pop(0)
        elif word.partition("=")[0] not in flags:
            left.append(word)
    return left


def executable() -> str:
    """This Python, as short as it can be typed here."""
    python = Path(sys.executable)
    return str(python.relative_to(Path.cwd())) if python.is_relative_to(Path.cwd()) else str(python)


if __name__ == "__main__":
    run_command(main)
