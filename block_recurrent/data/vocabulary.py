"""Text to tokens and back without TensorFlow, so that generating from a checkpoint starts at once.

Every vocabulary here takes UTF-8 bytes; signals.py has those of what is no text. Nothing here needs an id for padding:
rows are padded by weight, not by id, so that a vocabulary of words has the size that its paper gives.
"""

import hashlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np

from block_recurrent.data import files
from block_recurrent.data.signals import SIGNALS, NoteVocabulary, PixelVocabulary
from block_recurrent.errors import UserError


class Text:
    """What vocabularies of text have in common."""

    is_text = True
    record = None  # numbers of a position, where it is not one token
    positions = "tokens"  # what a document is counted in


class ByteVocabulary(Text):
    """Bytes, valid UTF-8 or not, shifted by the three special ids of seqio's ByteVocabulary (padding, end, unknown)."""

    kind = "bytes"
    specials = 3
    size = 256 + specials
    separator = 1  # the id that may end a document: seqio's end
    unknown = None  # the id for what the vocabulary does not have
    identity = hashlib.sha256(b"bytes+3").hexdigest()

    def encode(self, text: bytes) -> np.ndarray:
        return np.add(np.frombuffer(text, np.uint8), self.specials, dtype=np.int32)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token - self.specials]) if self.specials <= token < self.size else b""

    def decode(self, tokens: Sequence[int]) -> str:
        tokens = np.asarray(tokens, np.int64)
        tokens = tokens[(tokens >= self.specials) & (tokens < self.size)] - self.specials
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")

    def as_seqio(self):
        import seqio

        return seqio.ByteVocabulary()

    def save(self, folder: str | Path) -> None:
        """Bytes need no file."""


BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes one, and why it cannot tell this character from one
LONG = 1 << 16  # bytes; a longer text is encoded in stretches
SINGLE_BLANK = re.compile(rb"\S \S")
CONTEXT = 32  # bytes around a cut in which normalisation is tried


class SentencePieceVocabulary(Text):
    """A SentencePiece model, from a file here or in a bucket."""

    kind = "sentencepiece"
    file_name = "vocabulary.model"

    def __init__(self, path: str | Path):
        import sentencepiece

        self.path = str(path)
        self.model = files.read_bytes(self.path)
        if not self.model:
            raise UserError(f"{path} cannot be read as a SentencePiece model: it is empty")
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=self.model)
        except RuntimeError as error:
            raise UserError(f"{path} cannot be read as a SentencePiece model: {error}") from error
        self.size = self.processor.get_piece_size()
        self.identity = hashlib.sha256(self.model).hexdigest()

    @property
    def separator(self) -> int | None:
        """The id that may end a document; PG19's models have none."""
        end = self.processor.eos_id()
        return end if end >= 0 else None

    @property
    def unknown(self) -> int:
        return self.processor.unk_id()

    def encode(self, text: bytes) -> np.ndarray:
        """The ids; bytes that are not UTF-8 become U+FFFD first."""
        parts = map(self.processor.encode_as_numpy, self.stretches(text))
        return np.concatenate(list(parts))

    def stretches(self, text: bytes) -> Iterator[bytes]:
        """A text in stretches that have, one after another, the very ids of the whole."""
        start = position = 0
        while len(text) > start + LONG and self.cuttable:
            found = SINGLE_BLANK.search(text, max(position, start + LONG))
            if not found:
                break
            position = found.start() + 1
            left, right = max(start, position - CONTEXT), position + 1 + CONTEXT
            if self.may_cut(text[left:position], text[position + 1 : right]):
                yield text[start:position]
                start = position + self.prefixes  # a model that begins every text with a blank puts this one back
        yield text[start:]

    @cached_property
    def prefixes(self) -> bool:
        """Whether the model puts a blank before every text."""
        return self.processor.normalize("a b") == f"{BLANK}a{BLANK}b"

    @cached_property
    def cuttable(self) -> bool:
        """Whether a text may be cut before a blank: in BPE, where no piece reaches over one from what is before it.

        BPE holds a queue over the whole text, of some 40 bytes a byte, and slows down as it grows. Unigram models read
        a long text in one go, as seqio does: they add up scores in float32 along it, so that even their rounding, and
        with it a few ids, depend on where a text begins.
        """
        from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec

        model = ModelProto.FromString(self.model)
        return (
            model.trainer_spec.model_type == TrainerSpec.BPE
            and not any(re.search(f"[^{BLANK} ][{BLANK} ]", piece.piece) for piece in model.pieces)
            and not self.processor.is_unknown(self.processor.piece_to_id(BLANK))
            and self.may_cut(b"a", b"b")
        )

    def may_cut(self, left: bytes, right: bytes) -> bool:
        """Whether normalisation, too, sees nothing across a blank (it joins accents, for one)."""
        left, right = left.decode(errors="ignore"), right.decode(errors="ignore")
        normalize = self.processor.normalize
        before, after = normalize(left), normalize(right if self.prefixes else " " + right)
        whole = before + after == normalize(f"{left} {right}")
        return whole and not before.endswith(BLANK) and after.startswith(BLANK)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for in the middle of a text."""
        processor = self.processor
        if processor.is_control(token) or processor.is_unknown(token) or processor.is_unused(token):
            return b""
        piece = processor.id_to_piece(token)
        if processor.is_byte(token):
            return bytes([int(piece[3:-1], 16)])  # "<0x0A>"
        return piece.replace(BLANK, " ").encode()

    def decode(self, tokens: Sequence[int]) -> str:
        return self.processor.decode(np.asarray(tokens, np.int64).tolist())

    def as_seqio(self):
        import seqio

        if not files.is_remote(self.path):
            return seqio.SentencePieceVocabulary(self.path)
        with tempfile.TemporaryDirectory() as folder:  # TensorFlow opens fewer addresses than fsspec
            self.save(folder)
            theirs = seqio.SentencePieceVocabulary(str(Path(folder, self.file_name)))
            theirs.load_model()
        return theirs

    def save(self, folder: str | Path) -> None:
        files.write_bytes(files.join(str(folder), self.file_name), self.model)


UNKNOWN = (b"<unk>", b"<UNK>")
LINE_ENDS = {"eos": b"<eos>", "sentences": b"<S>", "spelt": b"< e o s >"}
WHITE = re.compile(rb"[ \n]")
BLOCK = 1 << 20  # bytes of text whose words are in memory at a time


class WordIds(dict):
    """Word to id, and any other word to the id of the unknown word."""

    unknown: int | None = None

    def __missing__(self, word: bytes) -> int:
        if self.unknown is None:
            raise UserError(
                f"{word.decode(errors='replace')!r} is not in the vocabulary, which has no <unk> or <UNK> for it"
            )
        return self.unknown


class WordVocabulary(Text):
    """Words between blanks, in the order of their ids, the most frequent first as adaptive layers expect.

    A line's end is a word too, and which one says how lines are read: "eos", one `<eos>` after each (Penn Treebank,
    WikiText), or "sentences", `<S>` before the first and after each (Billion Word). Transformer-XL and SRU++ put it on
    both sides of each sentence but never ask for the second of two: inputs and targets are the same. A last line
    without a newline is not ended, so that a prompt can be gone on from. Of single characters, `_` a blank, it may be
    five words, "spelt".
    """

    kind = "words"
    file_name = "vocabulary.txt"

    def __init__(self, words: Iterable[bytes], place: str = "the word list"):
        self.words = list(words)
        self.size = len(self.words)
        self.ids = WordIds(zip(self.words, range(self.size), strict=True))
        self.line_ends = next((style for style, word in LINE_ENDS.items() if word in self.ids), None)
        if self.line_ends is None and is_spelt(self.words):
            self.line_ends = "spelt"
        if self.line_ends is None:
            raise UserError(f"{place} has neither <eos> nor <S> to end a line with")
        for number, word in enumerate(self.words, 1):
            if word.split() != [word]:
                raise UserError(f"{place}: line {number} is not one word: {word.decode(errors='replace')!r}")
            if self.ids[word] != number - 1:
                raise UserError(f"{place} has {word.decode(errors='replace')!r} twice")
        self.newline = [self.ids[word] for word in LINE_ENDS[self.line_ends].split()]
        self.separator = self.newline[0] if len(self.newline) == 1 else None
        self.ids.unknown = next((self.ids[word] for word in UNKNOWN if word in self.ids), None)

    @property
    def unknown(self) -> int | None:
        return self.ids.unknown

    @cached_property
    def identity(self) -> str:
        return hashlib.sha256(self.content()).hexdigest()

    def encode(self, text: bytes) -> np.ndarray:
        words = chain.from_iterable(word_blocks(text, self.line_ends))
        return np.fromiter(map(self.ids.__getitem__, words), np.int32)

    def token_bytes(self, token: int) -> bytes:
        """A word with the blank before it, as in SentencePiece, or a newline."""
        if token == self.separator:
            return b"\n"
        return b" " + self.words[token] if token < self.size else b""

    def decode(self, tokens: Sequence[int]) -> str:
        text = b"".join(self.token_bytes(int(token)) for token in tokens).replace(b"\n ", b"\n")
        if self.line_ends == "sentences":
            text = text.removeprefix(b"\n")
        return text.removeprefix(b" ").decode(errors="replace")

    def as_seqio(self):
        from block_recurrent.data.seqio_words import SeqioWords

        return SeqioWords(self)

    def content(self) -> bytes:
        return b"".join(word + b"\n" for word in self.words)

    def save(self, folder: str | Path) -> None:
        files.write_bytes(files.join(str(folder), self.file_name), self.content())


def is_spelt(words: Sequence[bytes]) -> bool:
    """Whether words are single characters that can spell the end of a line, and `_` for a blank."""
    single = all(len(word.decode(errors="replace")) == 1 for word in words)
    return single and {b"_", *LINE_ENDS["spelt"].split()} <= set(words)


def word_blocks(text: bytes, line_ends: str) -> Iterator[list[bytes]]:
    """The words of a text, line ends among them, as many at a time as a block has."""
    word = LINE_ENDS[line_ends]
    newline = b" " + word + b" "
    start = 0
    while start < len(text):
        cut = WHITE.search(text, start + BLOCK)
        end = cut.end() if cut else len(text)
        words = text[start:end].replace(b"\n", newline).split()
        if line_ends == "sentences" and start == 0:
            words.insert(0, word)
        yield words
        start = end


Vocabulary = ByteVocabulary | SentencePieceVocabulary | WordVocabulary | PixelVocabulary | NoteVocabulary


def vocabulary(name: str | Path) -> Vocabulary:
    """ "bytes", or the path or address of a SentencePiece model or of a list of words (.txt)."""
    name = str(name)
    if name == ByteVocabulary.kind:
        return ByteVocabulary()
    if name.endswith(".txt"):
        return WordVocabulary(files.read_bytes(name).splitlines(), name)
    return SentencePieceVocabulary(name)


def record_of(kind: str) -> int | None:
    """How many numbers a position has in the vocabularies of a kind; None where it is one token."""
    return SIGNALS[kind].record if kind in SIGNALS else None


def saved_vocabulary(about: dict, folder: str | Path) -> Vocabulary:
    """The vocabulary that `save` left in a folder, once it is the one that the folder's notes are `about`."""
    for saved in (ByteVocabulary, SentencePieceVocabulary, WordVocabulary, *SIGNALS.values()):
        if about["kind"] == saved.kind:
            name = files.join(str(folder), saved.file_name) if hasattr(saved, "file_name") else saved.kind
            found = saved() if saved.kind in SIGNALS else vocabulary(name)
            if found.identity != about["sha256"]:
                raise UserError(f"{name} is not the vocabulary that {folder} was made with: restore it")
            return found
    raise UserError(f"{folder} has a vocabulary of an unknown kind, {about['kind']!r}: this version is too old for it")
