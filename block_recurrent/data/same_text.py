"""When two texts are the same: by a hash that minds no white space."""

import hashlib
import re

import numpy as np

BLANK = np.isin(np.arange(256), list(b" \t\n\r\x0b\f"))
# Unicode's white space of several bytes, and the mark that editors put at the start of a file.
WIDE_BLANK = re.compile(
    rb"\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80|\xef\xbb\xbf"
)
STRETCH = 1 << 20  # bytes that are looked at together


def content_hash(text: bytes, is_text: bool = True) -> bytes:
    """The hash of a text's words with one blank between them, in flat memory; of what is no text, that of its bytes."""
    found, after_blank = hashlib.sha256(), True
    if not is_text:
        found.update(text)
        return found.digest()[:16]
    held_back, end = b"", 0  # a blank that counts once another word comes
    while end < len(text):
        begin, end = end, character_end(text, end + STRETCH)
        stretch = text[begin:end]
        content = np.frombuffer(stretch if stretch.isascii() else WIDE_BLANK.sub(b" ", stretch), np.uint8)
        blank = BLANK[content]
        kept = ~blank | ~np.concatenate([[after_blank], blank[:-1]])  # of blanks the first
        piece = held_back + np.where(blank, ord(" "), content)[kept].astype(np.uint8).tobytes()
        held_back, after_blank = piece[len(piece.rstrip(b" ")) :], bool(blank[-1])
        found.update(piece.rstrip(b" "))
    return found.digest()[:16]


def character_end(text: bytes, at: int) -> int:
    """The place in a text, or the next one that is not inside a character."""
    return next((place for place in range(at, at + 3) if place < len(text) and text[place] & 0xC0 != 0x80), at + 3)
