"""One table of slices, by the names people type."""

import math

import pytest

from block_recurrent import slices
from block_recurrent.errors import UserError


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "topology"),
    [
        ("v4-8", 4, 1, "v4:2x2x1"),
        ("v4-32", 16, 4, "v4:2x2x4"),
        ("v4-64", 32, 8, "v4:2x4x4"),
        ("v5litepod-1", 1, 1, "v5e:1x1"),
        ("v5litepod-8", 8, 1, "v5e:2x4"),
        ("v5litepod-16", 16, 4, "v5e:4x4"),
        ("v5p-128", 64, 16, "v5p:4x4x4"),
        ("v6e-64", 64, 16, "v6e:8x8"),
        ("h100-8", 8, 1, ""),
        ("a100-80gb-16", 16, 2, ""),
    ],
)
def test_a_name_gives_chips_hosts_and_topology(name, chips, hosts, topology):
    found = slices.find(name)
    assert (found.name, found.chips, found.hosts, found.topology) == (name, chips, hosts, topology)


@pytest.mark.parametrize("found", slices.SLICES.values(), ids=lambda found: found.name)
def test_every_slice_is_whole_hosts(found):
    assert found.hosts * found.chips_per_host == found.chips == found.devices
    assert math.prod(found.host_bounds) == found.chips_per_host


def test_v5e_is_another_name_for_v5litepod():
    assert slices.find("v5e-16") == slices.find("v5litepod-16") == slices.find("V5E-16")


def test_several_slices_are_counted_together():
    two = slices.find("2xv5e-16")
    assert (two.name, two.slices, two.chips, two.devices) == ("2xv5litepod-16", 2, 16, 32)
    assert two.accelerator_type == "v5litepod-16"
    assert slices.find("1xv4-8") == slices.find("v4-8")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v4-48", "v4 has v4-16, v4-32, v4-64"),
        ("v5-16", "did you mean v5p-16"),
        ("h100", "did you mean h100-8"),
        ("toaster", "known are such as v4-32"),
        ("0xv4-8", "several slices are of TPUs"),
        ("2xh100-8", "several slices are of TPUs"),
    ],
)
def test_an_unknown_name_is_told_with_near_ones(name, near):
    with pytest.raises(UserError, match=f"no slice is called '{name}': .*{near}"):
        slices.find(name)
