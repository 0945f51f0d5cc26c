"""A word vocabulary as seqio sees it; this loads TensorFlow."""

from collections.abc import Iterable, Sequence

from block_recurrent.quiet import import_tensorflow, quiet_stderr

tf = import_tensorflow()
with quiet_stderr():
    import seqio


class SeqioWords(seqio.Vocabulary):
    """The same ids in Python and in tf.data. seqio pads with 0, which is a word here: use its weights."""

    def __init__(self, words):
        super().__init__()
        self.words = words

    bos_id = eos_id = None  # `<eos>` ends a line, and seqio's decode would stop at the first

    @property
    def unk_id(self) -> int | None:
        return self.words.ids.unknown

    @property
    def _base_vocab_size(self) -> int:
        return self.words.size

    def _encode(self, s: str) -> Sequence[int]:
        return self.words.encode(s.encode()).tolist()

    def _decode(self, ids: Iterable[int]) -> str:
        return self.words.decode(ids)

    def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
        ids = tf.numpy_function(self.words.encode, [s], tf.int32, stateful=False)
        return tf.ensure_shape(ids, [None])

    def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
        text = tf.numpy_function(lambda row: self.words.decode(row).encode(), [ids], tf.string, stateful=False)
        return tf.ensure_shape(text, [])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeqioWords) and self.words.identity == other.words.identity
