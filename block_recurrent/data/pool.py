"""Building a store on this machine: the steps of building.py on a pool of processes, resumable, atomic at the end."""

import contextlib
import functools
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any

from block_recurrent.data import building, files
from block_recurrent.data.building import Recipe
from block_recurrent.data.documents import Dropped, Source, Unit
from block_recurrent.data.registry import Task
from block_recurrent.data.store import MANIFEST, Store, store_in
from block_recurrent.data.train_vocabulary import count_words, word_vocabulary
from block_recurrent.data.vocabulary import WordVocabulary
from block_recurrent.errors import UserError

NOTE = "fingerprint"  # the file of a work folder that says whose it is
Progress = Callable[[str, int, int, int], None]  # what is being done, of how many, and tokens so far


def silent(step: str, done: int, of: int, tokens: int) -> None:
    """Tells nobody."""


def run(function: Callable, shared: Any, items: Sequence, workers: int) -> Iterator[Any]:
    """The results of function(shared, item) in any order, by worker processes or, where one is enough, here."""
    if workers == 1 or len(items) < 2:
        yield from (function(shared, item) for item in items)
        return
    # Processes that begin afresh hold no lock and no thread of this one; `shared` goes to each of them once.
    fresh = get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(items)), fresh, start_worker, (function, shared)) as pool:
        try:
            with interrupts_held():  # which workers inherit: they leave Ctrl-C to this process from their first moment
                futures = [pool.submit(work_on, item) for item in items]
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker died, perhaps for lack of memory: the same command goes on; try fewer --workers"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for (
                worker
            ) in active_children():  # else leaving waits for what they are at; its files are whole or not there
                worker.terminate()
            raise


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(function: Callable, shared: Any) -> None:
    """A worker does not outlive its parent, however that one ends."""
    global work_on_item
    work_on_item = functools.partial(function, shared)

    def follow_parent():
        parent_process().join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()


def work_on(item: Any) -> Any:
    return work_on_item(item)


def build(recipe: Recipe, about: dict[str, Any], output: str, workers: int, progress: Progress = silent) -> Store:
    """Builds the store of a recipe whose work folder is locked, and moves it to `output`."""

    def step(name: str, function: Callable, items: Sequence) -> None:
        tokens = 0
        progress(name, 0, len(items), tokens)
        for done, count in enumerate(run(function, recipe, items, workers), 1):
            tokens += count or 0
            progress(name, done, len(items), tokens)

    if recipe.scattered:
        step("gathering", building.scatter_unit, range(len(recipe.units)))
    step("reading", building.read_unit, range(recipe.pieces))
    settled = building.settle(recipe)
    step("writing", building.write_shard, [shard for shards in settled.shards.values() for shard in shards])
    try:
        building.finish(recipe, settled, about)
    except UserError:  # an empty corpus: nothing to go on with
        remove(recipe.work)
        raise
    publish(recipe, output)
    return store_in(output)


def publish(recipe: Recipe, output: str) -> None:
    """Puts a finished store in its place, which until then holds what it held, and clears the work folder away."""
    if recipe.target != output and files.is_remote(output):
        upload(recipe.target, output)
    elif recipe.target != output:
        rename(Path(recipe.target), Path(output).absolute())
    remove(recipe.work)


def rename(store: Path, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = store.parent
    if aside.stat().st_dev != output.parent.stat().st_dev:  # a work folder on another disk: renaming does not reach it
        aside = arrival(output)
        remove(str(aside))
        shutil.copytree(store, aside / store.name)
    if output.exists():
        output.rename(aside / "replaced")
    (aside / store.name).rename(output)
    if aside != store.parent:
        remove(str(aside))


def arrival(output: Path) -> Path:
    """Where a store from another disk is copied to, before it takes its place."""
    return output.with_name(f".{output.name}.arriving")


def remove(folder: str) -> None:
    if files.is_remote(folder):
        system, path = files.file_system(folder)
        system.rm(path, recursive=True)
        return
    # What says that this is a work folder goes last: a kill in between leaves one that the next command knows.
    for name in sorted(os.listdir(folder) if Path(folder).is_dir() else [], key=lambda name: name == NOTE):
        entry = Path(folder, name)
        shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def upload(folder: str, output: str) -> None:
    """Copies a store to a bucket, its manifest last; what an older store of that name had more is removed."""
    system, root = files.file_system(output)
    manifest = files.join(root, MANIFEST)
    if system.exists(manifest):
        system.rm(manifest)
    names = sorted(os.listdir(folder), key=lambda name: name == MANIFEST)
    for name in names:
        system.put_file(str(Path(folder, name)), files.join(root, name))
    for file in files.listing(output):
        if file.relative not in names:
            system.rm(files.join(root, file.relative))


@contextlib.contextmanager
def work_folder(work: str | None, output: str, recipe_hash: str) -> Iterator[str]:
    """The folder where a store comes together, kept when killed and used again for the same recipe.

    By default it is a hidden one beside the store. In a bucket it is one of the recipe's own, for nothing is locked
    there.
    """
    if work is not None and files.is_remote(work):
        yield files.join(work, recipe_hash[:16])
        return
    folder = local_work_folder(work, output)
    if folder.exists() and any(folder.iterdir()) and not any((folder / name).exists() for name in ("lock", NOTE)):
        raise UserError(f"{folder} exists and is no work folder: choose another --work")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder) as is_mine:
        if not is_mine:
            raise UserError(f"{output} is being prepared by another process: wait for it")
        note = folder / NOTE
        if not note.exists() or note.read_text() != recipe_hash:
            for entry in folder.iterdir():
                if entry.name != "lock":
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            note.write_text(recipe_hash)
        for leftover in folder.rglob(".*.partial"):  # files that a killed process did not complete
            leftover.unlink()
        yield str(folder)


def local_work_folder(work: str | None, output: str) -> Path:
    place = Path("data" if files.is_remote(output) else output).absolute()
    return Path(work) if work else place.parent / f".{output.rstrip('/').rpartition('/')[2]}.partial"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Whether a work folder is this process's alone."""
    import fcntl

    with open(folder / "lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def remove_leftover(work: str | None, output: str, recipe_hash: str) -> None:
    """Clears away the work folder of a store that is in its place, where a kill has left it."""
    if files.is_remote(work or ""):
        folder = files.join(work, recipe_hash[:16])
        if files.is_folder(folder):
            remove(folder)
        return
    folder = local_work_folder(work, output)
    note = folder / NOTE
    if note.is_file() and fingerprint_of(note.read_text()) == fingerprint_of(recipe_hash):
        with locked(folder) as is_mine:
            if is_mine:
                remove(str(folder))
                remove(str(arrival(Path(output).absolute())))


def fingerprint_of(recipe_hash: str) -> str:
    """What a recipe's hash says of the corpus, whichever version of the steps it is for."""
    return recipe_hash.rpartition("-")[2]


def counted_vocabulary(
    task: Task, source: Source, units: Sequence[Unit], workers: int, progress: Progress = silent
) -> WordVocabulary:
    """The words of a task's training text."""
    training = [(source, unit) for unit in units if unit.split in (None, "train")]
    counts = Counter()
    progress("counting words", 0, len(training), 0)
    for done, found in enumerate(run(words_of_unit, task.lines, training, workers), 1):
        counts.update(found)
        progress("counting words", done, len(training), counts.total())
    return word_vocabulary(counts, task.minimum, task.unknown)


def words_of_unit(lines: str, unit: tuple[Source, Unit]) -> Counter:
    return count_words(texts_of(*unit), lines)


def training_texts(source: Source, units: Iterable[Unit], progress: Progress = silent) -> Iterator[bytes]:
    """The texts that a vocabulary may be trained on: those of train, or all where splits are not chosen yet."""
    training = [unit for unit in units if unit.split in (None, "train")]
    for done, unit in enumerate(training, 1):
        yield from texts_of(source, unit)
        progress("reading", done, len(training), 0)


def texts_of(source: Source, unit: Unit) -> Iterator[bytes]:
    dropped = Dropped()
    if hasattr(source, "fragments"):
        documents = (source.join(name, [fragment], dropped) for name, fragment in source.fragments(unit, dropped))
    else:
        documents = source.read(unit, dropped)
    return (document.text for document in documents if document is not None and document.split in (None, "train"))
