"""Heads of music and of labels: their losses from the equations, and what is refused."""

import jax
import numpy as np
import pytest
from flax import linen as nn

from block_recurrent.errors import UserError
from block_recurrent.layers.language_model import LanguageModel
from block_recurrent.layers.signal_heads import Classifier, Notes
from block_recurrent.layers.stack import stack
from block_recurrent.layers.word_vectors import read_vectors, word_vectors
from block_recurrent.training.optimizers import adam, constant
from block_recurrent.training.sharding import make_mesh
from block_recurrent.training.step import Trainer
from models.rnn import RNNLayer
from tests.layers.test_heads import LENGTH, ROWS, Widen

KEYS, CLASSES = 19, 4
NO_START = np.zeros((ROWS, LENGTH), bool)


def model(head, vocabulary, dim=6, **options):
    return LanguageModel(vocabulary, dim, Widen(), head=head, **options)


@pytest.fixture(scope="module")
def frames():
    return np.random.default_rng(0).integers(0, 256, (ROWS, LENGTH + 1, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def pixels():
    return np.random.default_rng(0).integers(0, 256, (ROWS, LENGTH))


@pytest.mark.parametrize("chunk", [4, LENGTH])
def test_a_frame_costs_the_nats_of_all_its_keys(frames, chunk):
    """- sum_k y log p + (1 - y) log (1 - p), as the authors of the R-Transformer and of TCN count it."""
    notes = model(Notes(keys=KEYS), KEYS, loss_chunk=chunk)
    inputs, targets = frames[:, :-1], frames[:, 1:]
    params = notes.init(jax.random.key(0), inputs, (), NO_START)
    losses, _ = notes.apply(params, inputs, targets, (), NO_START, method="losses")
    logits, _ = notes.apply(params, inputs, (), NO_START)
    assert logits.shape == (ROWS, LENGTH, KEYS)
    probability = 1.0 / (1.0 + np.exp(-np.asarray(logits, np.float64)))
    down = np.unpackbits(targets, axis=-1)[..., :KEYS]
    expected = -np.sum(down * np.log(probability) + (1 - down) * np.log(1 - probability), axis=-1)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_bits_beyond_the_keys_do_not_matter(frames):
    notes = model(Notes(keys=KEYS), KEYS)
    cleared = frames.copy()
    cleared[..., -1] &= 0b11100000  # of 24 bits 19 are keys
    assert np.any(cleared != frames)
    params = notes.init(jax.random.key(0), frames[:, :-1], (), NO_START)
    found = [
        notes.apply(params, some[:, :-1], some[:, 1:], (), NO_START, method="losses")[0] for some in (frames, cleared)
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("of_pixels", [True, False])
def test_a_label_costs_its_cross_entropy_and_the_likeliest_is_a_hit(pixels, of_pixels):
    classifier = model(Classifier(classes=CLASSES, pixels=of_pixels), 256)
    labels = np.random.default_rng(1).integers(0, CLASSES, (ROWS, LENGTH))
    params = classifier.init(jax.random.key(0), pixels, (), NO_START)
    (losses, hits), _ = classifier.apply(params, pixels, labels, (), NO_START, method="losses_and_hits")
    logits = np.asarray(classifier.apply(params, pixels, (), NO_START)[0], np.float64)
    assert logits.shape == (ROWS, LENGTH, CLASSES)
    chosen = np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(losses, np.log(np.sum(np.exp(logits), axis=-1)) - chosen, rtol=1e-5)
    np.testing.assert_array_equal(hits, np.argmax(logits, axis=-1) == labels)
    assert 0 < np.sum(hits) < hits.size
    trained, _ = classifier.apply(params, pixels, labels, (), NO_START, method="losses")
    np.testing.assert_allclose(trained, losses, rtol=1e-6)


@pytest.mark.parametrize(
    ("head", "vocabulary", "told"),
    [
        (Notes(keys=88), 80, "vocabulary_size is 80, its head has 88 keys"),
        (Notes(keys=88, projected=False), 88, "88 numbers as they are make vectors of 88: the model's dim is 6"),
        (Classifier(classes=2, pixels=True, projected=False), 256, "1 numbers as they are"),
    ],
)
def test_widths_that_do_not_agree_are_told(head, vocabulary, told):
    wrong = model(head, vocabulary)
    with pytest.raises(UserError, match=told):
        wrong.init(jax.random.key(0), wrong.blank(1, 2), (), np.zeros((1, 2), bool))


WORDS = b"<unk>\ngood\nbad\nfilm\n"


def vectors_file(folder, text):
    (folder / "vocabulary.txt").write_bytes(WORDS)
    (folder / "vectors.txt").write_bytes(text)
    return word_vectors(str(folder / "vectors.txt"), str(folder), limit=0.05)


def test_words_begin_as_the_vectors_of_a_file_and_others_at_random(tmp_path):
    init = vectors_file(tmp_path, b"film 1 2 3\nunknown 4 5 6\n. . . 9 9 9\ngood -1 0.5 2e-1\n")
    table = np.asarray(jax.jit(lambda key: init(key, (4, 3)))(jax.random.key(0)))
    np.testing.assert_allclose(table[[1, 3]], [[-1, 0.5, 0.2], [1, 2, 3]])
    assert np.all(np.abs(table[[0, 2]]) <= 0.05) and np.all(table[[0, 2]] != 0.0)
    expected = np.asarray(word_vectors(None, "nowhere")(jax.random.key(0), (4, 3)))
    np.testing.assert_array_equal(table[[0, 2]], expected[[0, 2]])


def test_vectors_of_another_width_and_missing_files_are_told(tmp_path):
    vectors_file(tmp_path, b"good 1 2\n")
    with pytest.raises(UserError, match=r"vectors.txt, line 1: not a word and 3 numbers"):
        read_vectors(str(tmp_path / "vectors.txt"), str(tmp_path / "vocabulary.txt"), 4, 3)
    with pytest.raises(UserError, match=r"there is no .*nowhere"):
        read_vectors(str(tmp_path / "nowhere"), str(tmp_path / "vocabulary.txt"), 4, 3)


def test_a_file_of_another_width_has_none_of_the_words(tmp_path):
    vectors_file(tmp_path, b"good 1 2 3 4 5\nfilm 1 2 3 4 5\n")
    with pytest.raises(UserError, match="none of the words"):
        read_vectors(str(tmp_path / "vectors.txt"), str(tmp_path / "vocabulary.txt"), 4, 3)


def test_a_trainer_tells_of_a_missing_file_in_one_line():
    init = word_vectors("nowhere.txt", "nowhere")
    classifier = LanguageModel(9, 6, stack([RNNLayer(6, 6)]), head=Classifier(), embedding_init=init)
    trainer = Trainer(classifier, adam(constant(0.1)), make_mesh(), 1)
    with pytest.raises(UserError, match=r"^there is no nowhere.txt, which the embedding begins with$"):
        trainer.init(0)


def test_every_parameter_names_its_axes():
    for head, vocabulary in ((Notes(keys=KEYS), KEYS), (Classifier(classes=3, pixels=True), 256)):
        one = model(head, vocabulary)
        boxed = jax.eval_shape(one.init, jax.random.key(0), one.blank(1, 2), (), np.zeros((1, 2), bool))["params"]
        for leaf in jax.tree.leaves({**boxed, "stack": {}}, is_leaf=lambda p: isinstance(p, nn.Partitioned)):
            assert isinstance(leaf, nn.Partitioned) and len(leaf.names) == leaf.value.ndim
