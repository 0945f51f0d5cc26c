"""A run of four steps, shared by the tests of what one does with a run."""

import shutil

import pytest

from block_recurrent import train
from tests.training.test_runs import arguments


@pytest.fixture(scope="session")
def workdir(corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "run"
    train.main(arguments(corpus, workdir, "--gin.STEPS=4"))
    return workdir


@pytest.fixture
def downloaded(workdir, tmp_path):
    """A copy of the run, to be spoilt."""
    return shutil.copytree(workdir, tmp_path / "downloaded")
