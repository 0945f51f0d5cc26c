"""A start that failed before any checkpoint does not keep its folder from the corrected command."""

from pathlib import Path

import jax
import pytest
from etils import epath

from block_recurrent import train
from block_recurrent.errors import UserError
from block_recurrent.inference.run import open_run
from block_recurrent.reported_runs import read_run
from tests.training.test_runs import arguments

WRONG = {
    "a rate too high": ["--gin.LEARNING_RATE=1e30", "--gin.DIM=32"],
    "another vocabulary": ["--gin.VOCABULARY=100"],
    "no such store": ["--gin.STORE='data/nowhere'"],
    "a segment that does not fit": ["--gin.train.segment=12"],
}


def test_the_corrected_command_goes_on_in_the_folder(corpus, tmp_path):
    """Whatever went wrong, one after another, and the report is of the run that was made in the end."""
    workdir = tmp_path / "run"
    for wrong in WRONG.values():
        with pytest.raises(UserError):
            train.main(arguments(corpus, workdir, *wrong))
    assert (Path(workdir) / "train.log").exists(), "one of them had begun"
    train.main(arguments(corpus, workdir, "--gin.STEPS=2"))
    run = open_run(workdir)
    assert run.steps == [2] and "DIM = 16" in run.config
    assert read_run(epath.Path(workdir)).parameters == sum(leaf.size for leaf in jax.tree.leaves(run.params))
