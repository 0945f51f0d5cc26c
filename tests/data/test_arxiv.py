"""arXiv's bulk archives: which papers are kept, and that nothing in them does harm."""

import gzip
import io
import json
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from block_recurrent.data import arxiv
from block_recurrent.data.arxiv import ArxivMath, paper_id, printable
from block_recurrent.data.documents import Dropped, Unit
from block_recurrent.errors import UserError

MINIATURES = Path(os.environ.get("BR_DATA") or Path(__file__).parents[3] / "shared/data")
PAPER = b"\\documentclass{article}\n\\begin{document}\nText.\n\\end{document}\n"
BAD_LINE = "metadata line that is not a record"


def tar_of(contents: dict[str, bytes | tarfile.TarInfo], format=tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, content in contents.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
            else:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def claiming(archive: bytes, size: bytes, kind: bytes | None = None) -> bytes:
    """The archive with another size, and type, in its first header."""
    header = bytearray(archive[:512])
    header[124:136] = size
    header[156:157] = kind or header[156:157]
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + archive[512:]


def math(number: int, content: bytes = PAPER) -> dict[str, bytes]:
    """A member of a bulk archive."""
    return {f"1001/1001.{number:04d}.gz": gzip.compress(content)}


def record(paper: str, categories: str) -> str:
    return json.dumps({"id": paper, "title": "A title", "categories": categories})


RECORDS = [*(record(f"1001.{i:04d}", "math.AG hep-th") for i in range(10)), record("1001.0099", "hep-th math-ph")]


@pytest.fixture
def bulk(tmp_path):
    """Makes a source of archives, by name, and lines of metadata."""

    def make(archives: dict[str, bytes], lines: list[str] = RECORDS) -> ArxivMath:
        (tmp_path / "metadata.json").write_text("\n".join(lines) + "\n")
        for name, content in archives.items():
            (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "src" / name).write_bytes(content)
        return ArxivMath(str(tmp_path / "src"), str(tmp_path / "metadata.json"))

    return make


@pytest.fixture
def read(bulk):
    """Reads one archive: the texts by id, and the counts of what was dropped."""

    def read_archive(archive: bytes, lines: list[str] = RECORDS):
        return texts_and_counts(bulk({"arXiv_src_1001_001.tar": archive}, lines))

    return read_archive


def texts_and_counts(source: ArxivMath) -> tuple[dict[str, bytes], dict[str, int]]:
    dropped = Dropped()
    documents = [document for unit in source.units() for document in source.read(unit, dropped)]
    assert len({document.name for document in documents}) == len(documents)
    return {document.name: document.text for document in documents}, dict(dropped.counts)


# Units.


def test_every_archive_is_a_unit_in_the_order_of_names(bulk):
    names = ["b/arXiv_src_1001_002.tar", "a/deep/arXiv_src_9912_001.tar", "b/arXiv_src_1001_001.tar"]
    source = bulk({**{name: tar_of({}) for name in names}, "arXiv_pdf_1001_001.tar": b"", "notes.txt": b""})
    assert [Path(unit.places[0]).relative_to(source.input).as_posix() for unit in source.units()] == sorted(names)


def test_an_archive_can_be_given_alone(bulk):
    folder = bulk({"arXiv_src_1001_001.tar": tar_of(math(1)), "arXiv_src_1001_002.tar": tar_of(math(2))})
    source = ArxivMath(f"{folder.input}/arXiv_src_1001_002.tar", folder.metadata)
    assert list(texts_and_counts(source)[0]) == ["1001.0002"]


def test_a_stamp_changes_with_the_archive_and_with_the_metadata(bulk):
    stamps = {
        unit.stamp
        for records in (RECORDS, RECORDS[:3])
        for archive in (tar_of({}), tar_of(math(1)) * 2)
        for unit in bulk({"arXiv_src_1001_001.tar": archive}, records).units()
    }
    assert len(stamps) == 4


def test_no_archive_and_no_metadata_are_mistakes_to_mend(bulk, tmp_path):
    with pytest.raises(UserError, match=r"no arXiv_src_YYMM_NNN\.tar in .*: give the folder"):
        bulk({"other.tar": b""}).units()
    with pytest.raises(UserError, match=r"no metadata file nowhere\.json: download"):
        ArxivMath(str(tmp_path), "nowhere.json").units()


def test_a_source_can_be_sent_to_another_process(bulk):
    source = pickle.loads(pickle.dumps(bulk({"arXiv_src_1001_001.tar": tar_of(math(1))})))
    assert list(texts_and_counts(source)[0]) == ["1001.0001"]
    assert (source.name, source.contiguous) == ("arxiv_math", False)


def test_archives_can_be_in_a_bucket():
    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe("/bulk/src/arXiv_src_1001_001.tar", tar_of(math(1)))
    system.pipe("/bulk/metadata.json.gz", gzip.compress("\n".join(RECORDS).encode()))
    source = ArxivMath("memory://bulk/src", "memory://bulk/metadata.json.gz")
    assert texts_and_counts(source) == ({"1001.0001": PAPER}, {})


# Metadata.


def test_only_papers_with_a_category_of_mathematics_are_kept(read):
    lines = [record("1001.0001", "cs.LG math.OC"), record("1001.0002", "math-ph"), record("1001.0003", "cs.math.")]
    texts, counts = read(tar_of(math(1) | math(2) | math(3) | math(4)), lines)
    assert list(texts) == ["1001.0001"]
    assert counts == {"not mathematics": 2, "no metadata": 1}


def test_lines_that_are_no_records_are_counted_once_for_the_corpus(bulk):
    bad = ["{", "[1]", "7", '{"id": "1001.0001"}', '{"id": 7, "categories": "math.AG"}', "\x00\x01", "[" * 100_000]
    archives = {f"arXiv_src_1001_00{i}.tar": tar_of(math(i)) for i in (1, 2, 3)}
    texts, counts = texts_and_counts(bulk(archives, [*bad, "", *RECORDS]))
    assert len(texts) == 3
    assert counts == {BAD_LINE: len(bad)}


def test_a_line_without_end_stays_out_of_memory(read, monkeypatch):
    monkeypatch.setattr(arxiv, "LINE_LIMIT", 200)
    texts, counts = read(tar_of(math(1)), ["x" * 1000, *RECORDS])
    assert list(texts) == ["1001.0001"]
    assert counts == {BAD_LINE: 1}


def test_metadata_can_be_compressed(bulk, tmp_path):
    source = bulk({"arXiv_src_1001_001.tar": tar_of(math(1))})
    (tmp_path / "metadata.json").write_bytes(gzip.compress((tmp_path / "metadata.json").read_bytes()))
    assert list(texts_and_counts(source)[0]) == ["1001.0001"]


def test_metadata_cut_short_are_a_mistake_to_mend(bulk, tmp_path):
    source = bulk({"arXiv_src_1001_001.tar": tar_of(math(1))})
    (tmp_path / "metadata.json").write_bytes(gzip.compress((tmp_path / "metadata.json").read_bytes())[:-20])
    with pytest.raises(UserError, match=r"metadata\.json is damaged or cut short: download it again"):
        texts_and_counts(source)


def test_a_file_that_is_not_the_metadata_is_a_mistake_to_mend(read):
    with pytest.raises(UserError, match="no line that is a JSON record"):
        read(tar_of(math(1)), ["<html>", "</html>"])


def test_the_metadata_are_read_once_and_little_of_them_is_kept(bulk):
    source = bulk({"arXiv_src_1001_001.tar": tar_of(math(1)), "arXiv_src_1001_002.tar": tar_of(math(2))})
    before = arxiv.read_snapshot.cache_info().misses
    texts_and_counts(source)
    assert arxiv.read_snapshot.cache_info().misses == before + 1
    marks = arxiv.read_snapshot(source.metadata, arxiv.files.stamp_of(source.metadata)).marks
    assert marks.dtype == np.uint64 and len(marks) == len(RECORDS) and (np.diff(marks) > 0).all()


# Papers.


@pytest.mark.parametrize(
    ("stem", "paper"),
    [
        ("math9912001", "math/9912001"),
        ("hep-th9901001", "hep-th/9901001"),
        ("math.GT0309136v3", "math/0309136"),
        ("1001.0001", "1001.0001"),
        ("1501.00001v12", "1501.00001"),
        ("arXiv", None),
        ("1001", None),
        ("math991200", None),
        ("1001.0001x", None),
    ],
)
def test_the_id_is_in_the_name(stem, paper):
    assert paper_id(stem) == paper


def test_a_paper_is_one_file_or_a_tar(read):
    parts = {"./ms.tex": PAPER.replace(b"Text.", rb"\input{parts/a}"), "parts/a.tex": b"Part.", "fig.png": b"\0"}
    texts, counts = read(tar_of({"1001": special("1001", tarfile.DIRTYPE)} | math(1) | math(2, tar_of(parts))))
    assert texts == {"1001.0001": PAPER, "1001.0002": PAPER.replace(b"Text.", b"Part.")}
    assert counts == {}


def test_the_tar_of_a_paper_may_lack_its_end(read):
    content = tar_of({"ms.tex": PAPER}).rstrip(b"\0")
    content += bytes(-len(content) % tarfile.BLOCKSIZE)
    assert read(tar_of(math(1, content))) == ({"1001.0001": PAPER}, {})


def test_text_is_utf8_with_newlines(read):
    texts, _ = read(tar_of(math(1, PAPER.replace(b"Text.\n", b"caf\xe9\r\n"))))
    assert texts["1001.0001"] == PAPER.replace(b"Text.", "café".encode())


@pytest.mark.parametrize(
    ("reason", "content"),
    [
        ("not LaTeX", b"Plain \\TeX. \\bye"),
        ("not LaTeX", b""),
        ("PDF only", b"%PDF-1.4\n\0"),
        ("PostScript only", b"%!PS-Adobe-2.0\n"),
        ("PostScript only", b"\x04%!\n"),
        ("HTML only", b"<!DOCTYPE html><html>"),
        ("binary", PAPER + b"\0"),
        ("withdrawn", b"%auto-ignore\nThis paper has been withdrawn by the author.\n"),
    ],
)
def test_other_than_latex_is_dropped(read, reason, content):
    assert read(tar_of(math(1, content) | math(2))) == ({"1001.0002": PAPER}, {reason: 1})


def test_an_editors_comment_is_not_postscript(read):
    texts, _ = read(tar_of(math(1, b"%!TEX root = x.tex\n" + PAPER)))
    assert list(texts) == ["1001.0001"]


def test_pdf_and_unknown_names_are_dropped(read):
    members = {"1001/1001.0001.pdf": b"%PDF", "1001/1001.0002.zip": b"", "1001/index.gz": b"", "1001/._x": b""}
    assert read(tar_of(members)) == ({}, {"PDF only": 1, "not named as a paper": 3})


def test_the_first_of_a_paper_with_two_versions_is_kept(read):
    second = {"1001/1001.0001v2.gz": gzip.compress(PAPER + b"% second\n")}
    assert read(tar_of(math(1) | second)) == ({"1001.0001": PAPER}, {"duplicate id": 1})


# Bad archives.


@pytest.mark.parametrize("cut", [0, 100, 540], ids=["between papers", "in a header", "in a paper"])
def test_a_truncated_archive_keeps_the_papers_before(read, cut):
    first, second = tar_of(math(1))[:1024], tar_of(math(2))
    assert read(first + second[:cut]) == ({"1001.0001": PAPER}, {"truncated archive": 1})


@pytest.mark.parametrize("archive", [b"", b"<html>404</html>", b"x" * 5000, bytes(100)])
def test_what_is_no_archive_is_counted(read, archive):
    assert read(archive) == ({}, {"truncated archive": 1})


HUGE, NEGATIVE = b"\x80" + b"\x7f" * 11, b"\xff" * 10 + b"\xfc\x00"


@pytest.mark.parametrize("size", [HUGE, NEGATIVE], ids=["huge", "negative"])
@pytest.mark.parametrize("kind", [b"0", b"x", b"L", b"S"], ids=["file", "pax", "long name", "sparse"])
def test_sizes_that_cannot_be_cost_what_comes_after(read, size, kind):
    bad = claiming(tar_of(math(1)), size, kind)
    assert read(tar_of(math(2))[:1024] + bad)[0] == {"1001.0002": PAPER}
    assert read(tar_of(math(1, bad) | math(2)))[0] == {"1001.0002": PAPER}


def test_a_paper_that_expands_too_far_is_dropped(read, monkeypatch):
    monkeypatch.setattr(arxiv, "PAPER_LIMIT", 1_000_000)
    texts, counts = read(tar_of(math(1, bytes(20_000_000)) | math(2)))
    assert list(texts) == ["1001.0002"]
    assert counts == {"expands to more than 1 MB": 1}


def test_a_paper_of_too_many_files_is_dropped(read, monkeypatch):
    monkeypatch.setattr(arxiv, "FILES_LIMIT", 3)
    parts = {f"{i}.tex": PAPER for i in range(4)}
    assert read(tar_of(math(1, tar_of(parts)) | math(2))) == ({"1001.0002": PAPER}, {"more than 3 files": 1})


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: gzip.compress(tar_of({"a.tex": PAPER * 99}))[:-30],
        lambda content: gzip.compress(tar_of({"a.tex": PAPER * 99})[:3000]),
        lambda content: gzip.compress(tar_of({"a.tex": PAPER})[:1024] + b"garbage" * 99),
        lambda content: content[:20] + b"\xff\xff\xff" + content[23:],
        lambda content: b"not gzip",
        lambda content: content[:5],
    ],
    ids=["gzip cut", "tar cut", "tar garbled", "deflate garbled", "no gzip", "gzip header cut"],
)
def test_a_damaged_paper_costs_only_itself(read, damage):
    bad = {"1001/1001.0001.gz": damage(gzip.compress(PAPER))}
    assert read(tar_of(bad | math(2))) == ({"1001.0002": PAPER}, {"damaged source": 1})


def test_files_that_lead_outside_and_links_are_ignored_and_counted(read):
    parts = {
        "ms.tex": PAPER.replace(b"Text.", rb"\input{../up}\input{/etc/passwd}\input{link}\input{hard}"),
        "../up.tex": b"UP",
        "a/../../up.tex": b"UP",
        "/etc/passwd": b"ROOT",
        "link.tex": special("link.tex", tarfile.SYMTYPE, "/etc/passwd"),
        "hard.tex": special("hard.tex", tarfile.LNKTYPE, "ms.tex"),
        "device": special("device", tarfile.CHRTYPE),
        "folder": special("folder", tarfile.DIRTYPE),
    }
    texts, counts = read(tar_of(math(1, tar_of(parts))))
    assert texts == {"1001.0001": parts["ms.tex"]}
    assert counts == {"file of a paper: a path that leads outside": 3, "file of a paper: a link or special": 3}


def test_a_link_in_a_bulk_archive_is_dropped(read):
    link = {"1001/1001.0001.gz": special("1001/1001.0001.gz", tarfile.SYMTYPE, "/etc/passwd")}
    assert read(tar_of(link | math(2))) == ({"1001.0002": PAPER}, {"not a regular file": 1})


def test_odd_names_are_made_printable(bulk):
    source = bulk({"arXiv_src_1001_001.tar": tar_of({"caf\udce9\n" + "x" * 300: b""})})
    dropped = Dropped()
    assert list(source.read(source.units()[0], dropped)) == []
    (name,) = dropped.examples["not named as a paper"]
    assert name.startswith("caf\\udce9\\n") and name.isprintable() and len(name) < 250
    assert printable("1001/1001.0001.gz") == "1001/1001.0001.gz"


def test_trouble_with_the_storage_is_told(bulk, monkeypatch):
    source = bulk({"arXiv_src_1001_001.tar": tar_of(math(1) | math(2))})

    class Failing(io.BytesIO):
        def read(self, size=-1):
            if self.tell() > 600:
                raise OSError(5, "Input/output error")
            return super().read(size)

    arxiv.read_snapshot(source.metadata, arxiv.files.stamp_of(source.metadata))
    monkeypatch.setattr(arxiv.files, "open_file", lambda place: Failing(Path(place).read_bytes()))
    with pytest.raises(OSError, match="Input/output error"):
        texts_and_counts(source)
    monkeypatch.undo()
    with pytest.raises(UserError, match="cannot be read"):
        list(source.read(Unit(("nowhere.tar",), ""), Dropped()))


def test_the_miniature_gives_its_mathematics():
    folder = MINIATURES / "mini_arxiv_math" / "bulk_like"
    if not folder.is_dir():
        pytest.skip(f"no miniature of arXiv in {MINIATURES}: set BR_DATA to the folder that has mini_arxiv_math")
    texts, counts = texts_and_counts(ArxivMath(str(folder), str(folder / "arxiv-metadata-oai-snapshot.json")))
    numbers = (1, 2, 3, 5, 6, 7, 9, 10, 11)
    assert list(texts) == [f"1001.{i:04d}" for i in numbers] + [f"math/9912{i:03d}" for i in numbers]
    assert counts == {"not mathematics": 6}
    assert "caf\u00e9".encode() in texts["math/9912003"]
    assert rb"\input{sec" not in texts["math/9912002"]
