"""Stacks from patterns."""

import pytest

from block_recurrent.errors import UserError
from block_recurrent.layers.stack import pattern, stack
from models.sliding_window import SlidingWindowLayer


def slide(window=8):
    return SlidingWindowLayer(heads=2, head_dim=8, mlp_dim=20, window=window)


def test_equal_neighbours_become_one_run():
    layers = pattern("2*far near far 3*far", {"far": slide(8), "near": slide(4)})
    assert stack(layers).depths == (2, 1, 4)
    assert stack(layers, scan_depth=False).depths == (1,) * 7
    assert stack([slide(), slide(), slide(4)]).depths == (2, 1), "equal by configuration, not by identity"


@pytest.mark.parametrize("spec", ["2*fast", "x*slide", "slide,slide", ""])
def test_a_wrong_pattern_is_told(spec):
    with pytest.raises(UserError, match="pattern"):
        pattern(spec, {"slide": slide()})


def test_a_query_tile_divides_its_window():
    with pytest.raises(UserError, match="query_tile 3 does not divide the window 8"):
        SlidingWindowLayer(heads=2, head_dim=8, mlp_dim=20, window=8, query_tile=3)


def test_blocks_that_do_not_fit_are_told():
    assert stack([slide(4), slide(8)]).block == 8
    with pytest.raises(UserError, match="block 6 does not fit in a stack of block 8"):
        stack([slide(6), slide(8)])
