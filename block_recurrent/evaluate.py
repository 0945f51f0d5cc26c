"""Evaluates a run over a whole split: bits per token and per byte, word-level perplexity, by position and kind of word.

python -m block_recurrent.evaluate runs/quickstart
python -m block_recurrent.evaluate runs/quickstart --text=my/texts
python -m block_recurrent.evaluate runs/quickstart --history=64      # what up to 64 blocks of the past are worth
python -m block_recurrent.evaluate runs/srupp --gin.CONTEXT=3072     # a longer context than in training

The figures are printed, and written to WORKDIR/evaluation, or where --output says.
"""

import argparse
import json
import re
import sys

from block_recurrent.commandline import Parser, command_parser, gin_bindings, step
from block_recurrent.errors import UserError, first_line, run_command
from block_recurrent.measures import LABELS, TEXT, Kind, kind_of
from block_recurrent.ranges import DROPOUT, POSITIVE, RATE, WHOLE_1

DYNAMIC = ("rate", "decay", "epsilon", "statistics")
SCORED = 256  # blocks that --history scores


def parser() -> Parser:
    made = command_parser("evaluate", __doc__)
    made.add_argument("workdir", help="the run's folder, or gs://...")
    made.add_argument("--split", help="train, validation or test (default)")
    made.add_argument("--store", help="a prepared store (default: the one the run was trained on)")
    made.add_argument("--text", help="a folder, file or quoted glob of your own text, instead of a split")
    made.add_argument("--step", type=step, help="a checkpoint's step, or best (default: the latest)")
    made.add_argument("--rows", type=WHOLE_1, help="documents read side by side (default: as in training)")
    made.add_argument("--output", metavar="FILE", help="for the figures (default: one in WORKDIR/evaluation)")
    past = made.add_argument_group("how much of the past is used")
    past.add_argument("--reset_every", type=WHOLE_1, metavar="BLOCKS", help="forget everything after so many blocks")
    past.add_argument(
        "--history", type=WHOLE_1, metavar="BLOCKS", help="also score the same blocks with 0, 1, 2, 4 ... before them"
    )
    past.add_argument("--scored", type=WHOLE_1, help=f"how many blocks --history scores (default: {SCORED})")
    dynamic = made.add_argument_group("dynamic evaluation (Krause et al. 2018)")
    dynamic.add_argument("--dynamic", action="store_true", help="go on learning from what has been scored")
    dynamic.add_argument("--rate", type=RATE, help="of learning, for every five tokens (default: 5e-05)")
    dynamic.add_argument(
        "--decay", type=DROPOUT, help="back to the trained parameters, for every five tokens (default: 0.002)"
    )
    dynamic.add_argument(
        "--epsilon", type=POSITIVE, help="added to the root mean square of a parameter's gradient (default: 2e-05)"
    )
    dynamic.add_argument(
        "--statistics",
        type=WHOLE_1,
        metavar="TOKENS",
        help="training tokens that the root mean squares are of, at most (default: all, as long as an epoch)",
    )
    made.add_argument("--trust", action="append", default=[], help="a package that the run's config may import")
    return made


def check(options: argparse.Namespace) -> None:
    """Refuses flags that cannot act together."""
    given = [name for name in DYNAMIC if getattr(options, name) is not None]
    if options.dynamic and (options.reset_every or options.rows):
        raise UserError("--dynamic reads one row and never forgets: leave --rows and --reset_every away")
    if given and not options.dynamic:
        raise UserError(f"--{given[0]} is of dynamic evaluation: give --dynamic too, or leave it away")
    if options.scored and not options.history:
        raise UserError("--scored says how much --history scores: give --history too, or leave it away")
    for name in ("text", "dynamic", "reset_every"):
        if options.history and getattr(options, name):
            raise UserError(f"--history is measured on a split, by the model as it is: leave --{name} away")
    if options.text and options.split:
        raise UserError("--text is evaluated instead of a split: leave --split away")
    if options.text and options.store and not options.dynamic:  # which has statistics from a store
        raise UserError("--text is evaluated instead of a store: leave --store away")


def main(arguments: list[str]) -> None:
    options, bindings = gin_bindings(parser(), arguments)
    check(options)

    from rich.console import Console
    from rich.progress import Progress

    from block_recurrent.data import sources
    from block_recurrent.inference.dynamic import Learning
    from block_recurrent.inference.run import open_run

    given = {name: getattr(options, name) for name in DYNAMIC if getattr(options, name) is not None}
    split = options.split or "test"
    run = open_run(options.workdir, options.trust, bindings).at(options.step)
    if options.history:
        run.need_text()
    texts = sources.texts_in(options.text) if options.text else None
    learning = Learning(**given) if options.dynamic else None
    what = options.text or split
    changes = [*bindings, *([f"reset_every={options.reset_every}"] if options.reset_every else [])]
    if learning:
        run.need_text()
        read, there = learning.reach(run.training_split(options.store))
        tokens = f"all {there:,}" if read == there else f"{read:,} of {there:,}"
        print(f"gradient statistics from {tokens} training tokens", file=sys.stderr)
        changes += [f"dynamic={learning.rate:g},{learning.decay:g},{learning.epsilon:g}"]
        changes += [] if read == there else [f"statistics={read}"]
    with Progress(console=Console(stderr=True), transient=True) as bar:

        def progress_of(text):
            task = bar.add_task(text, total=None)
            return lambda done, total: bar.update(task, completed=done, total=total)

        statistics = {"statistics_progress": progress_of("gradient statistics")} if learning else {}
        found = run.evaluate(
            split,
            options.store,
            texts,
            options.rows,
            options.reset_every,
            learning,
            progress_of(f"evaluating {what}"),
            **statistics,
        )
        curve = None
        if options.history:
            how = {"longest": options.history, "scored": options.scored or SCORED, "progress": progress_of("history")}
            curve = run.history(split, options.store, **how)

    about = {"step": run.step, "of": what, **({"changed": changes} if changes else {})}
    about |= found.to_json() | ({"history": curve.to_json()} if curve else {})
    title = f"{options.workdir} at step {run.step:,} on {what}{''.join(f', {change}' for change in changes)}"
    console = Console(width=None if sys.stdout.isatty() else 100)
    for table in tables(title, about, kind_of(run.about), run.vocabulary.kind == "words"):
        console.print(table)
    changed = "".join(re.sub(r"[^\w=.+-]", "_", f"-{change}") for change in changes)
    name = f"{'text' if options.text else split}-{run.step}{changed}.json"
    save(options.output or run.workdir / "evaluation" / name, about)


def save(file, about: dict) -> None:
    """Writes the figures, which are on the screen already where that fails."""
    from block_recurrent.writing import write_text

    try:
        write_text(file, json.dumps(about, indent=2) + "\n")
    except Exception as error:  # clients of buckets have errors of their own
        why = getattr(error, "strerror", None) or first_line(error)
        raise UserError(
            f"the figures are printed but not saved, as {file} cannot be written ({why}): --output=FILE names another"
        ) from error
    print(f"written to {file}")


def tables(title: str, found: dict, kind: Kind, of_words: bool = False) -> list:
    """What is printed: the figures, and then those by position, by kind of word, by class and by history."""
    from rich.table import Table

    def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
        made = Table(title=title)
        for i, column in enumerate(columns):
            made.add_column(column, justify="left" if rows and i == 0 and len(rows) > 1 else "right")
        for row in rows:
            made.add_row(*row)
        return made

    if kind is LABELS:
        figures = [f"{found['documents']:,}", f"{found['accuracy']:.2%}", percents(found["accuracy_interval"])]
        columns = ["sequences", "right", "95 %", "nats per label"]
        rows = [
            [row["of"], f"{row['documents']:,}", f"{row['accuracy']:.2%}", percents(row["interval"])]
            for row in found["by_class"]
        ]
        made = [table(title, columns, [[*figures, f"{found['nats_per_token']:.4f}"]])]
        return [*made, table("", ["class", "sequences", "right", "95 %"], rows)]
    loss = kind.loss
    columns = ["documents", f"{kind.position}s", loss.label, "95 %"]
    figures = [f"{found['documents']:,}", f"{found['tokens']:,}", f"{loss.factor * found[loss.source]:.4f}"]
    figures += [interval(found[loss.interval], loss.factor)]
    if kind is TEXT:
        perplexity = "perplexity" if of_words else "word_perplexity"  # corpora of words count ends of lines as words
        columns += ["bits per byte"]
        figures += [f"{found['bits_per_byte']:.4f}"]
        if found[perplexity] is not None:
            columns += [perplexity.replace("_", " ")]
            figures += [f"{found[perplexity]:,.1f}"]
    made = [table(title, columns, [figures])]
    for name, heading in (("by_position", f"{kind.position}s into the document"), ("by_word", "tokens of")):
        if found[name] and len(found[name]) > 1:
            rows = [
                [
                    row["of"],
                    f"{row['tokens']:,}",
                    f"{loss.factor * row[loss.source]:.4f}",
                    interval(row["interval"], loss.factor),
                ]
                for row in found[name]
            ]
            made.append(table("", [heading, *columns[1:4]], rows))
    if "history" in found:
        rows = [
            [
                f"{row['blocks']:,} ({row['tokens']:,} tokens)",
                f"{row['bits_per_token']:.4f}",
                f"{row['gain']:.4f}",
                *(
                    [f"{row['gain_beyond_one']:.4f}", interval(row["gain_beyond_one_interval"])]
                    if row["blocks"]
                    else []
                ),
            ]
            for row in found["history"]
        ]
        made.append(table("", ["blocks of history", "bits per token", "less than none", "less than one", "95 %"], rows))
    return made


def percents(bounds: list[float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0]:.2%} to {bounds[1]:.2%}"


def interval(bounds: list[float] | None, factor: float = 1.0) -> str:
    return "-" if bounds is None else f"{factor * bounds[0]:.4f} to {factor * bounds[1]:.4f}"


if __name__ == "__main__":
    run_command(main)
