"""Small repositories in each form, for the tests of what reads them."""

import io
import stat
import tarfile
import zipfile
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
from dulwich.objects import Blob, Commit, Tree
from dulwich.repo import Repo

from block_recurrent.data.documents import Dropped
from block_recurrent.data.github import GitHubFolder, GitHubParquet

FILES = {
    "main.c": b"int main(void) { return 0; }\n",
    "util.h": b"#pragma once\n",
    "src/deep/inner.py": b"print('inner')\n",
    "src/one.py": b"print('one')\n",
    "src/two.py": b"print('two')\n",
    "tests/check.go": b"package check\n",
}


def write_tree(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def write_tar(path: Path, files: dict[str, bytes] = FILES, top: str = "wrapped-1.0/", others=(), mode="w:gz") -> Path:
    """A tarball of files and of other members, by their headers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(top + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member in others:
            archive.addfile(member)
    return path


def tar_link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def write_zip(path: Path, files: dict[str, bytes] = FILES) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"wrapped-1.0/{name}", content)
    return path


def write_git(folder: Path, files: dict[str, bytes] = FILES, links=(), submodules=(), packed=False) -> Path:
    """A bare git directory with one commit."""
    folder.mkdir(parents=True)
    repository = Repo.init_bare(str(folder))
    objects, trees = [], defaultdict(Tree)

    def place(path: str, mode: int, name: bytes) -> None:
        parent, _, base = path.rpartition("/")
        trees[parent].add(base.encode(), mode, name)

    for path, content in files.items():
        objects.append(Blob.from_string(content))
        place(path, 0o120000 if path in links else 0o100644, objects[-1].id)
        for parent in list(Path(path).parents)[:-1]:
            trees[parent.as_posix()]
    for path in submodules:
        place(path, 0o160000, b"1" * 40)
    trees[""]
    for path in sorted(trees, key=lambda path: path.count("/") + bool(path), reverse=True):
        objects.append(trees[path])
        if path:
            place(path, stat.S_IFDIR, trees[path].id)
    commit = Commit()
    commit.tree, commit.author, commit.committer, commit.message = trees[""].id, b"a <a@b>", b"a <a@b>", b"all"
    commit.author_time = commit.commit_time = commit.author_timezone = commit.commit_timezone = 0
    objects.append(commit)
    if packed:
        repository.object_store.add_objects([(item, None) for item in objects])
    else:
        for item in objects:
            repository.object_store.add_object(item)
    repository.refs[repository.refs.follow(b"HEAD")[0][-1]] = commit.id
    repository.close()
    return folder


def write_parquet(path: Path, rows: list[dict], **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def stack_rows(repository: str, files: dict[str, bytes] = FILES, licences=("MIT",)) -> list[dict]:
    return [
        {
            "content": content.decode(),
            "max_stars_repo_name": repository,
            "max_stars_repo_path": path,
            "max_stars_repo_licenses": list(licences),
            "lang": "ignored",
            "size": len(content),
            "ext": path.rpartition(".")[2],
        }
        for path, content in files.items()
    ]


def read(source) -> tuple[dict[str, bytes], Dropped]:
    """The documents' texts by name, and what was dropped."""
    dropped = Dropped()
    if isinstance(source, GitHubParquet):
        fragments = defaultdict(list)
        for unit in source.units():
            for name, fragment in source.fragments(unit, dropped):
                fragments[name].append(fragment)
        documents = [source.join(name, parts, dropped) for name, parts in fragments.items()]
        documents = [document for document in documents if document is not None]
    else:
        documents = [document for unit in source.units() for document in source.read(unit, dropped)]
    texts = {document.name: document.text for document in documents}
    assert len(texts) == len(documents), "names are distinct"
    return texts, dropped


def paths(text: bytes) -> list[str]:
    return [line[9:].decode() for line in text.splitlines() if line.startswith(b"// FILE: ")]


def kept_and_dropped(folder: Path, files: dict[str, bytes], **filters) -> tuple[list[str], dict[str, int]]:
    """What is kept of a repository with these files beside one that passes, and what is dropped."""
    write_tree(folder / "name", {"kept.py": b"print('kept')\n", **files})
    texts, dropped = read(GitHubFolder(str(folder), **filters))
    return sorted(paths(texts.get("name", b""))), dict(dropped.counts)
