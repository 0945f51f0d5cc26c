"""What the laws do not say of feedback."""

import pytest

from block_recurrent.errors import UserError
from models.feedback import feedback_stack
from tests.laws.registry import recurrent, slide


def test_feedback_without_a_recurrent_layer_is_told():
    with pytest.raises(UserError, match="feedback needs a recurrent layer"):
        feedback_stack([slide()])


def test_feedback_of_a_smaller_block_is_told():
    with pytest.raises(UserError, match="blocks of 8, and a recurrent layer has blocks of 4: give them one window"):
        feedback_stack([slide(window=8), recurrent()])


def test_recurrent_layers_in_a_row_stay_apart():
    """Each has a state of its own to show; plain neighbours are one scan."""
    assert feedback_stack([slide(window=4), slide(window=4), recurrent(), recurrent()]).depths == (2, 1, 1)
