"""The smallest proof that recurrence and memory remember: one fact, asked for beyond the reach of the windows."""

import numpy as np
import pytest

from benchmarks.recall import Recall, learn, model_of

TASK = Recall(window=4, facts=1, questions=2)


@pytest.fixture(scope="module")
def bits():
    """Bits per answer, of 4 that chance gives, three blocks after the fact and later."""
    stages = [(6, 120)]
    return {
        spec: learn(model_of(TASK, spec, dim=32, states=2), TASK, stages, far=3)[1][-1]
        for spec in ("2*slide", "rec slide", "mem slide")
    }


def test_the_recurrent_model_remembers(bits):
    assert bits["rec slide"] < 0.5


def test_the_memorizing_model_remembers(bits):
    assert bits["mem slide"] < 0.5


def test_the_sliding_window_does_not(bits):
    assert bits["2*slide"] > 3.9


def test_a_document_states_its_facts_once_and_never_shows_an_answer():
    task = Recall()
    batch = task.documents(np.random.default_rng(0), 5, blocks=6)
    tokens, answers = batch["inputs"], batch["weights"] > 0
    assert np.all(tokens[:, task.window :] >= 16), "values stand in the first block alone"
    for row in range(5):
        facts = dict(zip(tokens[row, 0:8:2], tokens[row, 1:8:2], strict=True))
        assert len(facts) == 4
        for place in np.flatnonzero(answers[row]):
            assert tokens[row, place - 1] == 20, "a question mark stands before the key"
            assert batch["targets"][row, place] == facts[tokens[row, place]]
