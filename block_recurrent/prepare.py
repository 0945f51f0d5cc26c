"""Reads a corpus, tokenises it once and writes a store that training reads; killed, the same command goes on.

python -m block_recurrent.prepare --list
python -m block_recurrent.prepare --task=text_files --input=my/texts --output=data/mine
python -m block_recurrent.prepare --task=pg19_tokens --input=gs://deepmind-gutenberg --vocabulary=vocabulary.model
python -m block_recurrent.prepare --train_vocabulary=vocabulary.model --size=32000 --task=pg19_tokens --input=PG19
python -m block_recurrent.prepare --show data/mine --document 3
python -m block_recurrent.prepare --mixture=data/pg19_tokens=0.7,data/arxiv_math_tokens=0.3 --output=data/both
"""

import argparse
import os
import platform
import sys
from contextlib import contextmanager
from pathlib import Path

from block_recurrent import stores_printed
from block_recurrent.commandline import command_parser
from block_recurrent.errors import UserError, run_command
from block_recurrent.ranges import SEED, WHOLE_0, WHOLE_1

CORPUS = ("input", "text", "split_on", "metadata", "languages", "licences", "max_file_bytes", "seed")
USED = {  # what can be done, and the flags that it takes; the first that is given is done
    "list": (),
    "show": ("split", "document", "segment", "block", "blocks"),
    "mixture": ("output", "overwrite"),
    "train_vocabulary": ("task", *CORPUS, "size", "overwrite", "workers"),
    "task": (*CORPUS, "output", "vocabulary", "separator", "overwrite", "workers", "work", "runner"),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = command_parser("prepare", __doc__)
    does = parser.add_argument_group("what to do")
    does.add_argument("--list", action="store_true", help="print the tasks, what each needs and where it is")
    does.add_argument("--task", help="prepare this task's store")
    does.add_argument(
        "--train_vocabulary", metavar="FILE", help="make a vocabulary from the task's training text instead"
    )
    does.add_argument("--show", metavar="STORE", help="print a document of a store as the model sees it")
    does.add_argument("--mixture", metavar="STORE=RATE,...", help="make a store that mixes others, by share of tokens")
    corpus = parser.add_argument_group("the corpus")
    corpus.add_argument("--input", "--files", help="where it is: a path or an address such as gs://bucket/folder")
    corpus.add_argument("--text", metavar="FIELD", help="files are JSON lines, a text in this field of each")
    corpus.add_argument("--split_on", metavar="TEXT", help=r"what stands between a file's documents; \n is a newline")
    corpus.add_argument("--metadata", help="arXiv's metadata snapshot (JSON lines)")
    corpus.add_argument("--languages", type=listed, help="of source code, such as Python,C++ (default: all known)")
    corpus.add_argument("--licences", type=listed, help='of repositories, such as MIT,Apache-2.0 or "permissive"')
    corpus.add_argument("--max_file_bytes", type=WHOLE_1, help="longer source files are dropped")
    corpus.add_argument("--seed", type=SEED, help="of the order of files in a repository, or of pixels")
    store = parser.add_argument_group("the store")
    store.add_argument("--output", help="the folder or address to make (default: data/TASK; see --list)")
    store.add_argument("--vocabulary", help='"bytes", or the path of a SentencePiece .model or a word list .txt')
    store.add_argument("--separator", action="store_true", help="end documents with the vocabulary's separator")
    store.add_argument("--overwrite", action="store_true", help="replace a store that is there already")
    store.add_argument("--workers", type=WHOLE_1, default=cores(), help="processes (default: all cores)")
    store.add_argument("--size", type=WHOLE_1, default=32000, help="of a vocabulary to train")
    store.add_argument("--work", help="the folder where it comes together (default: a hidden one beside it)")
    store.add_argument("--runner", help="of Apache Beam, such as DirectRunner; its own options are --beam.NAME=VALUE")
    look = parser.add_argument_group("looking at a document")
    look.add_argument("--split", default="train")
    look.add_argument("--document", type=WHOLE_0, default=0)
    look.add_argument("--segment", type=WHOLE_1, default=4096)
    look.add_argument("--block", type=WHOLE_1, default=512)
    look.add_argument("--blocks", type=WHOLE_0, default=4, help="how many to print; 0 for all")
    prefix = "--beam."
    options = parser.parse_args([argument for argument in arguments if not argument.startswith(prefix)])
    for name in ("input", "metadata", "output", "vocabulary", "work", "show", "train_vocabulary"):
        # Shells leave the ~ of --output=~/data alone, and a folder of that name is no pleasure to remove.
        setattr(options, name, getattr(options, name) and os.path.expanduser(getattr(options, name)))
    options.beam = [f"--{argument.removeprefix(prefix)}" for argument in arguments if argument.startswith(prefix)]
    if options.beam and not options.runner:
        raise UserError("--beam.NAME=VALUE goes with --runner, such as --runner=DirectRunner")
    if options.work and files_elsewhere(options.work) and not options.runner:
        raise UserError(f"--work={options.work}: only a --runner of Apache Beam works in a bucket")
    check(parser, options)
    return options


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses flags that what is done has no use for."""
    what = next((name for name in USED if getattr(options, name)), None)
    if what is None:
        raise UserError("say what to do: --task=NAME, --list, --show, --mixture or --train_vocabulary (see --help)")
    for action in parser._actions:
        name = action.dest
        if name not in (what, "help", "debug", *USED[what]) and getattr(options, name) != action.default:
            raise UserError(f"--{name} does not go with --{what}: leave one of them away")


def cores() -> int:
    """Those that this process may use; macOS tells only how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def files_elsewhere(place: str) -> bool:
    from block_recurrent.data.files import is_remote

    return is_remote(place)


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.list:
        stores_printed.print_tasks()
    elif options.show:
        stores_printed.print_document(options)
    elif options.mixture:
        from block_recurrent.data.mixing import mix

        stores_printed.print_statistics(mix(options.mixture, options.output, options.overwrite))
    elif options.train_vocabulary:
        train_vocabulary(options)
    else:
        with progress_bar() as progress:
            store, made = prepare(**build_options(options), progress=progress)
        stores_printed.print_statistics(store, made)


def build_options(options: argparse.Namespace) -> dict:
    """What `prepare` takes, from the command line."""
    from block_recurrent.data.registry import default_folder

    corpus = {name: getattr(options, name) for name in CORPUS}
    return {
        "task": options.task,
        "output": options.output or default_folder(find_task(options.task).name),
        "vocabulary": options.vocabulary,
        "overwrite": options.overwrite,
        "separator": options.separator,
        "workers": options.workers,
        "work": options.work,
        "beam": [f"--runner={options.runner}", *options.beam] if options.runner else None,
        **{name: value for name, value in corpus.items() if value is not None},
    }


def prepare(
    task: str,
    output: str | Path,
    vocabulary: str | None = None,
    overwrite: bool = False,
    separator: bool = False,
    workers: int = 1,
    work: str | None = None,
    beam: list[str] | None = None,
    progress=None,
    **corpus,
):
    """Makes a store, or finds the same one already there; returns it and whether it was made.

    `corpus` is what the task takes. With `beam`, a list of Beam's own arguments, Beam does the work.
    """
    from block_recurrent.data import building, files, pool
    from block_recurrent.data.documents import labels_of

    task, output, progress = find_task(task), str(output), progress or pool.silent
    source = open_source(task, corpus)
    given = given_vocabulary(task, vocabulary)
    if separator and given is not None and not given.is_text:
        raise UserError(f"--separator does not go with --task={task.name}: {given.kind} are not text")
    if separator and given is not None and given.separator is None:
        raise UserError(f"{vocabulary} has no id that could end a document: --separator needs one")
    if separator and labels_of(source):
        raise UserError(f"--separator does not go with --task={task.name}: a label is told at a document's last word")
    units = tuple(source.units())
    identity = given.identity if given else f"words {task.lines} {task.minimum} {task.unknown}"
    about = {
        "fingerprint": building.fingerprint(task.name, source, units, identity, separator=separator),
        "published": getattr(source, "published", {}),
        **({"arranged": source.arrangement(units)} if hasattr(source, "arrangement") else {}),
        "python": platform.python_version(),
    }
    recipe_hash = f"{building.PIECES}-{about['fingerprint']}"
    there = check_output(output, overwrite)
    if there is not None:
        if there.manifest["fingerprint"] == about["fingerprint"]:
            pool.remove_leftover(work, output, recipe_hash)
            return there, False
        raise UserError(
            f"{output} was made from other files, with other splits or another vocabulary: "
            "choose another --output, or --overwrite it"
        )
    with pool.work_folder(work, output, recipe_hash) as folder:
        words = given or kept_words(folder, lambda: pool.counted_vocabulary(task, source, units, workers, progress))
        target = output if files.is_remote(folder) else files.join(folder, "store")
        recipe = building.Recipe(task.name, source, units, words, folder, target, separator)
        if beam is None:
            return pool.build(recipe, about, output, workers, progress), True
        from block_recurrent.data.beam import build

        return build(recipe, about, output, beam), True


def find_task(name: str):
    from block_recurrent.data.registry import task

    return task(name)


def open_source(task, corpus: dict):
    """The task's source, once the options given are those that it takes."""
    for name in corpus:
        if name not in task.options:
            takes = ", ".join(f"--{option}" for option in task.options) or "nothing"
            raise UserError(f"--{name} does not go with --task={task.name}, which takes {takes}")
    for name in ("input", "metadata"):
        if name in task.options and not corpus.get(name):
            raise UserError(f"--task={task.name} needs --{name}: {task.needs}")
    return task.open(**corpus)


def given_vocabulary(task, name: str | None):
    """The vocabulary that a task is read with, or None where its words are yet to be counted."""
    from block_recurrent.data.signals import SIGNALS
    from block_recurrent.data.vocabulary import vocabulary

    if task.vocabulary in SIGNALS:
        if name is not None:
            raise UserError(f"--vocabulary does not go with --task={task.name}: {task.vocabulary} are not text")
        return SIGNALS[task.vocabulary]()
    if name is None and task.vocabulary == "given":
        raise UserError(
            f"--task={task.name} needs --vocabulary=PATH, a SentencePiece model: --train_vocabulary makes one"
        )
    if name is None and task.vocabulary == "words":
        return None
    found = vocabulary(name or "bytes")
    wanted = {"bytes": "bytes", "given": "sentencepiece", "words": "words"}.get(task.vocabulary, found.kind)
    if found.kind != wanted:
        raise UserError(f"--task={task.name} is made of {wanted}: --vocabulary={name} is one of {found.kind}")
    return found


def kept_words(folder: str, count):
    """The words of a work folder, counted the first time."""
    from block_recurrent.data import files
    from block_recurrent.data.vocabulary import WordVocabulary, vocabulary

    place = files.join(folder, WordVocabulary.file_name)
    if not files.is_file(place):
        count().save(folder)
    return vocabulary(place)


def check_output(output: str, overwrite: bool):
    """The store that stays where a new one is to go, or None; refuses a place that holds something else."""
    from block_recurrent.data import files
    from block_recurrent.data.store import is_store, store_in

    if is_store(output):
        return None if overwrite else store_in(output)
    if files.is_file(output) or (files.is_folder(output) and not files.is_empty(output)):
        raise UserError(f"{output} exists and is no prepared store: choose another --output")
    return None


def train_vocabulary(options: argparse.Namespace) -> None:
    from block_recurrent.data import files, pool
    from block_recurrent.data.signals import SIGNALS
    from block_recurrent.data.train_vocabulary import refuse_existing, train_sentencepiece
    from block_recurrent.data.vocabulary import vocabulary

    if not options.task:
        raise UserError("--train_vocabulary needs --task=NAME and what that takes: the text to learn from")
    task = find_task(options.task)
    if task.vocabulary in SIGNALS:
        raise UserError(f"--train_vocabulary does not go with --task={task.name}: {task.vocabulary} are not text")
    corpus = {key: value for key, value in build_options(options).items() if key in task.options}
    source = open_source(task, corpus)
    units = source.units()
    output = options.train_vocabulary
    wanted = ".txt" if task.vocabulary == "words" else ".model"
    if not output.endswith(wanted):
        raise UserError(f"--train_vocabulary={output}: {task.name} makes a file that ends in {wanted}")
    with progress_bar() as progress:
        if task.vocabulary == "words":
            refuse_existing(output, options.overwrite)
            words = pool.counted_vocabulary(task, source, units, options.workers, progress)
            files.write_bytes(output, words.content())
        else:
            train_sentencepiece(
                pool.training_texts(source, units, progress), options.size, output, overwrite=options.overwrite
            )
    print(f"{output}: {vocabulary(output).size:,} entries from {options.task}; use it with --vocabulary={output}")


@contextmanager
def progress_bar():
    """A bar on the terminal, moved by calls of progress(step, done, of, tokens)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console, rows = Console(stderr=True), {}
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def progress(step: str, done: int, of: int, tokens: int) -> None:
        bar.start()
        if step not in rows:
            rows[step] = bar.add_task(step, total=of)
        bar.update(rows[step], completed=done, description=f"{step}, {tokens:,} tokens" if tokens else step)

    try:
        yield progress
    except KeyboardInterrupt:
        print("stopped: the same command goes on where it was", file=sys.stderr)
        raise
    finally:
        if rows:
            bar.stop()


if __name__ == "__main__":
    run_command(main)
