"""Apache Beam, run for real in its own environment: the same bytes as the local build."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from block_recurrent.prepare import prepare
from tests.data.test_building import bytes_of

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-beam" / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-beam: make test sets it up")


def by_beam(*arguments: str) -> subprocess.CompletedProcess:
    """`prepare` with the DirectRunner and two worker processes."""
    workers = ["--runner=DirectRunner", "--beam.direct_num_workers=2", "--beam.direct_running_mode=multi_processing"]
    return subprocess.run(
        [PYTHON, "-m", "block_recurrent.prepare", *arguments, *workers],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def repositories(tmp_path) -> str:
    """Tables in The Stack's layout, the files of each repository scattered over both."""
    rng = np.random.default_rng(0)
    rows = [
        {
            "max_stars_repo_name": f"owner/project{i % 12}",
            "max_stars_repo_path": f"folder{i % 3}/file{i}.py",
            "max_stars_repo_licenses": ["MIT"],
            "content": "".join(f"value_{number} = compute({i})\n" for number in rng.integers(0, 1 << 30, 9)),
        }
        for i in range(120)
    ]
    (tmp_path / "tables").mkdir()
    for part in range(2):
        table = pyarrow.Table.from_pylist(rows[part::2])
        pyarrow.parquet.write_table(table, tmp_path / "tables" / f"part-{part}.parquet", row_group_size=20)
    return str(tmp_path / "tables")


def test_beam_gives_the_bytes_of_the_local_build(repositories, tmp_path):
    """Documents scattered over units, so that all of the pipeline's steps run."""
    here, _ = prepare("github_bytes", tmp_path / "here", input=repositories)
    assert sum(entry["documents"] for entry in here.manifest["splits"].values()) == 12
    told = by_beam("--task=github_bytes", f"--input={repositories}", f"--output={tmp_path / 'there'}")
    assert told.returncode == 0, told.stderr
    assert bytes_of(tmp_path / "there") == bytes_of(tmp_path / "here")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "tables", "there"]


def test_what_a_beam_worker_has_to_say_is_told_in_one_line(tmp_path):
    for name, text in (("train", "a b\n"), ("valid", "a\n"), ("test", "\0\n")):
        (tmp_path / f"ptb.{name}.txt").write_text(text)
    told = by_beam("--task=ptb_words", f"--input={tmp_path}", f"--output={tmp_path / 'store'}")
    assert told.returncode == 2
    assert (
        told.stderr.splitlines()[-1] == f"error: {tmp_path}/ptb.test.txt, line 1, has NUL bytes: fetch the file again"
    )
    assert not (tmp_path / "store").exists()
