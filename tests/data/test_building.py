"""Building a store: the same bytes whoever does the work, nothing lost to a kill, nothing half-written."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from block_recurrent.data import building, files, pool, sources, text_files
from block_recurrent.data.documents import Document, Unit
from block_recurrent.data.rows import RowStream
from block_recurrent.data.store import open_store
from block_recurrent.data.vocabulary import ByteVocabulary
from block_recurrent.errors import UserError
from block_recurrent.prepare import prepare


@pytest.fixture
def texts(tmp_path, monkeypatch) -> str:
    """Thirty files in ten units."""
    monkeypatch.setattr(sources, "UNIT_FILES", 3)
    rng = np.random.default_rng(0)
    (tmp_path / "texts").mkdir()
    for i in range(30):
        words = rng.integers(0, 1000, rng.integers(1, 60))
        (tmp_path / "texts" / f"{i:02d}.txt").write_text(" ".join(map(str, words)))
    return str(tmp_path / "texts")


def bytes_of(folder) -> dict[str, bytes]:
    """The files of a store, without when and where it was made."""
    return {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.suffix != ".png"}


def test_any_number_of_workers_gives_the_same_bytes(texts, tmp_path):
    for workers in (1, 3):
        prepare("text_files", tmp_path / f"by{workers}", input=texts, workers=workers)
    assert bytes_of(tmp_path / "by1") == bytes_of(tmp_path / "by3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["by1", "by3", "texts"], "no work folder is left"


KILLED = textwrap.dedent(
    """
    import os, signal, sys
    from block_recurrent.data import building, sources
    from block_recurrent.prepare import prepare
    sources.UNIT_FILES = 3
    function, after, texts, output = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    whole, calls = getattr(building, function), []
    def or_die(*arguments):
        calls.append(arguments)
        if len(calls) > after:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*arguments)
    setattr(building, function, or_die)
    prepare("text_files", output, input=texts)
    """
)


@pytest.mark.parametrize(
    ("function", "after"), [("read_unit", 4), ("index_row", 13), ("settle", 0), ("write_shard", 1), ("finish", 0)]
)
def test_killed_at_any_step_it_goes_on_and_gives_the_same_bytes(texts, tmp_path, function, after, monkeypatch):
    prepare("text_files", tmp_path / "whole", input=texts)
    output = tmp_path / "killed"
    program = [sys.executable, "-c", KILLED, function, str(after), texts, str(output)]
    died = subprocess.run(program, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert died.returncode == -signal.SIGKILL
    assert not output.exists()
    done = len(list((tmp_path / ".killed.partial" / "units").glob("*.json")))
    assert done == {"read_unit": 4, "index_row": 4}.get(function, 10)
    again = []
    read = text_files.TextFiles.read
    monkeypatch.setattr(text_files.TextFiles, "read", lambda *arguments: again.append(1) or read(*arguments))
    prepare("text_files", output, input=texts)
    assert len(again) == 10 - done, "what was done is not done again"
    assert bytes_of(output) == bytes_of(tmp_path / "whole")
    assert not (tmp_path / ".killed.partial").exists()


@pytest.mark.parametrize("gone", [(), ("lock", "units")])
def test_killed_when_all_is_done_it_can_be_done_again_and_leaves_nothing(texts, tmp_path, monkeypatch, gone):
    """The work folder is still there, or half of it, but for the store that has been moved to its place."""
    left = tmp_path / ".store.partial"
    for overwrite in (True, False):
        with monkeypatch.context() as context:
            context.setattr(pool, "remove", lambda folder: [shutil.move(left / name, tmp_path) for name in gone])
            prepare("text_files", tmp_path / "store", input=texts, overwrite=True)
        for name in gone:
            shutil.rmtree(tmp_path / name) if name == "units" else (tmp_path / name).unlink()
        whole = bytes_of(tmp_path / "store")
        assert left.exists()
        assert prepare("text_files", tmp_path / "store", input=texts, overwrite=overwrite)[1] is overwrite
        assert bytes_of(tmp_path / "store") == whole and not left.exists()


def test_what_an_earlier_version_has_left_behind_is_cleared_away(texts, tmp_path):
    store, _ = prepare("text_files", tmp_path / "store", input=texts)
    for note in (store.manifest["fingerprint"], f"1-{store.manifest['fingerprint']}"):
        with pool.work_folder(None, store.folder, note):
            pass
        assert prepare("text_files", store.folder, input=texts)[1] is False
        assert not (tmp_path / ".store.partial").exists()


def test_what_another_command_has_begun_is_left_to_it(texts, tmp_path):
    prepare("text_files", tmp_path / "store", input=texts)
    with pool.work_folder(None, str(tmp_path / "store"), "another"):
        assert prepare("text_files", tmp_path / "store", input=texts)[1] is False
    assert (tmp_path / ".store.partial" / "fingerprint").read_text() == "another"


def test_killed_with_its_workers_it_leaves_none_behind_and_goes_on(texts, tmp_path):
    """The parent is killed while workers are busy: they end, and another command finishes the store."""
    slow = textwrap.dedent(
        """
        import sys, time
        from block_recurrent.data import sources, text_files
        from block_recurrent.prepare import prepare
        from tests.data.slowly import SlowTextFiles
        sources.UNIT_FILES = 3
        text_files.TextFiles = SlowTextFiles
        if __name__ == "__main__":
            prepare("text_files", sys.argv[2], input=sys.argv[1], workers=2)
        """
    )
    (tmp_path / "slow.py").write_text(slow)
    output = tmp_path / "killed"
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "slow.py"), texts, str(output)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        start_new_session=True,
    )
    units = tmp_path / ".killed.partial" / "units"
    wait_for(lambda: len(list(units.glob("*.json"))) >= 2)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not members_of(parent.pid))
    assert not output.exists() and len(list(units.glob("*.json"))) < 10
    prepare("text_files", output, input=texts)
    prepare("text_files", tmp_path / "whole", input=texts)
    assert bytes_of(output) == bytes_of(tmp_path / "whole")


def holds_interrupts(_, item) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_workers_leave_ctrl_c_to_their_parent():
    assert all(pool.run(holds_interrupts, None, range(4), 2)) and not holds_interrupts(None, 0)


def busy_for_an_hour(_, item) -> None:
    if item:
        time.sleep(3600)
    raise KeyboardInterrupt


def test_what_ends_a_preparation_does_not_wait_for_its_workers():
    with pytest.raises(KeyboardInterrupt):
        list(pool.run(busy_for_an_hour, None, range(2), 2))


def wait_for(condition, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def members_of(session: int) -> list[int]:
    """The processes of a session that still run."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = status.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(status.parent.name))
    return found


def test_a_changed_input_begins_anew(texts, tmp_path):
    program = [sys.executable, "-c", KILLED, "write_shard", "0", texts, str(tmp_path / "store")]
    subprocess.run(program, env={**os.environ, "PYTHONPATH": os.getcwd()})
    Path(texts, "00.txt").write_text("other words")
    prepare("text_files", tmp_path / "store", input=texts)
    prepare("text_files", tmp_path / "fresh", input=texts)
    assert bytes_of(tmp_path / "store") == bytes_of(tmp_path / "fresh")


def test_two_at_once_are_refused(texts, tmp_path):
    with (
        pool.work_folder(None, str(tmp_path / "store"), "x"),
        pytest.raises(UserError, match="being prepared by another process"),
    ):
        prepare("text_files", tmp_path / "store", input=texts)


def test_a_work_folder_that_holds_something_else_is_refused(texts, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("x")
    with pytest.raises(UserError, match="is no work folder"):
        prepare("text_files", tmp_path / "store", input=texts, work=str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "precious").exists()


def test_a_work_folder_may_be_elsewhere_and_the_stores_folder_new(texts, tmp_path):
    output = tmp_path / "new" / "folder" / "store"
    store, _ = prepare("text_files", output, input=texts, work=str(tmp_path / "work"))
    assert store.split("train").tokens[:1].size
    assert not (tmp_path / "work").exists()


@pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or os.stat("/dev/shm").st_dev == os.stat(tempfile.gettempdir()).st_dev,
    reason="no second disk",
)
def test_a_work_folder_may_be_on_another_disk(texts, tmp_path):
    prepare("text_files", tmp_path / "store", input=texts)
    whole = bytes_of(tmp_path / "store")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        work = f"{folder}/work"
        for output in ("store", "other"):  # one that is replaced, one that is not there
            prepare("text_files", tmp_path / output, input=texts, work=work, overwrite=True)
            assert bytes_of(tmp_path / output) == whole
            assert not Path(work).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "store", "texts"]


def test_memory_stays_flat(tmp_path):
    """Eight times the text in as many more files needs no more memory."""
    program = (
        "import resource, sys; from block_recurrent.prepare import prepare; "
        "prepare('text_files', sys.argv[2], input=sys.argv[1]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for count in (8, 64):
        folder = tmp_path / str(count)
        folder.mkdir()
        for i in range(count):
            (folder / f"{i}.txt").write_bytes(b"abcdefg " * (1 << 17))
        told = subprocess.run(
            [sys.executable, "-c", program, str(folder), str(tmp_path / f"store{count}")],
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(told.stdout) / 1024)
    assert peaks[1] < peaks[0] + 16, peaks


def recipe_of(texts, tmp_path, **changes) -> building.Recipe:
    source = text_files.TextFiles(texts)
    options = {"work": str(tmp_path / "work"), "target": str(tmp_path / "work" / "store"), **changes}
    return building.Recipe("text_files", source, tuple(source.units()), ByteVocabulary(), **options)


def test_shards_hold_whole_documents_and_read_as_one(texts, tmp_path):
    whole, _ = prepare("text_files", tmp_path / "whole", input=texts)
    store = pool.build(recipe_of(texts, tmp_path, shard_tokens=400), {}, str(tmp_path / "sharded"), 1)
    entry = store.manifest["splits"]["train"]
    assert len(entry["shards"]) > 5 and max(entry["shards"]) <= 400
    split, expected = store.split("train"), whole.split("train")
    assert set(np.cumsum(entry["shards"])) <= set(split.offsets.tolist())
    np.testing.assert_array_equal(split.tokens[0 : len(split.tokens)], expected.tokens[0 : len(expected.tokens)])
    options = {"rows": 4, "segment": 16, "block": 8, "epochs": 1}
    for batch, other in zip(RowStream(split, **options), RowStream(expected, **options), strict=True):
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])


def test_a_separator_ends_every_document(texts, tmp_path):
    store, _ = prepare("text_files", tmp_path / "store", input=texts, separator=True)
    split = store.split("train")
    ends = [int(split.tokens[end - 1 : end][0]) for end in split.offsets[1:]]
    assert set(ends) == {ByteVocabulary.separator}
    assert store.manifest["separator"]


def test_names_are_those_of_the_documents(texts, tmp_path):
    store, _ = prepare("text_files", tmp_path / "store", input=texts)
    named = [name for split in store.manifest["splits"] for name in store.names(split)]
    assert sorted(named) == [f"{i:02d}.txt" for i in range(30)]


def test_a_file_name_need_not_be_utf8(texts, tmp_path):
    for name, content in ((b"\xff.txt", b"some text"), (b"\xfe.txt", b"")):
        Path(os.fsdecode(os.fsencode(texts) + b"/" + name)).write_bytes(content)
    store, _ = prepare("text_files", tmp_path / "store", input=texts)
    assert r"\udcff.txt" in [name for split in store.manifest["splits"] for name in store.names(split)]
    assert store.manifest["dropped"]["empty"]["examples"] == [r"\udcfe.txt"]


@pytest.fixture
def bucket():
    """A bucket, as far as fsspec is concerned."""
    import fsspec

    system = fsspec.filesystem("memory")
    system.store.clear()
    yield "memory://bucket"
    system.store.clear()


def test_a_corpus_and_its_store_may_be_in_a_bucket(texts, tmp_path, bucket, monkeypatch):
    monkeypatch.chdir(tmp_path)
    system, _ = files.file_system(bucket)
    system.put(texts, "/bucket/texts", recursive=True)
    here, _ = prepare("text_files", tmp_path / "store", input=texts)
    there, made = prepare("text_files", f"{bucket}/store", input=f"{bucket}/texts")
    assert made and there.manifest["splits"] == here.manifest["splits"]
    options = {"rows": 3, "segment": 16, "block": 8, "epochs": 1}
    batches = [list(RowStream(open_store(place).split("train"), **options)) for place in (here.folder, there.folder)]
    for batch, other in zip(*batches, strict=True):
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])
    assert prepare("text_files", f"{bucket}/store", input=f"{bucket}/texts")[1] is False
    assert list(there.names("train")) == list(here.names("train"))


def test_overwriting_in_a_bucket_leaves_nothing_of_the_old_store(texts, tmp_path, bucket, monkeypatch):
    monkeypatch.chdir(tmp_path)
    system, root = files.file_system(f"{bucket}/store")
    prepare("text_files", f"{bucket}/store", input=texts)
    system.pipe(f"{root}/train-00007-of-00008.tokens", b"of another time")
    Path(texts, "00.txt").write_text("other words")
    store, made = prepare("text_files", f"{bucket}/store", input=texts, overwrite=True)
    assert made and not system.exists(f"{root}/train-00007-of-00008.tokens")
    assert store.split("train")


def test_a_bucket_whose_package_is_missing_is_told_by_name(monkeypatch):
    import fsspec

    def missing(place, **options):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError, match=r"gs://bucket/x.*install gcsfs"):
        files.file_system("gs://bucket/x")


@dataclass(frozen=True)
class Scattered:
    """Documents whose letters are spread over the units."""

    documents: tuple[str, ...]
    name = "scattered"
    contiguous = False

    def units(self):
        return [Unit((str(i),), "", size=100) for i in range(4)]

    def fragments(self, unit, dropped):
        for document in self.documents:
            yield document, f"{document}{unit.places[0]} ".encode()
        dropped.add("looked at", unit.places[0])

    def join(self, name, fragments, dropped):
        return None if name == "unwanted" else Document(name, b"".join(fragments))


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 100])
def test_scattered_documents_are_joined_in_the_order_of_the_units(tmp_path, monkeypatch, bucket_bytes):
    monkeypatch.setattr(building, "BUCKET_BYTES", bucket_bytes)
    source = Scattered(("a", "b", "c", "d", "e", "unwanted"))
    work = tmp_path / "work"
    recipe = building.Recipe("x", source, tuple(source.units()), ByteVocabulary(), str(work), str(work / "store"))
    assert recipe.pieces == (1 if bucket_bytes > 400 else 4)
    store = pool.build(recipe, {}, str(tmp_path / "store"), 1)
    texts = {}
    for name in store.manifest["splits"]:
        split = store.split(name)
        for i, document in enumerate(store.names(name)):
            texts[document] = store.vocabulary.decode(split.tokens[split.offsets[i] : split.offsets[i + 1]])
    assert texts == {name: f"{name}0 {name}1 {name}2 {name}3 " for name in "abcde"}
    assert store.manifest["dropped"]["looked at"]["count"] == 4


def test_what_was_dropped_is_told_with_examples(texts, tmp_path):
    Path(texts, "bad.txt").write_bytes(b"caf\xe9")
    Path(texts, "zeros.txt").write_bytes(b"\0" * 100)
    Path(texts, "empty.txt").touch()
    Path(texts, "link").symlink_to("/etc")
    store, _ = prepare("text_files", tmp_path / "store", input=texts)
    dropped = store.manifest["dropped"]
    assert {reason: entry["count"] for reason, entry in dropped.items()} == {
        "NUL bytes": 1,
        "empty": 1,
        "not UTF-8": 1,
        "symbolic link": 1,
    }
    assert dropped["not UTF-8"]["examples"] == ["bad.txt"]
    assert sum(entry["documents"] for entry in store.manifest["splits"].values()) == 30
    assert json.dumps(store.manifest)
