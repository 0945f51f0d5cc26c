"""Vocabularies of what is no text: the pixels of an image, and the frames of a piece of music.

They have what those of text have (vocabulary.py), but for the way back to text. A pixel is a token. A frame is a
record: the 88 keys of a piano, down or up, as bits in 11 bytes.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from block_recurrent.errors import UserError

SHADES = " .:-=+*#%@"  # from 0 to 255
LOWEST = 21  # the MIDI number of a piano's first key, A0
OCTAVE = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")


class Signal:
    """What they have in common."""

    kind: str
    is_text = False
    separator = None
    unknown = None

    def token_bytes(self, token: int) -> bytes:
        raise UserError(f"{self.kind} are not text")

    def decode(self, tokens: Sequence[int]) -> str:
        raise UserError(f"{self.kind} are not text")

    def as_seqio(self):
        raise UserError(f"{self.kind} are not text: seqio has no vocabulary for them")

    def save(self, folder: str | Path) -> None:
        """They need no file."""


class PixelVocabulary(Signal):
    """Grey values: a token is a byte as it is, for 0 is a colour like any other."""

    kind = "pixels"
    size = 256
    record = None
    positions = "pixels"
    identity = hashlib.sha256(b"pixels").hexdigest()

    def encode(self, image: bytes) -> np.ndarray:
        return np.frombuffer(image, np.uint8).astype(np.int32)

    def drawn(self, pixels: np.ndarray) -> Iterator[str]:
        """An image in lines of characters; one that is not square in one line."""
        side = math.isqrt(len(pixels))
        width = side if side * side == len(pixels) else len(pixels)
        for row in np.reshape(pixels, (-1, max(width, 1))):
            yield "".join(SHADES[min(int(pixel), 255) * len(SHADES) // 256] for pixel in row).rstrip()


class NoteVocabulary(Signal):
    """Frames of a piano roll: `size` keys that are each down or up, `record` bytes, the first key the highest bit."""

    kind = "notes"
    size = 88
    record = 11
    positions = "frames"
    identity = hashlib.sha256(b"notes 88").hexdigest()

    def encode(self, song: bytes) -> np.ndarray:
        """The frames of a song [frames record]."""
        if len(song) % self.record:
            raise UserError(f"{len(song)} bytes are no frames of {self.record}")
        return np.frombuffer(song, np.uint8).reshape(-1, self.record)

    def drawn(self, frames: np.ndarray, first: int = 0) -> Iterator[str]:
        """A line for each frame: its number and the keys that are down."""
        for number, keys in enumerate(np.unpackbits(frames, axis=1), first):
            yield f"{number:6}  {' '.join(map(key_name, np.flatnonzero(keys))) or '-'}"


def key_name(key: int) -> str:
    """Of a piano's key, counted from 0: A0 to C8."""
    octave, step = divmod(int(key) + LOWEST, len(OCTAVE))
    return f"{OCTAVE[step]}{octave - 1}"


SIGNALS = {signal.kind: signal for signal in (PixelVocabulary, NoteVocabulary)}
