"""Repositories become documents: of what, in which order, under which names; folders and tables alike."""

import os
from pathlib import Path

import numpy as np
import pytest

from block_recurrent.data import github as github_source
from block_recurrent.data.documents import Dropped
from block_recurrent.data.github import GitHubFolder, GitHubParquet, github
from block_recurrent.data.near_duplicates import related
from block_recurrent.data.source_files import header
from block_recurrent.errors import UserError
from tests.data.repository_inputs import (
    FILES,
    paths,
    read,
    stack_rows,
    write_git,
    write_parquet,
    write_tar,
    write_tree,
    write_zip,
)

MINIATURE = Path(os.environ.get("BR_DATA", Path(__file__).parents[3] / "shared/data")) / "mini_github/repos"


# The document.


def test_a_document_is_each_file_after_its_header(tmp_path):
    write_tree(tmp_path / "name")
    texts, dropped = read(GitHubFolder(str(tmp_path)))
    assert list(texts) == ["name"] and not dropped.counts
    assert texts["name"] == b"".join(header(path) + FILES[path] for path in paths(texts["name"]))
    assert sorted(paths(texts["name"])) == sorted(FILES)


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_tar(folder / "name.tar.gz"),
        lambda folder: write_tar(folder / "name.tgz"),
        lambda folder: write_tar(folder / "name.tar", mode="w"),
        lambda folder: write_tar(folder / "name.tar.xz", mode="w:xz"),
        lambda folder: write_tar(folder / "name.tar.bz2", mode="w:bz2"),
        lambda folder: write_tar(folder / "name.tar", top="", mode="w"),
        lambda folder: write_tar(folder / "name.tar", top="./vendor/", mode="w"),
        lambda folder: write_zip(folder / "name.zip"),
        lambda folder: write_git(folder / "name.git"),
        lambda folder: write_git(folder / "name", packed=True),
        lambda folder: write_git(folder / "name/.git"),
    ],
    ids=[
        "tar.gz",
        "tgz",
        "tar",
        "tar.xz",
        "tar.bz2",
        "unwrapped",
        "wrapped in vendor",
        "zip",
        "git",
        "packed git",
        "no checkout",
    ],
)
def test_every_form_gives_the_document_of_the_working_tree(tmp_path, write):
    write_tree(tmp_path / "trees/name")
    (tmp_path / "others").mkdir()
    write(tmp_path / "others")
    expected, _ = read(GitHubFolder(str(tmp_path / "trees")))
    assert read(GitHubFolder(str(tmp_path / "others"))) == (expected, Dropped())


def test_a_table_gives_the_documents_of_the_folder(tmp_path):
    bad = {"binary.c": b"\0", "vendor/x.c": b"int x;\n", "README.md": b"text\n", "empty.py": b""}
    write_tree(tmp_path / "folder/owner/name", {**FILES, **bad})
    write_tree(tmp_path / "folder/owner/nothing", {"README.md": b"text\n"})
    rows = stack_rows("owner/name", {**FILES, **bad}) + stack_rows("owner/nothing", {"README.md": b"text\n"})
    write_parquet(tmp_path / "tables/data/c/one.parquet", rows)
    folder, table = GitHubFolder(str(tmp_path / "folder")), GitHubParquet(str(tmp_path / "tables"))
    (expected, left_out), (texts, dropped) = read(folder), read(table)
    assert texts == expected and dropped.counts == left_out.counts
    assert dropped.counts["repository: no source file left"] == 1


def test_order_is_that_of_the_names_and_the_seed_not_of_the_listing(tmp_path):
    write_tar(tmp_path / "a/name.tar.gz")
    write_tar(tmp_path / "b/name.tar.gz", dict(reversed(FILES.items())))
    write_tar(tmp_path / "c/other.tar.gz")
    first, _ = read(GitHubFolder(str(tmp_path / "a")))
    assert read(GitHubFolder(str(tmp_path / "b")))[0] == first
    orders = {tuple(paths(read(GitHubFolder(str(tmp_path / "a"), seed=seed))[0]["name"])) for seed in range(20)}
    assert len(orders) > 5
    others = {tuple(paths(read(GitHubFolder(str(tmp_path / "c"), seed=seed))[0]["other"])) for seed in range(3)}
    same = {tuple(paths(read(GitHubFolder(str(tmp_path / "a"), seed=seed))[0]["name"])) for seed in range(3)}
    assert others != same


def test_a_folders_files_come_together_and_its_folders_next(tmp_path):
    write_tree(tmp_path / "name")
    for seed in range(10):
        order = paths(read(GitHubFolder(str(tmp_path), seed=seed))[0]["name"])
        assert set(order[:2]) == {"main.c", "util.h"}
        at = order.index("src/deep/inner.py")
        assert set(order[at - 2 : at]) == {"src/one.py", "src/two.py"}


def test_line_ends_and_byte_order_marks_are_made_one(tmp_path):
    write_tree(tmp_path / "name", {"a.py": b"\xef\xbb\xbfa = 1\r\nb = 2\rc = 3"})
    assert read(GitHubFolder(str(tmp_path)))[0]["name"] == b"// FILE: a.py\na = 1\nb = 2\nc = 3\n"


def test_a_header_is_one_line_of_utf8_whatever_the_name():
    assert header("a\nb\r\u2028c\udcff/\x1b.py") == b"// FILE: a?b??c?/?.py\n"
    assert header("ä b/ö.py") == "// FILE: ä b/ö.py\n".encode()


def test_a_file_name_that_is_not_utf8_is_read(tmp_path):
    (tmp_path / "name").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "name") + b"/\xff.py")).write_bytes(b"x = 1\n")
    Path(os.fsdecode(os.fsencode(tmp_path / "name") + b"/\xff.txt")).write_bytes(b"x\n")
    texts, dropped = read(GitHubFolder(str(tmp_path)))
    assert texts == {"name": b"// FILE: ?.py\nx = 1\n"}
    assert dropped.examples["file: not source code"][0].encode() == b"name/\\udcff.txt"


def test_near_duplicates_do_not_depend_on_paths(tmp_path):
    lines = b"".join(b"value_%d = compute()\n" % index for index in range(20))
    write_tree(tmp_path / "a", {"x.py": lines})
    write_tree(tmp_path / "b", {"deep/er/y.py": lines})
    source = GitHubFolder(str(tmp_path))
    a, b = (document for unit in source.units() for document in source.read(unit, Dropped()))
    assert a.lines == b.lines and a.text != b.text and a.split is None


# What is a repository, and its name.


def test_owners_are_told_from_repositories_by_having_no_files(tmp_path):
    write_tree(tmp_path / "owner/first")
    write_tar(tmp_path / "owner/second.tar.gz")
    write_git(tmp_path / "owner/third.git")
    write_tree(tmp_path / "alone")
    (tmp_path / "README.md").write_text("not a repository")
    assert list(read(GitHubFolder(str(tmp_path)))[0]) == ["alone", "owner/first", "owner/second", "owner/third"]


def test_a_tree_and_a_tarball_of_one_name_stay_apart(tmp_path):
    write_tree(tmp_path / "name")
    write_tar(tmp_path / "name.tar.gz")
    texts, _ = read(GitHubFolder(str(tmp_path)))
    assert list(texts) == ["name", "name.tar.gz"]
    assert texts["name"] == texts["name.tar.gz"], "so that the second is dropped as a copy"


def test_of_a_checkout_the_files_on_disk_are_read_without_submodules(tmp_path):
    write_git(tmp_path / "name/.git", {"old.py": b"old = 1\n"})
    write_tree(tmp_path / "name", {"new.py": b"new = 1\n", "sub/x.py": b"x = 1\n", "sub/.git": b"gitdir: ../y\n"})
    texts, dropped = read(GitHubFolder(str(tmp_path)))
    assert paths(texts["name"]) == ["new.py"] and not dropped.counts


def test_submodules_and_links_of_a_git_directory_are_not_followed(tmp_path):
    write_git(tmp_path / "name.git", {**FILES, "link.py": b"/etc/passwd"}, links=["link.py"], submodules=["sub"])
    texts, dropped = read(GitHubFolder(str(tmp_path)))
    assert sorted(paths(texts["name"])) == sorted(FILES)
    assert dropped.counts == {"file: symbolic link": 1}


def test_small_repositories_share_a_unit_and_a_change_changes_its_stamp(tmp_path):
    for index in range(300):
        write_tree(tmp_path / f"name{index}", {"a.py": b"a = 1\n"})
    write_tree(tmp_path / "large", {"a.py": b"a = 1\n" * 1000})
    source = GitHubFolder(str(tmp_path))
    units = source.units()
    assert units == source.units() and 1 < len(units) < 300
    assert sorted(name for unit in units for name in unit.places[1::2]) == sorted(
        path.name for path in tmp_path.iterdir()
    )
    os.utime(tmp_path / "name7/a.py", (1, 1))
    assert sum(before != after for before, after in zip(units, source.units(), strict=True)) == 1


def test_archives_are_read_from_a_bucket(tmp_path):
    import fsspec

    write_tar(tmp_path / "name.tar.gz")
    with fsspec.open("memory://github_bucket/owner/name.tar.gz", "wb") as file:
        file.write((tmp_path / "name.tar.gz").read_bytes())
    write_tree(tmp_path / "trees/owner/name")
    assert read(github("memory://github_bucket"))[0] == read(GitHubFolder(str(tmp_path / "trees")))[0]


# Tables.


def test_of_a_table_rows_with_any_wanted_licence_are_kept(tmp_path):
    rows = (
        stack_rows("a", licences=["GPL-3.0", "MIT"])
        + stack_rows("b", licences=["GPL-3.0"])
        + stack_rows("c", licences=[])
    )
    write_parquet(tmp_path / "a.parquet", rows)
    texts, dropped = read(GitHubParquet(str(tmp_path), licences=("permissive",)))
    assert list(texts) == ["a"]
    assert dropped.counts == {"file: licence not wanted": 2 * len(FILES), "repository: no source file left": 2}


def test_files_of_a_repository_scattered_over_tables_and_row_groups_are_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(github_source, "UNIT_BYTES", 1)
    rows = stack_rows("owner/name")
    write_parquet(tmp_path / "whole/a.parquet", rows)
    write_parquet(tmp_path / "parts/x/b.parquet", [*rows[:3], *stack_rows("other")], row_group_size=2)
    write_parquet(tmp_path / "parts/c.parquet", rows[3:])
    source = GitHubParquet(str(tmp_path / "parts"))
    assert [unit.places[1:] for unit in source.units()] == [("0",), ("0",), ("1",), ("2",), ("3",), ("4",)]
    texts, _ = read(source)
    monkeypatch.undo()
    assert [unit.places[1:] for unit in source.units()] == [("0",), ("0", "1", "2", "3", "4")]
    assert read(source)[0] == texts
    assert sorted(texts) == ["other", "owner/name"]
    assert texts["owner/name"] == read(GitHubParquet(str(tmp_path / "whole/a.parquet")))[0]["owner/name"]


def test_tables_may_be_links_as_in_the_cache_of_hugging_face(tmp_path):
    table = write_parquet(tmp_path / "blobs/a1b2", stack_rows("owner/name"))
    link = tmp_path / "snapshots/c3/data/python/train-00000-of-00001.parquet"
    link.parent.mkdir(parents=True)
    link.symlink_to(table)
    (link.parent / "gone.parquet").symlink_to("nowhere")
    assert list(read(github(str(tmp_path / "snapshots/c3")))[0]) == ["owner/name"]


def test_a_unit_is_as_large_as_what_comes_into_memory(tmp_path):
    files = {f"{i}.py": str(i).encode() * 10_000 for i in range(4)}
    table = write_parquet(tmp_path / "a.parquet", stack_rows("a", files), row_group_size=2, compression="zstd")
    assert table.stat().st_size < 20_000
    assert all(unit.size > 20_000 for unit in GitHubParquet(str(tmp_path)).units())


@pytest.mark.parametrize("names", [("repo_name", "path", "license"), ("repository", "path", "licenses")])
def test_plainer_column_names_are_known(tmp_path, names):
    rows = [dict(zip(names, ("name", path, "MIT"), strict=True), content=text) for path, text in FILES.items()]
    write_parquet(tmp_path / "a.parquet", rows)
    assert sorted(paths(read(GitHubParquet(str(tmp_path), licences=("MIT",)))[0]["name"])) == sorted(FILES)


def test_rows_that_are_not_text_or_have_no_name_are_left_out(tmp_path):
    rows = [
        {"repo_name": "name", "path": "/a.py", "content": b"a = 1\n"},
        {"repo_name": "name", "path": "b.py", "content": b"\xff\n"},
        {"repo_name": "name", "path": "c.py", "content": None},
        {"repo_name": "name", "path": "../d.py", "content": b"a = 1\n"},
        {"repo_name": None, "path": "a.py", "content": b"a = 1\n"},
        {"repo_name": "name", "path": None, "content": b"a = 1\n"},
    ]
    write_parquet(tmp_path / "a.parquet", rows)
    texts, dropped = read(GitHubParquet(str(tmp_path)))
    assert texts == {"name": b"// FILE: a.py\na = 1\n"}
    assert dropped.counts == {
        "file: not UTF-8": 1,
        "file: empty": 1,
        "file: path leaves the repository": 1,
        "file: no repository or path": 2,
    }


def test_a_damaged_table_is_named(tmp_path):
    content = write_parquet(tmp_path / "a.parquet", stack_rows("name")).read_bytes()
    for bad in (content[:-10], content[: len(content) // 2], b"", b"text"):
        (tmp_path / "a.parquet").write_bytes(bad)
        with pytest.raises(UserError, match=r"a\.parquet is no parquet file, or a damaged one: "):
            GitHubParquet(str(tmp_path)).units()


def test_a_table_damaged_in_its_rows_is_named(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", stack_rows("name"))
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 60 + content[64:])
    with pytest.raises(UserError, match=r"a\.parquet is damaged in its row groups 0 to "):
        read(GitHubParquet(str(tmp_path)))


@pytest.mark.parametrize(
    ("column", "licences"), [("content", ()), ("max_stars_repo_name", ()), ("max_stars_repo_licenses", ("MIT",))]
)
def test_a_column_that_is_missing_is_named(tmp_path, column, licences):
    rows = [{name: value for name, value in row.items() if name != column} for row in stack_rows("name")]
    write_parquet(tmp_path / "a.parquet", rows)
    with pytest.raises(UserError, match=rf"a\.parquet has no column {column} "):
        GitHubParquet(str(tmp_path), licences=licences).units()


# Either.


def test_the_form_is_told_from_what_the_input_holds(tmp_path):
    write_parquet(tmp_path / "tables/data/a.parquet", stack_rows("name"))
    (tmp_path / "tables/loader.py").write_text("load()\n")
    write_tree(tmp_path / "folder/name", {"a.py": b"a = 1\n" * 10_000})
    write_parquet(tmp_path / "folder/name/tests/a.parquet", stack_rows("name"))
    assert isinstance(github(str(tmp_path / "tables"), seed=3), GitHubParquet)
    assert isinstance(github(str(tmp_path / "tables/data/a.parquet")), GitHubParquet)
    assert isinstance(github(str(tmp_path / "folder")), GitHubFolder)
    assert github(str(tmp_path / "folder"), seed=3).seed == 3


def test_one_archive_is_an_input(tmp_path):
    path = write_tar(tmp_path / "name.tar.gz")
    assert list(read(github(str(path)))[0]) == ["name"]


@pytest.mark.parametrize("place", ["nowhere", "empty", "notes.txt"])
def test_nothing_to_read_is_told_in_one_line(tmp_path, place):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(UserError) as error:
        github(str(tmp_path / place)).units()
    assert place in str(error.value) and "\n" not in str(error.value)


def test_a_single_repository_is_refused(tmp_path):
    write_git(tmp_path / "name.git")
    with pytest.raises(UserError, match="is itself a repository"):
        GitHubFolder(str(tmp_path / "name.git")).units()


@pytest.mark.skipif(not MINIATURE.is_dir(), reason=f"no miniature at {MINIATURE}: set BR_DATA to the folder of data")
def test_the_miniature():
    source, dropped = GitHubFolder(str(MINIATURE)), Dropped()
    documents = [document for unit in source.units() for document in source.read(unit, dropped)]
    assert len(documents) == 74
    assert dropped.counts == {
        "file: generated": 29,
        "file: vendored or built": 21,
        "file: hidden": 13,
        "file: minified or data": 3,
    }
    assert sum(len(document.text) for document in documents) == 44_494_902
    samples = [np.asarray(document.lines, np.uint64) for document in documents]
    twins = related(np.concatenate(samples), np.asarray([len(sample) for sample in samples]))
    names = [document.name for document, twin in zip(documents, twins, strict=True) if twin]
    assert names == ["commander-14.0.3", "node-commander-9.4.1-1"], "two versions of one project"
