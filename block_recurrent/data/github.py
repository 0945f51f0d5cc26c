"""Source code by repositories: one document is all the code of one, in the order of its folders.

Two forms of the same corpus: a folder of repositories (working trees, git directories, archives), and tables with one
row per file, as in The Stack. The same files give the same document in both.
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import ClassVar

from block_recurrent.data import licences, repositories, source_files
from block_recurrent.data.code_tables import Row, is_table, row_groups, rows
from block_recurrent.data.documents import Document, Dropped, Unit, readable
from block_recurrent.data.files import File, TooLarge, is_file, is_folder, listing, stamp_of
from block_recurrent.data.near_duplicates import sample
from block_recurrent.data.source_files import FileFilter, Refused, Unusable, header, normal_path
from block_recurrent.errors import UserError

NO_SOURCE = "repository: no source file left"
OTHER_LICENCE = "licence not wanted"
NAMELESS = "file: no repository or path"
UNIT_BYTES = 64 * 2**20  # small repositories, and row groups of a table, are read together up to about this size
FEWEST_UNITS = 256  # but not so many that workers would have nothing to do
LENGTH_BYTES = 4  # of a path's length, before the path in a fragment


@dataclass(frozen=True)
class Filters:
    """What both forms leave out. No languages means all that are known; no licences means any, and none at all."""

    input: str
    languages: tuple[str, ...] = ()
    licences: tuple[str, ...] = ()  # SPDX identifiers; "permissive" stands for all that ask for little
    max_file_bytes: int = 1_000_000
    seed: int = 0  # of the order of folders, and of files within each

    name: ClassVar[str] = "github"
    contiguous: ClassVar[bool] = False

    def __post_init__(self):
        self._files()  # a misspelt language is told at once

    def _files(self) -> FileFilter:
        return FileFilter(source_files.known_languages(self.languages), self.max_file_bytes)

    def _wanted(self) -> frozenset[str]:
        return licences.wanted_licences(self.licences)


@dataclass(frozen=True)
class GitHubFolder(Filters):
    """A folder of repositories: `name` or `owner/name`, each a folder, a git directory or an archive.

    A folder of nothing but folders and archives is an owner's. On a bucket there are archives alone.
    """

    def units(self) -> Sequence[Unit]:
        """Places are the path and the name of each repository, in turn."""
        found = repositories.find_repositories(self.input)
        if not found:
            raise UserError(f"no repositories in {self.input}: it should hold folders, git directories or tarballs")
        names = Counter(repositories.plain_name(repository.relative) for repository in found)
        largest = min(UNIT_BYTES, sum(repository.size for repository in found) // FEWEST_UNITS)
        units, group, size = [], [], 0
        for repository in found:
            if group and size + repository.size > largest:
                units.append(unit_of(group, names))
                group, size = [], 0
            group.append(repository)
            size += repository.size
        return [*units, unit_of(group, names)]

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        for place, name in zip(unit.places[::2], unit.places[1::2], strict=True):
            try:
                files = self._source_of(place, name, dropped)
            except Unusable as trouble:
                dropped.add(trouble.reason, name)
            except TooLarge:
                dropped.add(repositories.TOO_LARGE, name)
            else:
                yield document(name, files, self.seed)

    def _source_of(self, place: str, name: str, dropped: Dropped) -> dict[str, bytes]:
        """All source files of a repository by their paths."""
        gathered = Gathered(name, self._files(), bool(self.licences), repositories.is_wrapped(place), dropped)
        with closing(repositories.members(place)) as members:
            for member in members:
                gathered.add(member)
        gathered.unwrap()
        if self.licences and not licences.is_wanted(licences.licence_of(gathered.told), self._wanted()):
            raise Unusable(f"repository: {OTHER_LICENCE}")
        if not gathered.files:
            raise Unusable(NO_SOURCE)
        return gathered.files


@dataclass
class Gathered:
    """What is kept of a repository while its files go by.

    Archives wrap a repository in a folder named after it. Whether one does is known only at its end, so until then
    the first folder of each path is not judged.
    """

    name: str
    filter: FileFilter
    keeps_licences: bool
    wrapped: bool
    dropped: Dropped
    files: dict[str, bytes] = field(default_factory=dict)
    told: dict[str, bytes] = field(default_factory=dict)  # texts that may tell the licence
    tops: set[str] = field(default_factory=set)
    size: int = 0

    def add(self, member: repositories.Member) -> None:
        try:
            path = normal_path(member.path)
            top, _, below = path.partition("/")
            self.tops.add(top if below else "")
            if member.refused is not None:
                raise Refused(member.refused)
            below = below if below and self.wrapped else path
            if self.keeps_licences and licences.tells_licence(below) and member.size <= licences.LONGEST:
                self.told[path] = member.read()
                raise Refused(source_files.NOT_SOURCE)
            self.filter.check_path(below)
            self.filter.check_size(member.size)
            text = self.filter.text(member.read())
        except Refused as trouble:
            self.dropped.add(trouble.reason, f"{self.name}/{member.path}")
            return
        self.size += len(text) - len(self.files.get(path, b""))
        if self.size > repositories.LARGEST_REPOSITORY:
            raise TooLarge
        self.files[path] = text  # of a path that comes twice the last, as when an archive is unpacked

    def unwrap(self) -> None:
        if not self.wrapped:
            return
        if len(self.tops) == 1 and "" not in self.tops:
            self.files = {path.partition("/")[2]: text for path, text in self.files.items()}
            self.told = {path.partition("/")[2]: text for path, text in self.told.items()}
            return
        self.told = {path: text for path, text in self.told.items() if licences.tells_licence(path)}
        for path in list(self.files):
            try:
                self.filter.check_path(path)
            except Refused as trouble:
                self.dropped.add(trouble.reason, f"{self.name}/{path}")
                del self.files[path]


@dataclass(frozen=True)
class GitHubParquet(Filters):
    """Tables with one row per file, its repository's name, its path and its content, anywhere below a folder.

    A repository's files may be in any row of any table. What a row says of its language is not asked: its path tells.
    """

    def units(self) -> Sequence[Unit]:
        """Neighbouring row groups of a table; places are its path and the groups' numbers."""
        tables = split_listing(self.input)[0] if is_folder(self.input) or is_file(self.input) else []
        if not tables:
            raise UserError(f"no parquet files in {self.input}")
        with ThreadPoolExecutor(16) as pool:  # on a bucket it is the waiting that takes long
            sizes = list(pool.map(lambda table: row_groups(table.path, bool(self.licences)), tables))
        units = []
        for table, groups in zip(tables, sizes, strict=True):
            numbers, size = [], 0
            for number, more in enumerate(groups):
                if numbers and size + more > UNIT_BYTES:
                    units.append(Unit((table.path, *numbers), table.stamp, size=size))
                    numbers, size = [], 0
                numbers.append(str(number))
                size += more
            if numbers:
                units.append(Unit((table.path, *numbers), table.stamp, size=size))
        return units

    def fragments(self, unit: Unit, dropped: Dropped) -> Iterator[tuple[str, bytes]]:
        """A file's path and text; an empty fragment of a repository of which the unit has nothing to keep."""
        place, *groups = unit.places
        files, wanted = self._files(), self._wanted()
        kept, refused = set(), set()
        for row in rows(place, list(map(int, groups)), bool(self.licences)):
            if not row.repository or not row.path:
                dropped.add(NAMELESS, place)
                continue
            try:
                fragment = packed(*self._file_of(row, files, wanted))
            except Refused as trouble:
                dropped.add(trouble.reason, f"{row.repository}/{row.path}")
                refused.add(row.repository)
            else:
                kept.add(row.repository)
                yield row.repository, fragment
        for repository in sorted(refused - kept):
            yield repository, b""

    def _file_of(self, row: Row, files: FileFilter, wanted: frozenset[str]) -> tuple[str, bytes]:
        path = normal_path(row.path)
        files.check_path(path)
        if wanted and not any(licences.is_wanted(licence, wanted) for licence in row.licences):
            raise Refused(f"file: {OTHER_LICENCE}")
        return path, files.text(row.content)

    def join(self, name: str, fragments: Sequence[bytes], dropped: Dropped) -> Document | None:
        files = dict(unpacked(fragment) for fragment in fragments if fragment)
        if not files:
            dropped.add(NO_SOURCE, name)
            return None
        return document(name, files, self.seed)


def github(
    input: str,
    languages: tuple[str, ...] = (),
    licences: tuple[str, ...] = (),
    max_file_bytes: int = 1_000_000,
    seed: int = 0,
) -> GitHubFolder | GitHubParquet:
    """The form that the input has: tables where most of its bytes are in tables, repositories otherwise."""
    if not is_folder(input) and not is_file(input):
        raise UserError(f"{input} does not exist: give a folder of repositories or of parquet files")
    tables, others = split_listing(input)
    form = GitHubParquet if tables and total(tables) > total(others) else GitHubFolder
    return form(input, tuple(languages), tuple(licences), max_file_bytes, seed)


def split_listing(place: str) -> tuple[list[File], list[File]]:
    """The tables of an input, which may be one itself, and its other files.

    Tables may be links, as in Hugging Face's cache: what they lead to is a table or an error.
    """
    one = [] if is_folder(place) else [File(place, place.rpartition("/")[2], 1, stamp_of(place))]
    files = one or listing(place, links=True)
    return [file for file in files if is_table(file.path)], [file for file in files if not is_table(file.path)]


def total(files: list[File]) -> int:
    return sum(file.size for file in files)


def unit_of(group: list[repositories.Repository], names: Counter) -> Unit:
    """Repositories of one name (a folder and an archive of it) keep what tells them apart."""
    places = []
    for repository in group:
        plain = repositories.plain_name(repository.relative)
        places += [repository.path, readable(plain if names[plain] == 1 else repository.relative)]
    stamps = "\n".join(repository.stamp for repository in group)
    return Unit(tuple(places), hashlib.sha256(stamps.encode()).hexdigest())


def document(name: str, files: dict[str, bytes], seed: int) -> Document:
    paths = ordered(files, repositories.plain_name(name), seed)
    text = b"".join(part for path in paths for part in (header(path), files[path]))
    return Document(name, text, lines=sample(b"".join(files[path] for path in paths)))


def ordered(paths: Iterable[str], repository: str, seed: int) -> list[str]:
    """Paths depth first, the files of a folder before its folders, both in an order that only their names decide."""

    @functools.cache
    def place(path: str) -> bytes:
        return hashlib.sha256(f"{seed}\0{repository}\0{path}".encode(errors="surrogateescape")).digest()

    def steps(path: str) -> list[tuple[bool, bytes]]:
        ends = [at for at, char in enumerate(path) if char == "/"]
        return [*((True, place(path[:end])) for end in ends), (False, place(path))]

    return sorted(paths, key=steps)


def packed(path: str, text: bytes) -> bytes:
    """A fragment: the length of the path, the path, the text."""
    name = path.encode()
    return len(name).to_bytes(LENGTH_BYTES, "little") + name + text


def unpacked(fragment: bytes) -> tuple[str, bytes]:
    end = LENGTH_BYTES + int.from_bytes(fragment[:LENGTH_BYTES], "little")
    return fragment[LENGTH_BYTES:end].decode(), fragment[end:]
