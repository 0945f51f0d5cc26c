"""Text that ends before a stop string, wherever the tokens' borders are."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np


class UntilStop:
    """The bytes of one text as they come, up to the first stop string in them."""

    def __init__(self, stops: Sequence[bytes]):
        self.stops, self.held, self.stopped = stops, b"", False

    def add(self, content: bytes) -> bytes:
        """What is certain of the text by now: all but `held`, its end, that may be the beginning of a stop string."""
        if self.stopped:
            return b""
        text = self.held + content
        found = [text.index(stop) for stop in self.stops if stop in text]
        self.stopped = bool(found)
        begun = [n for stop in self.stops for n in range(len(stop)) if text.endswith(stop[:n])]
        certain = min(found) if found else len(text) - max(begun, default=0)
        self.held = b"" if found else text[certain:]
        return text[:certain]


def texts_of(
    drawn: Iterable[np.ndarray], token_bytes: Callable[[int], bytes], stops: Sequence[bytes] = ()
) -> Iterator[list[bytes]]:
    """New bytes of each row, of tokens [b] as a Generator draws them; ends once a stop string has ended every row."""
    rows: list[UntilStop] = []
    for tokens in drawn:
        rows = rows or [UntilStop(stops) for _ in tokens]
        yield [row.add(token_bytes(int(token)) if token >= 0 else b"") for row, token in zip(rows, tokens, strict=True)]
        if all(row.stopped for row in rows):
            return
    yield [row.held for row in rows]


def ends_in_stop(token_bytes: Callable[[int], bytes], stops: Sequence[bytes]) -> Callable[[Sequence[int]], bool]:
    """Whether the last of some tokens, each of which has text, completes a stop string: when a beam is finished."""
    longest = max(map(len, stops), default=0)

    def ends(tokens: Sequence[int]) -> bool:
        text = b"".join(map(token_bytes, tokens[-longest:]))
        return any(stop in text for stop in stops)

    return ends
