"""What `prepare` prints: the tasks, a document of a store, and what a store holds."""

import argparse
import tempfile
from pathlib import Path


def print_tasks() -> None:
    """The tasks by corpus: what each needs, and its store where there is one."""
    from itertools import groupby

    from rich.console import Console

    from block_recurrent.data.registry import TASKS
    from block_recurrent.data.store import is_store, task_store

    console = Console(highlight=False)
    kinds = {"given": "--vocabulary=PATH", "words": "words, counted", "any": "bytes, or --vocabulary=PATH"}
    for needs, tasks in groupby(TASKS.values(), key=lambda task: task.needs):
        for task in tasks:
            store = task_store(task.name)
            state = f"in {store}" if is_store(store) else "not prepared"
            console.print(f"[bold]{task.name:<18}[/bold] {kinds.get(task.vocabulary, task.vocabulary):<28} {state}")
        console.print(f"  --input: {needs}\n" if task.options else f"  {needs}\n", markup=False)


def print_document(options: argparse.Namespace) -> None:
    from block_recurrent.data.looking import show
    from block_recurrent.data.registry import TASKS
    from block_recurrent.data.store import is_store, open_store, task_store

    short = task_store(options.show) if options.show in TASKS else f"data/{options.show}"  # a task's name will do
    store = open_store(short if "/" not in options.show and is_store(short) else options.show)
    blocks = options.blocks or None
    for line in show(store, options.split, options.document, options.segment, options.block, blocks):
        print(line)


def print_statistics(store, made: bool = True) -> None:
    """The table and picture that end a preparation, what was dropped, and what differs from the published corpus."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from block_recurrent.data.looking import arranged, losses, mismatches, statistics, warnings

    console, manifest = Console(), store.manifest
    kind, size = manifest["vocabulary"]["kind"], manifest["vocabulary"]["size"]
    remark = "" if made else " (already prepared)"
    table = Table(title=f"{store.folder}: {manifest['task']}, {kind}, {size:,} ids{remark}")
    table.add_column("")
    for name in manifest["splits"]:
        table.add_column(name, justify="right")
    for measure, row in statistics(store).items():
        table.add_row(escape(measure), *row)  # a label may be any text
    console.print(table)
    told = list(arranged(store))
    for reason, entry in manifest.get("dropped", {}).items():
        told.append(f"dropped {entry['count']:,}: {reason} {examples(entry['examples'])}")
    if lost := losses(store.vocabulary):
        told.append(f"this vocabulary loses {lost}: --show prints what is left")
    told += [f"not as published: {line}" for line in mismatches(store)]
    told += [f"warning: {line}" for line in warnings(store)]
    for line in told:
        console.print(line, markup=False, highlight=False)
    draw_lengths(store, again=made)


def examples(names: list[str]) -> str:
    return f"({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})" if names else ""


def draw_lengths(store, again: bool) -> None:
    """The histogram of document lengths, lengths.png in the store."""
    from block_recurrent.data import files
    from block_recurrent.data.documents import readable
    from block_recurrent.plots import histogram

    place = files.join(store.folder, "lengths.png")
    if files.is_file(place) and not again:
        return
    lengths = {
        name: [length for part, _ in store.split(name).parts for length in part.lengths.tolist()]
        for name in store.manifest["splits"]
        if store.has(name)
    }
    positions = store.vocabulary.positions
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder, "lengths.png")
        histogram(picture, f"{readable(store.folder)}: {store.manifest['task']}", lengths, f"{positions} in a document")
        files.write_bytes(place, picture.read_bytes())
    print(f"lengths of documents: {place}")
