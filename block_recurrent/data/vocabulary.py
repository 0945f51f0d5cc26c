"""Text to tokens and back without TensorFlow, so that generating from a checkpoint starts at once."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from block_recurrent.errors import UserError


class ByteVocabulary:
    """UTF-8 bytes, shifted by the three special ids of seqio's ByteVocabulary (padding, end, unknown)."""

    kind = "bytes"
    specials = 3
    size = 256 + specials
    identity = hashlib.sha256(b"bytes+3").hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + self.specials

    def token_bytes(self, token: int) -> bytes:
        return bytes([token - self.specials]) if self.specials <= token < self.size else b""

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def as_seqio(self):
        import seqio

        return seqio.ByteVocabulary()

    def save(self, folder: Path) -> None:
        """Bytes need no file."""


class SentencePieceVocabulary:
    """A SentencePiece model file, with id 0 free for padding."""

    kind = "sentencepiece"
    file_name = "vocabulary.model"

    def __init__(self, path: Path):
        import sentencepiece

        try:
            self.model = path.read_bytes()
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=self.model)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path} cannot be read as a SentencePiece model: {error}") from error
        self.path = path
        self.size = self.processor.get_piece_size()
        self.identity = hashlib.sha256(self.model).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self.processor.encode(text), np.int32)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for in the middle of a text."""
        processor = self.processor
        if processor.is_control(token) or processor.is_unknown(token) or processor.is_unused(token):
            return b""
        piece = processor.id_to_piece(token)
        if processor.is_byte(token):
            return bytes([int(piece[3:-1], 16)])  # "<0x0A>"
        return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def decode(self, tokens: Sequence[int]) -> str:
        return self.processor.decode([int(token) for token in tokens])

    def as_seqio(self):
        import seqio

        return seqio.SentencePieceVocabulary(str(self.path))

    def save(self, folder: Path) -> None:
        (folder / self.file_name).write_bytes(self.model)


Vocabulary = ByteVocabulary | SentencePieceVocabulary


def vocabulary(name: str) -> Vocabulary:
    """ "bytes", or the path of a SentencePiece model."""
    return ByteVocabulary() if name == ByteVocabulary.kind else SentencePieceVocabulary(Path(name))


def saved_vocabulary(kind: str, folder: Path) -> Vocabulary:
    """The vocabulary that `save` left in a folder."""
    return (
        ByteVocabulary()
        if kind == ByteVocabulary.kind
        else SentencePieceVocabulary(folder / SentencePieceVocabulary.file_name)
    )
