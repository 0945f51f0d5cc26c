"""seqio Tasks over the sources: the one place that knows TensorFlow."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from block_recurrent.data.sources import Source
from block_recurrent.data.vocabulary import Vocabulary
from block_recurrent.quiet import import_tensorflow, quiet_stderr

tf = import_tensorflow()
with quiet_stderr():
    import seqio


@dataclass(frozen=True)
class TokenisedDocument:
    name: str
    text: bytes
    tokens: np.ndarray  # [length] int32


def register(source: Source, vocabulary: Vocabulary) -> seqio.Task:
    """Registers a source with seqio under its name, its examples whole documents: name, text, targets."""
    seqio.TaskRegistry.remove(source.name)

    def examples(split: str, shuffle_files: bool = False, seed: int | None = None) -> tf.data.Dataset:
        del shuffle_files, seed  # the row stream shuffles whole documents, reproducibly
        text = tf.TensorSpec((), tf.string)
        return tf.data.Dataset.from_generator(
            lambda: ({"name": document.name, "text": document.text()} for document in source.splits[split]),
            output_signature={"name": text, "text": text},
        )

    return seqio.TaskRegistry.add(
        source.name,
        source=seqio.FunctionDataSource(examples, splits=tuple(source.splits)),
        preprocessors=[
            lambda dataset: dataset.map(lambda example: {**example, "targets": example["text"]}),
            seqio.preprocessors.tokenize,
        ],
        output_features={"targets": seqio.Feature(vocabulary.as_seqio(), add_eos=False)},
    )


def tokenised_documents(source: Source, vocabulary: Vocabulary, split: str) -> Iterator[TokenisedDocument]:
    """The documents of a split, in the source's order."""
    for document in source.splits[split]:
        document.text()  # a file that cannot be read is reported here, by name, and not from inside tf.data
    task = register(source, vocabulary)
    for example in task.get_dataset(None, split, shuffle=False).as_numpy_iterator():
        yield TokenisedDocument(example["name"].decode(), example["text"], example["targets"])
