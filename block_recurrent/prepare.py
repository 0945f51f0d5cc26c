"""Tokenises a corpus once into a store that training memory-maps.

python -m block_recurrent.prepare --task=python_stdlib --output=data/python_stdlib
python -m block_recurrent.prepare --task=text_files --files=my/texts --output=data/mine
"""

import argparse
import platform
from pathlib import Path

from block_recurrent.commandline import command_parser
from block_recurrent.errors import UserError, run_command

TASKS = ("python_stdlib", "text_files")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = command_parser("prepare", __doc__)
    parser.add_argument("--task", required=True, choices=TASKS)
    parser.add_argument("--files", help="for text_files: a folder, a file or a quoted glob; one document per file")
    parser.add_argument("--vocabulary", default="bytes", help='"bytes" (default) or the path of a SentencePiece model')
    parser.add_argument("--output", required=True, type=Path, help="the folder to make")
    parser.add_argument("--overwrite", action="store_true", help="replace a store that is there already")
    return parser.parse_args(arguments)


def prepare(task: str, files: str | None, vocabulary_name: str, output: Path, overwrite: bool):
    """Makes a store, or finds the same one already there; returns it and whether it was made."""
    from block_recurrent.data import sources
    from block_recurrent.data.store import open_store, write_store
    from block_recurrent.data.vocabulary import vocabulary

    if (files is None) == (task == "text_files"):
        raise UserError("--files=FOLDER_OR_GLOB goes with --task=text_files, and only there")
    source = sources.text_files(files) if task == "text_files" else sources.python_stdlib()
    words = vocabulary(vocabulary_name)
    about = {"task": task, "fingerprint": source.fingerprint(), "python": platform.python_version()}
    if output.exists() and not (output / "manifest.json").exists():
        raise UserError(f"{output} exists and is no prepared store: choose another --output")
    if output.exists() and not overwrite:
        there = open_store(output)
        if (
            there.manifest["fingerprint"] == about["fingerprint"]
            and there.manifest["vocabulary"]["sha256"] == words.identity
        ):
            return there, False
        raise UserError(
            f"{output} was made from other files or another vocabulary: choose another --output, or --overwrite it"
        )

    from block_recurrent.data.tasks import tokenised_documents  # TensorFlow, only when there is work for it

    splits = {
        split: ((document.text, document.tokens) for document in tokenised_documents(source, words, split))
        for split in sources.SPLITS
    }
    return write_store(output, splits, words, about), True


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    store, made = prepare(options.task, options.files, options.vocabulary, options.output, options.overwrite)
    from rich.console import Console
    from rich.table import Table

    kind, size = store.manifest["vocabulary"]["kind"], store.manifest["vocabulary"]["size"]
    table = Table(
        title=f"{store.folder}: {store.manifest['task']}, {kind}, {size} ids{'' if made else ' (already prepared)'}"
    )
    for column in ("split", "documents", "tokens", "bytes", "words"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for name, entry in store.manifest["splits"].items():
        table.add_row(name, *(f"{entry[column]:,}" for column in ("documents", "tokens", "bytes", "words")))
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
