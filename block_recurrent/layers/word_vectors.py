"""Embeddings that begin as vectors somebody else has trained: GloVe and other files of its form."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import Initializer

from block_recurrent.errors import UserError
from block_recurrent.layers.parameters import uniform


def word_vectors(file: str | None, store: str, limit: float = 0.05) -> Initializer:
    """An embedding [v d] with the vectors of `file` for the words that it has, others uniform between +-`limit`.

    `file` has a word and d numbers in each line (glove.840B.300d.txt), or is None; the `store` of the data has its
    vocabulary, a word in each line of vocabulary.txt. Read when parameters are made: a finished run needs neither.
    """

    def init(key: jax.Array, shape: tuple[int, int], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        drawn = uniform(limit)(key, shape, dtype)
        if file is None:
            return drawn
        logging.getLogger("jax._src.callback").setLevel(logging.CRITICAL)  # the trainer tells in one line what is wrong
        known = (jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:1], jnp.bool_))
        vectors, found = jax.pure_callback(lambda: read_vectors(file, f"{store}/vocabulary.txt", *shape), known)
        return jnp.where(found[:, None], vectors.astype(dtype), drawn)

    return init


def read_vectors(file: str, words: str, count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The vectors [count width] of a list of words, and which of them the file has [count]."""
    for place in (file, words):
        if not Path(place).is_file():
            raise UserError(f"there is no {place}, which the embedding begins with")
    places = {word: at for at, word in enumerate(Path(words).read_bytes().splitlines()[:count])}
    vectors, found = np.zeros((count, width), np.float32), np.zeros(count, bool)
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            word, *numbers = line.rstrip().rsplit(b" ", width)
            at = places.get(word)
            if at is None:
                continue
            try:
                vectors[at], found[at] = np.array(numbers, np.float32), True
            except ValueError as error:
                raise UserError(f"{file}, line {number}: not a word and {width} numbers") from error
    if not found.any():
        raise UserError(f"{file} has none of the words of {words} with {width} numbers: is it of another width?")
    return vectors, found
