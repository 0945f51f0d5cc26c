"""The corpora as seqio Tasks and Mixtures: the one place that knows TensorFlow.

`prepare` reads the sources itself, in many processes without TensorFlow; here are the same documents and the same
tokens for whatever is built on seqio, from the raw corpus or from a store.
"""

from collections.abc import Callable, Iterator, Mapping

from block_recurrent.data.documents import SPLITS, Dropped, Source, labels_of
from block_recurrent.data.registry import TASKS
from block_recurrent.data.store import Store, form, is_store, open_store, task_store
from block_recurrent.data.vocabulary import Vocabulary
from block_recurrent.errors import UserError
from block_recurrent.quiet import import_tensorflow, quiet_stderr

tf = import_tensorflow()
with quiet_stderr():
    import seqio

NO_TASK = "seqio's Tasks are made of text to predict, not of labels, images or music: RowStream reads its store"


def register(name: str, source: Source, vocabulary: Vocabulary) -> seqio.Task:
    """A Task over a raw corpus, its examples whole documents: name, text, targets.

    Where the corpus has no splits of its own, all documents are in "train": a store is what chooses them.
    """
    if not vocabulary.is_text or labels_of(source):
        raise UserError(f"{name}: {NO_TASK}")
    if hasattr(source, "fragments"):
        raise UserError(f"{name}: its documents are scattered over tables: prepare a store, and register that")
    units = source.units()

    def documents(split: str) -> Iterator[dict]:
        for unit in units:
            if (unit.split or "train") == split:
                for document in source.read(unit, Dropped()):
                    yield {"name": document.name, "text": document.text}

    text = tf.TensorSpec((), tf.string)
    preprocessors = [
        lambda dataset: dataset.map(lambda example: {**example, "targets": example["text"]}),
        seqio.preprocessors.tokenize,
    ]
    splits = [split for split in SPLITS if any((unit.split or "train") == split for unit in units)]
    return add(name, documents, {"name": text, "text": text}, splits, preprocessors, vocabulary)


def register_store(name: str, store: Store) -> seqio.Task:
    """A Task over a prepared store: name, targets."""
    if reason := refusal(store):
        raise UserError(f"{name}: {reason}")
    # Opened here, not by tf.data's threads: NumPy reads headers by Python's parser, which fails in two threads at once.
    parts = {split: store.split(split) for split in SPLITS if store.has(split)}

    def documents(split: str) -> Iterator[dict]:
        part = parts[split]
        for i, document in enumerate(store.names(split)):
            yield {"name": document, "targets": part.tokens[part.offsets[i] : part.offsets[i + 1]].astype("int32")}

    signature = {"name": tf.TensorSpec((), tf.string), "targets": tf.TensorSpec([None], tf.int32)}
    return add(name, documents, signature, list(parts), [], store.vocabulary)


def refusal(store: Store) -> str | None:
    """Why a store cannot be a Task; None where it can."""
    return None if form(store.manifest) == (None, None) and store.vocabulary.is_text else NO_TASK


def register_prepared(folder: str = "data") -> list[str]:
    """Registers every store of text below a folder that `prepare` made under its task's name: `data/pg19_bytes`, ..."""
    places = {name: place for name in TASKS if is_store(place := task_store(name, folder))}
    stores = {name: store for name, place in places.items() if not refusal(store := open_store(place))}
    for name, store in stores.items():
        register_store(name, store)
    return list(stores)


def add(
    name: str,
    documents: Callable[[str], Iterator[dict]],
    signature: dict,
    splits: list[str],
    preprocessors: list,
    vocabulary: Vocabulary,
) -> seqio.Task:
    def examples(split: str, shuffle_files: bool = False, seed: int | None = None) -> tf.data.Dataset:
        del shuffle_files, seed  # the row stream shuffles whole documents, reproducibly
        return tf.data.Dataset.from_generator(lambda: documents(split), output_signature=signature)

    seqio.TaskRegistry.remove(name)
    return seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(examples, splits=splits),
        preprocessors=preprocessors,
        output_features={"targets": seqio.Feature(vocabulary.as_seqio(), add_eos=False)},
    )


def register_mixture(name: str, stores: Mapping[str, tuple[Store, float]]) -> seqio.Mixture:
    """A Mixture of stores with rates, each also a Task of its own; seqio refuses different vocabularies."""
    for task, (store, _) in stores.items():
        register_store(task, store)
    seqio.MixtureRegistry.remove(name)
    try:
        return seqio.MixtureRegistry.add(name, [(task, rate) for task, (_, rate) in stores.items()])
    except ValueError as error:
        raise UserError(f"these stores cannot be mixed: {error}") from error
