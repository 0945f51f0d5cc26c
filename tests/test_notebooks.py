"""Every notebook runs from top to bottom on small runs made on the spot, and shows what it promises."""

import base64
import io
from pathlib import Path

import matplotlib.image
import nbclient
import nbformat
import pytest

import block_recurrent
from block_recurrent import train
from block_recurrent.comparison import Contender, Run, write

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SHOWN = {  # how many pictures, and parts of the text
    "compare": (5, ["128 tokens of corpus", "| second |", "second, step 4 less first, step 4:"]),
    "evaluate": (4, ["PATTERN = 'qrnn lrn'", "5 documents", "blocks of 64 tokens", "step 4 less step 2:"]),
    "generate": (1, ["4 beams", "2,400 bytes read", "4,000 tokens, each as if the text were read at once, to 0.000"]),
    "inside_the_state": (8, ["layer 0: gate_kept [16, 4, 16]", "of the attention"]),
}


@pytest.fixture(scope="module")
def places(corpus, tmp_path_factory):
    """A run with state vectors, and two of elementwise recurrences, which compile soonest, compared."""
    folder = tmp_path_factory.mktemp("runs")

    def trained(name, config, *bindings):
        bindings = (f"STORE='{corpus.folder}'", "STEPS=4", *bindings)
        options = [f"--gin_file={ROOT / 'tests' / config}", f"--workdir={folder / name}"]
        train.main([*options, *(f"--gin.{binding}" for binding in bindings)])
        return folder / name

    states = trained("states", "tiny_block_recurrent.gin", "PATTERN='rec'", "train.evaluate_every=8")
    elementwise, scores = {}, {}
    for seed, name in enumerate(("first", "second")):
        workdir = trained(name, "tiny_recurrences.gin", "PATTERN='qrnn lrn'", f"train.seed={seed}")
        elementwise[name] = str(workdir)
        run = Run(Contender(name, "tiny_recurrences.gin", 64, 4), 0, workdir, ())
        scores[run] = block_recurrent.open(workdir).evaluate().to_json()
    about = {"tokens": 128, "store": corpus.folder, "split": "test", "bindings": [], "missing": []}
    cost = {"parameters": 1000, "model_flops_per_token": 6000, "hardware_flops_per_token": 8000}
    (folder / "comparison").mkdir()
    write(folder / "comparison", about, scores, {run.contender: cost for run in scores})
    return {
        "STATES": str(states),
        "BR_WORKDIR": elementwise["first"],
        "BR_RECURRENCES": elementwise["first"],
        "BR_COMPARISON": str(folder / "comparison"),
        "BR_RUNS": ":".join(elementwise.values()),
        "PYTHONPATH": str(ROOT),
    }


def executed(file: Path, settings: dict[str, str], monkeypatch) -> tuple[list[bytes], str]:
    """A notebook's pictures and its text."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(file, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "notebooks are kept without outputs"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(file.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output["text"] for output in outputs if output.get("name") == "stderr"]
    shown = [output["data"] for output in outputs if "data" in output]
    texts = [data.get("text/markdown", data.get("text/html", "")) for data in shown]
    pictures = [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]
    return pictures, "\n".join([*(output.get("text", "") for output in outputs), *texts])


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=[file.stem for file in NOTEBOOKS])
def test_notebook_runs(file, places, monkeypatch):
    workdir = places["STATES"] if file.stem == "inside_the_state" else places["BR_WORKDIR"]
    pictures, text = executed(file, places | {"BR_WORKDIR": workdir}, monkeypatch)
    count, parts = SHOWN[file.stem]
    assert len(pictures) == count
    assert all(matplotlib.image.imread(io.BytesIO(picture)).std() > 0.05 for picture in pictures)
    assert [part for part in parts if part not in text] == []
