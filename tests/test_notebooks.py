"""Every notebook runs from top to bottom on a run made on the spot."""

from pathlib import Path

import nbclient
import nbformat
import pytest

from block_recurrent import train
from tests.training.test_runs import arguments

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=[file.stem for file in NOTEBOOKS])
def test_notebook_runs(file, corpus, tmp_path, monkeypatch):
    train.main(arguments(corpus, tmp_path / "run", "--gin.STEPS=4"))
    monkeypatch.setenv("BR_WORKDIR", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(file, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "notebooks are kept without outputs"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(file.parent)}}).execute()
    kinds = {kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})}
    assert "image/png" in kinds
