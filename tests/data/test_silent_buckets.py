"""A bucket that does not answer is given up in one line, by every command that is given one."""

import threading

import fsspec
import pytest

from block_recurrent import evaluate, generate, report, train
from block_recurrent.data import files
from block_recurrent.data.store import open_store
from block_recurrent.errors import UserError
from tests.training.test_runs import TINY

USES = {
    "evaluate": lambda: evaluate.main(["gs://silent/run"]),
    "generate": lambda: generate.main(["gs://silent/run"]),
    "report": lambda: report.main(["gs://silent/run"]),
    "train": lambda: train.main([f"--gin_file={TINY}", "--workdir=gs://silent/run"]),
    "a store": lambda: open_store("gs://silent/store"),
}


@pytest.fixture
def silent(monkeypatch):
    """Google's client as it is without a network: it tries again and again."""
    over = threading.Event()
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda place: over.wait(60))
    monkeypatch.setenv(files.ANSWER, "0.1")
    files.require_answer.cache_clear()
    yield
    over.set()
    files.require_answer.cache_clear()


@pytest.mark.parametrize("use", USES)
def test_a_silent_bucket_is_given_up(silent, use):
    with pytest.raises(UserError, match=f"gs://silent has not answered in 0.1 s: .* {files.ANSWER}=0.3"):
        USES[use]()


def test_the_time_is_a_number(silent, monkeypatch):
    monkeypatch.setenv(files.ANSWER, "soon")
    with pytest.raises(UserError, match="in seconds: 'soon' is not a number above 0"):
        USES["evaluate"]()
