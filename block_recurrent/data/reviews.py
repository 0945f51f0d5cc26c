"""IMDB's film reviews (Maas et al. 2011) to be classified: a document is a review, its label whether it is favourable.

The text as words: lower case, line breaks of HTML gone; a word is a run of letters, digits and underscores, with
apostrophes inside ("don't"), and any other character that is no blank is a word of its own. A review ends with the
word for a line's end, and that is where its label is told. Of the training reviews about one in twenty is held out for
validation, by a hash of its name.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

from block_recurrent.data import files, repositories, sources
from block_recurrent.data.documents import Document, Dropped, Unit
from block_recurrent.data.files import TooLarge
from block_recurrent.data.source_files import Unusable
from block_recurrent.errors import UserError

CLASSES = ("neg", "pos")
GROUPS = tuple(f"{part}/{name}" for part in ("train", "test") for name in CLASSES)
HELD_OUT = 20  # one of about so many training reviews
LONGEST = 1 << 20  # bytes; the longest review has 14 thousand
TOO_LONG = "longer than a review"
REVIEW = re.compile(r"(?:\./)?(?:[^/]+/)?((?:train|test)/(?:pos|neg))/(\d+_\d+)\.txt")
BREAK = re.compile(r"<br\s*/?>")
WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")


@dataclass(frozen=True)
class Reviews:
    """What both forms, a folder and an archive of it, have in common."""

    input: str
    name: ClassVar[str] = "imdb"
    contiguous: ClassVar[bool] = False
    labels: ClassVar[tuple[str, ...]] = ("negative", "positive")
    published: ClassVar[dict[str, dict[str, int]]] = {"documents": {"test": 25_000}}


def imdb(input: str) -> Reviews:
    """The folder aclImdb, the one it is in, or its tar archive, compressed or not."""
    folders = [place for place in (input, files.join(input, "aclImdb")) if files.is_folder(files.join(place, "train"))]
    if folders:
        return ReviewFolder(folders[0])
    archives = files.matching(input if files.is_file(input) else files.join(input, "aclImdb*.tar*"))
    if len(archives) != 1:
        raise UserError(
            f"{input} is no archive and no folder with train/pos, train/neg, test/pos and test/neg: "
            "give aclImdb_v1.tar.gz, or what it unpacks to"
        )
    return ReviewArchive(archives[0].path)


@dataclass(frozen=True)
class ReviewFolder(Reviews):
    """train|test/pos|neg/ID_RATING.txt, each a file."""

    def units(self) -> list[Unit]:
        found = []
        for group in GROUPS:
            folder = files.join(self.input, group)
            listed = files.listing(folder) if files.is_folder(folder) else []
            listed = [file for file in listed if REVIEW.fullmatch(f"{group}/{file.relative}")]
            if not listed:
                raise UserError(f"{folder} has no reviews, ID_RATING.txt: unpack the archive again")
            found += sources.units_of(listed, group.partition("/")[0], group)
        return sources.with_links(found, self.input)

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        for place in unit.places:
            group, number = REVIEW.fullmatch("/".join(place.split("/")[-3:])).groups()
            if files.size_of(place) > LONGEST:
                dropped.add(TOO_LONG, f"{group}/{number}")
                continue
            yield from reviewed(f"{group}/{number}", files.read_bytes(place), dropped)


@dataclass(frozen=True)
class ReviewArchive(Reviews):
    """The same in an archive, which is never unpacked but read from beginning to end, once for each part."""

    def units(self) -> list[Unit]:
        """Places are the archive and the folder in it."""
        stamp = files.stamp_of(self.input)
        return [Unit((self.input, part), stamp, part) for part in ("train", "test")]

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        place, part = unit.places
        missing = {group for group in GROUPS if group.startswith(part)}
        try:
            with closing(repositories.archive_members(place)) as members:
                for member in members:
                    found = REVIEW.fullmatch(member.path)
                    if found is None or not found[1].startswith(part):
                        continue
                    missing.discard(found[1])
                    if member.refused or member.size > LONGEST:
                        dropped.add(member.refused or TOO_LONG, member.path)
                        continue
                    yield from reviewed(f"{found[1]}/{found[2]}", member.read(), dropped)
        except Unusable as error:
            raise UserError(f"{place} is no archive, or is damaged or cut short: fetch it again") from error
        except TooLarge as error:
            raise UserError(f"{place} expands to more than the reviews could be: fetch it again") from error
        if missing:
            raise UserError(f"{place} has no {min(missing)}/ID_RATING.txt: give aclImdb_v1.tar.gz")


def reviewed(name: str, content: bytes, dropped: Dropped) -> Iterator[Document]:
    """The document of a review, or none where it has no text."""
    reason = sources.flaw(content)
    text = words_of(content.decode()) if reason is None else b""
    if len(text) <= 1:
        dropped.add(reason or "empty", name)
        return
    part, group, _ = name.split("/")
    yield Document(name, text, split_of(name) if part == "train" else part, label=CLASSES.index(group))


def words_of(text: str) -> bytes:
    """The words of a review with blanks between them, and the end of a line."""
    return " ".join(WORD.findall(BREAK.sub(" ", text.lower()))).encode() + b"\n"


def split_of(name: str) -> str:
    digest = hashlib.sha256(f"imdb:{name}".encode()).digest()
    return "train" if int.from_bytes(digest[:8], "big") % HELD_OUT else "validation"
