"""When two texts are the same: by a hash that minds no white space."""

import hashlib

import numpy as np

BLANK = np.isin(np.arange(256), list(b" \t\n\r\x0b\f"))
STRETCH = 1 << 20  # bytes that are looked at together


def content_hash(text: bytes, is_text: bool = True) -> bytes:
    """The hash of b" ".join(text.split()), in flat memory; of what is no text, that of all its bytes."""
    found, after_blank = hashlib.sha256(), True
    if not is_text:
        found.update(text)
        return found.digest()[:16]
    held_back = b""  # a blank that counts once another word comes
    for at in range(0, len(text), STRETCH):
        content = np.frombuffer(text, np.uint8, min(STRETCH, len(text) - at), at)
        blank = BLANK[content]
        kept = ~blank | ~np.concatenate([[after_blank], blank[:-1]])  # of blanks the first
        piece = held_back + np.where(blank, ord(" "), content)[kept].astype(np.uint8).tobytes()
        held_back, after_blank = piece[len(piece.rstrip(b" ")) :], bool(blank[-1])
        found.update(piece.rstrip(b" "))
    return found.digest()[:16]
