"""A person's own texts, local or in a bucket: a document per file, or several in a file that says where they end."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from block_recurrent.data import files
from block_recurrent.data.documents import EXAMPLES, SPLITS, Document, Dropped, Unit
from block_recurrent.data.named_splits import UNNAMED, no_text, split_of_words, splits_by_name
from block_recurrent.data.sources import flaw, leaving_out, listed, units_of
from block_recurrent.errors import UserError

SPANS = {"train": (0, 90), "validation": (90, 95), "test": (95, 100)}  # per cent of one text that is cut
JSON_ENDINGS = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class TextFiles:
    """A folder (all files below it), a glob or a single file; one document per file, compressed with gzip or not.

    The names of files and folders say which split they are for, or nothing does. One single file is cut in three.
    """

    input: str
    name = "text_files"
    contiguous = False
    cuts_one = True  # a single file

    def units(self) -> list[Unit]:
        place, found, left_out = self._listed()
        names = [files.relative(file.path, place) for file in found]
        named = splits_by_name(names)
        if self.cuts_one and len(found) == 1 and not (named and files.is_folder(place)):
            file = found[0]
            return leaving_out(
                [Unit((file.path,), file.stamp, split, span=span) for split, span in SPANS.items()], left_out
            )
        groups: dict[str | None, list[files.File]] = {split: [] for split in (*SPLITS, None)}
        for file, name in zip(found, names, strict=True):
            folder, _, below = file.relative.partition("/")
            groups[named.get(name)].append(replace(file, relative=below) if folder in SPLITS else file)
        if "train" in named.values():
            left_out += [(UNNAMED, name) for name in names if name not in named]
            groups[None].clear()
        elif not groups[None]:  # and so nothing to train on
            raise UserError(f"no training texts in {self.input}: call a file train.txt, or put them in a folder train")
        return leaving_out([unit for split, group in groups.items() for unit in units_of(group, split)], left_out)

    def arrangement(self, units: list[Unit]) -> dict[str, Any]:
        """How the documents come into splits, and which files their names put where."""
        if any(unit.span for unit in units):
            return {"by": "cut", "files": {}}
        names: dict[str, list[str]] = {}
        for unit in units:
            if unit.split:
                names.setdefault(unit.split, []).extend(files.relative(place, self.input) for place in unit.places)
        if all(unit.split for unit in units):
            return {"by": "names", "files": {split: counted(each) for split, each in names.items()}}
        open_ = (files.relative(place, self.input) for unit in units if not unit.split for place in unit.places)
        passed_over = [name for name in open_ if any(map(split_of_words, name.split("/")[:-1]))]
        found = {split: counted(each) for split, each in names.items()}
        return {"by": "hash", "files": found, **({"passed_over": counted(passed_over)} if passed_over else {})}

    def read(self, unit: Unit, dropped: Dropped) -> Iterator[Document]:
        for place in unit.places:
            file = files.relative(place, self.input)
            try:
                with files.opened(place) as stream:
                    for name, content in self._texts(file, stream, unit, dropped):
                        reason = flaw(content)
                        if reason is None:
                            yield Document(name, content, unit.split)
                        else:
                            dropped.add(reason, name)
            except files.Unreadable as error:
                dropped.add(str(error), file)

    def _texts(self, name: str, stream: BinaryIO, unit: Unit, dropped: Dropped) -> Iterator[tuple[str, bytes]]:
        content = files.everything(stream)
        if unit.span is None or (unit.split == "train" and flaw(content)):  # a flaw is told once
            yield name, content
        elif not flaw(content):
            yield f"{name}/{unit.split}", content[slice(*(line_near(content, share) for share in unit.span))]

    def _listed(self) -> tuple[str, list[files.File], list[tuple[str, str]]]:
        """Where the texts are, the files, and what is left out of them as (reason, name)."""
        place, found, left_out = listed(self.input)
        names = [files.relative(file.path, place) for file in found]
        reasons = self._left_out(names) if len(found) > 1 else {}
        left_out += [(reason, name) for name, reason in reasons.items()]
        if len(reasons) == len(found):
            raise UserError(f"no texts in {self.input}: it holds nothing but {', '.join(names[:EXAMPLES])}")
        return place, [file for file, name in zip(found, names, strict=True) if name not in reasons], left_out

    def _left_out(self, names: list[str]) -> dict[str, str]:
        return no_text(names)


@dataclass(frozen=True)
class SeparatedTexts(TextFiles):
    """Files of several documents, with a mark between one and the next."""

    split_on: str
    cuts_one = False

    def _texts(self, name: str, stream: BinaryIO, unit: Unit, dropped: Dropped) -> Iterator[tuple[str, bytes]]:
        number = 0
        for content in separated(stream, self.split_on.encode()):
            if content.strip():
                number += 1
                yield f"{name}:{number}", content.strip(b"\r\n")
        if number < 2 and files.is_file(self.input):
            raise UserError(f"{self.input} holds no two documents with {self.split_on!r} between them: see --split_on")


@dataclass(frozen=True)
class JsonLines(TextFiles):
    """Files with a JSON object in each line, of which one field is a document."""

    text: str
    cuts_one = False

    def _texts(self, name: str, stream: BinaryIO, unit: Unit, dropped: Dropped) -> Iterator[tuple[str, bytes]]:
        for number, line in enumerate(separated(stream, b"\n"), 1):
            if not line.strip():
                continue
            place, record = f"{name}:{number}", parsed(line)
            if number == 1 and not isinstance(record, dict):
                raise UserError(f"{name}, line 1, is no JSON object: --text is for files with one in each line")
            if number == 1 and self.text not in record:
                raise UserError(
                    f"{name}, line 1, has no field {self.text!r}: it has {', '.join(list(record)[:9]) or 'none'}"
                )
            text = record.get(self.text) if isinstance(record, dict) else None
            if isinstance(text, str):
                yield place, text.encode(errors="surrogatepass")  # half a character is no UTF-8, and left out as such
            else:
                dropped.add(
                    f"no text in the field {self.text!r}" if isinstance(record, dict) else "no JSON object", place
                )

    def _left_out(self, names: list[str]) -> dict[str, str]:
        others = [name for name in names if not name.lower().removesuffix(".gz").endswith(JSON_ENDINGS)]
        unlike = dict.fromkeys(others if len(others) < len(names) else [], "not called .jsonl, .ndjson or .json")
        return unlike | super()._left_out(names)


def text_files(input: str, text: str | None = None, split_on: str | None = None) -> TextFiles:
    """The source of a person's own texts, in the form that the options say."""
    if text is not None and split_on is not None:
        raise UserError("--split_on does not go with --text: a line of JSON is a document")
    if text == "" or split_on == "":
        raise UserError("--text and --split_on want a value: the name of a field, or what stands between documents")
    if text is not None:
        return JsonLines(input, text)
    return TextFiles(input) if split_on is None else SeparatedTexts(input, unescaped(split_on))


def counted(names: list[str]) -> dict[str, Any]:
    """How many names there are, and the first of them."""
    return {"count": len(names), "examples": names[:EXAMPLES]}


def unescaped(text: str) -> str:
    r"""A mark as it is typed, in which \n, \r and \t are the ends of a line and a tab."""
    return text.replace(r"\n", "\n").replace(r"\r", "\r").replace(r"\t", "\t")


def line_near(content: bytes, share: int) -> int:
    """Where, by some per cent of a text, a line begins, or at least a character where lines are too long."""
    at = len(content) * share // 100
    line = content.rfind(b"\n", 0, at) + 1
    if share < 100 and at - line <= len(content) // 50:
        return line
    while share < 100 and content[at] & 0xC0 == 0x80:  # inside a character
        at -= 1
    return at


def separated(stream: BinaryIO, mark: bytes) -> Iterator[bytes]:
    """What stands between the marks of a stream, no more of it in memory than one of them."""
    held, looked = bytearray(), 0
    while piece := stream.read(files.PIECE):
        held += piece
        while (end := held.find(mark, looked)) >= 0:
            yield bytes(held[:end])
            del held[: end + len(mark)]
            looked = 0
        looked = max(len(held) - len(mark) + 1, 0)
    yield bytes(held)


def parsed(line: bytes) -> Any:
    """The value of a line of JSON, None where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
