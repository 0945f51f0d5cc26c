"""Evaluates a run: bits per token and per byte, and word-level perplexity, over a whole split.

python -m block_recurrent.evaluate runs/quickstart
python -m block_recurrent.evaluate runs/quickstart --text=my/texts
python -m block_recurrent.evaluate runs/srupp --gin.CONTEXT=3072    # a longer context than in training
"""

import json
import re
from pathlib import Path

from block_recurrent.commandline import command_parser, gin_bindings
from block_recurrent.errors import UserError, run_command


def main(arguments: list[str]) -> None:
    parser = command_parser("evaluate", __doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--split", default="test", help="train, validation or test (default)")
    parser.add_argument("--store", help="a prepared store (default: the one the run was trained on)")
    parser.add_argument("--text", help="a folder, file or quoted glob of your own text, instead of a split")
    parser.add_argument("--step", type=int, help="a checkpoint's step (default: the latest)")
    parser.add_argument("--rows", type=int, help="documents read side by side (default: as in training)")
    parser.add_argument("--trust", action="append", help="a package that the run's config may import")
    options, bindings = gin_bindings(parser, arguments)
    if options.rows is not None and options.rows < 1:
        raise UserError(f"--rows={options.rows}: give 1 or more")

    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from block_recurrent.data import sources
    from block_recurrent.data.store import split_in_memory
    from block_recurrent.inference.evaluation import Evaluator
    from block_recurrent.inference.run import open_run

    run = open_run(options.workdir, options.trust, bindings)
    step = run.step(options.step)
    if options.text:
        what, split = options.text, split_in_memory(sources.texts_in(options.text), run.vocabulary)
    else:
        what, split = options.split, run.store(options.store).split(options.split)
    # Few documents in few rows, in longer segments: as many tokens at once, and by the law of chunks the same figures.
    rows = options.rows or max(min(run.settings["rows"], sum(len(part.lengths) for part, _ in split.parts)), 1)
    segment = run.settings["segment"] * max(run.settings["rows"] // rows, 1)
    evaluator = Evaluator(run.model, rows, segment, uncut=True)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"evaluating {what}", total=None)
        params = run.params(step)
        score = evaluator(params, split, progress=lambda done, total: bar.update(task, completed=done, total=total))

    folder = options.workdir / "evaluation"
    folder.mkdir(exist_ok=True)
    changed = "".join(re.sub(r"[^\w=.+-]", "_", f"-{binding}") for binding in bindings)
    file = folder / f"{'text' if options.text else options.split}-{step}{changed}.json"
    about = {"step": step, "of": what, **({"changed": bindings} if bindings else {})}
    file.write_text(json.dumps({**about, **score.to_json()}, indent=2) + "\n")
    table = Table(title=f"{options.workdir} at step {step:,} on {what}")
    of_words = run.vocabulary.kind == "words"  # their corpora count the ends of lines as words
    perplexity = "perplexity" if of_words else "word perplexity"
    for column in ("documents", "tokens", "bits per token", "bits per byte", perplexity):
        table.add_column(column, justify="right")
    table.add_row(
        f"{score.documents:,}",
        f"{score.tokens:,}",
        f"{score.bits_per_token:.4f}",
        f"{score.bits_per_byte:.4f}",
        f"{score.perplexity if of_words else score.word_perplexity:,.1f}",
    )
    Console().print(table)
    print(f"written to {file}")


if __name__ == "__main__":
    run_command(main)
