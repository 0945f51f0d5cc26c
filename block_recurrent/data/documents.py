"""What every corpus is: units that one worker can read alone, documents in them, and a tally of what was left out.

A source lists its units without reading them and reads any one of them by itself, in any process and any order. That is
all that preparing in parallel, on one machine or on many, asks of it. Documents hold whole texts, one at a time.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

SPLITS = ("train", "validation", "test")
EXAMPLES = 5  # how many names of what was dropped are kept, for each reason and unit


def readable(name: str) -> str:
    """A name that is UTF-8, whatever bytes a file system or an archive has for it."""
    return name.encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class Document:
    """One document: UTF-8 text (bytes as they are, where the corpus is one of bytes or is no text at all)."""

    name: str
    text: bytes
    split: str | None = None  # None: chosen once all documents are known, never by position
    lines: tuple[int, ...] = ()  # near_duplicates.sample, where no near-duplicate may be on the other side of a split
    label: int | None = None  # its class, where the corpus is one of labelled documents

    def __post_init__(self):
        object.__setattr__(self, "name", readable(self.name))


@dataclass(frozen=True)
class Unit:
    """A piece of the input that one worker reads by itself: paths or addresses, and a stamp of what they hold now."""

    places: tuple[str, ...]
    stamp: str  # changes when a file is rewritten, for example its size and time
    split: str | None = None
    dropped: tuple[tuple[str, str], ...] = ()  # (reason, name) of what its listing left out
    size: int = 0  # bytes, where documents are scattered over units: how many are joined at a time follows from it
    span: tuple[int, int] | None = None  # from which to which per cent of a text, where it is cut into splits


@dataclass
class Dropped:
    """What was left out and why: counts, and the first names of each reason."""

    counts: Counter = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        self.counts[reason] += 1
        names = self.examples.setdefault(reason, [])
        if len(names) < EXAMPLES:
            names.append(readable(name))

    def tally(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"counts": dict(self.counts), "examples": self.examples}


def total(tallies: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Counts of several by reason, most first, with the first examples."""
    whole = Dropped()
    for each in tallies:
        whole.counts.update(each["counts"])
        for reason, names in each["examples"].items():
            known = whole.examples.setdefault(reason, [])
            known += names[: EXAMPLES - len(known)]
    ordered = sorted(whole.counts.items(), key=lambda item: (-item[1], item[0]))
    return {reason: {"count": count, "examples": whole.examples[reason]} for reason, count in ordered}


class Source(Protocol):
    """A corpus: a frozen dataclass whose fields are where it is and how it is filtered.

    One of labelled documents also has `labels`, the names of the classes that its documents' labels number.
    """

    name: str  # also the salt of its splits
    contiguous: bool  # one running text, not documents: in training every row reads its own stretch of it

    def units(self) -> Sequence[Unit]:
        """The units, always in the same order; a UserError where there is nothing to read."""

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        """The documents of a unit, in order."""


def labels_of(source: Source) -> tuple[str, ...]:
    """The names of a corpus's classes, none where its documents are there to be predicted themselves."""
    return getattr(source, "labels", ())


class ScatteredSource(Source, Protocol):
    """A corpus whose documents are scattered over its units: `read` is replaced by two functions."""

    def fragments(self, unit: Unit, dropped: Dropped) -> Iterator[tuple[str, bytes]]:
        """(document's name, a fragment of it) in any order."""

    def join(self, name: str, fragments: Sequence[bytes], dropped: Dropped) -> Document | None:
        """A document from all its fragments, which come in the order of the units."""
