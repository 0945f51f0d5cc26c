"""Recurrences from end to end: trained, evaluated with a longer context than in training, and generating."""

import json

import numpy as np
import pytest

from block_recurrent import evaluate, generate, train
from block_recurrent.inference.run import open_run


@pytest.fixture(scope="module")
def workdir(corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "recurrences"
    store = f"--gin.STORE='{corpus.folder}'"
    train.main(["--gin_file=tests/tiny_recurrences.gin", store, "--gin.STEPS=4", f"--workdir={workdir}"])
    return workdir


def test_a_longer_context_at_evaluation(workdir):
    evaluate.main([str(workdir)])
    evaluate.main([str(workdir), "--gin.CONTEXT=9"])
    as_trained, longer = (
        json.loads((workdir / "evaluation" / f"test-4{changed}.json").read_text()) for changed in ("", "-CONTEXT=9")
    )
    assert longer["changed"] == ["CONTEXT=9"] and "changed" not in as_trained
    assert longer["tokens"] == as_trained["tokens"]
    assert open_run(workdir, bindings=["CONTEXT=9"]).model.stack.layers[0].context == 9
    assert np.isfinite(longer["bits_per_token"])


def test_generation(workdir, capsys):
    generate.main([str(workdir), "--prompt=alpha ", "--tokens=12", "--seed=3"])
    first = capsys.readouterr().out
    generate.main([str(workdir), "--prompt=alpha ", "--tokens=12", "--seed=3"])
    assert capsys.readouterr().out == first and first.startswith("alpha ")
