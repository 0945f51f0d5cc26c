"""Tokens of a text that comes in pieces: the same, whatever the pieces.

    encoder = Encoder(vocabulary)
    tokens, sizes = encoder.feed(b"a piece of te")     # sizes: how many bytes of the text each token stands for
    tokens, sizes = encoder.feed(b"xt", last=True)

Bytes are tokens at once. A word waits for the blank after it, and a SentencePiece model reads stretches of 64 KiB that
end before a blank, which only the text itself decides; what is left at the end is read with the `last` piece.
"""

import re

import numpy as np

from block_recurrent.data.vocabulary import (
    CONTEXT,
    LONG,
    SINGLE_BLANK,
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
    WordVocabulary,
)
from block_recurrent.errors import UserError

Tokens = tuple[np.ndarray, np.ndarray]  # ids, and the bytes of the text that each stands for

WORD_OR_NEWLINE = re.compile(rb"[^ \n]\S*|\n")


class Encoder:
    """Holds back the bytes that may belong to a token which has not come to its end."""

    def __init__(self, vocabulary: Vocabulary, held: bytes = b"", begun: bool = False):
        if not vocabulary.is_text:
            raise UserError(f"{vocabulary.kind} are not text")
        self.vocabulary, self.held, self.begun = vocabulary, held, begun

    def feed(self, text: bytes, last: bool = False) -> Tokens:
        """The tokens that are complete with this piece, all with the last one."""
        self.held += text
        found, begin = [(np.zeros(0, np.int32), np.zeros(0, np.int64))], 0
        while (end := self._end(begin, last)) > begin:
            found.append(self._encode(self.held[begin:end]))
            begin, self.begun = end, True
        self.held = self.held[begin:]
        ids, sizes = zip(*found, strict=True)
        return np.concatenate(ids), np.concatenate(sizes)

    def _end(self, begin: int, last: bool) -> int:
        """Where the stretch ends that can be read now; where it begins if there is none."""
        held, vocabulary = self.held, self.vocabulary
        if isinstance(vocabulary, SentencePieceVocabulary):
            for found in SINGLE_BLANK.finditer(held, begin + LONG):
                end = found.start() + 1
                if len(held) <= end + CONTEXT:
                    break
                if vocabulary.may_cut(held[end - CONTEXT : end], held[end + 1 : end + 1 + CONTEXT]):
                    return end
        elif isinstance(vocabulary, WordVocabulary) and not last:
            newline, blank = held.rfind(b"\n", begin), held.rfind(b" ", begin)
            return newline + 1 if newline > blank else begin + len(held[begin : max(blank, begin)].rstrip(b" "))
        return len(held) if last or isinstance(vocabulary, ByteVocabulary) else begin

    def _encode(self, stretch: bytes) -> Tokens:
        vocabulary = self.vocabulary
        if isinstance(vocabulary, ByteVocabulary):
            ids = vocabulary.encode(stretch)
            return ids, np.ones(len(ids), np.int64)
        if isinstance(vocabulary, SentencePieceVocabulary):
            # The model puts back the blank that a stretch begins with, if it is one that begins every text with one.
            dropped = int(self.begun and vocabulary.prefixes)
            pieces = vocabulary.processor.encode(stretch[dropped:], return_type="proto").pieces
            ids, ends = [piece.id for piece in pieces], [piece.end + dropped for piece in pieces]
            ends[-1:] = [len(stretch)]  # also what the model drops
        else:
            ids, ends = [], []
            if vocabulary.line_ends == "sentences" and not self.begun:
                ids, ends = list(vocabulary.newline), [0]
            for word in WORD_OR_NEWLINE.finditer(stretch):
                found = vocabulary.newline if word[0] == b"\n" else [vocabulary.ids[word[0]]]
                ids += found
                ends += [word.end()] * len(found)
        if not ids:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        return np.array(ids, np.int32), np.diff([0, *ends])
