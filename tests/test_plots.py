"""Pictures: on a paper of their own in notebooks, and texts in colour."""

import math
import re

import matplotlib

from block_recurrent import plots


def test_pictures_bring_their_paper():
    """Whatever the page: dark settings of a notebook do not reach them."""
    with matplotlib.rc_context({"figure.facecolor": "black", "text.color": "white"}):
        plots.readable()
        figure = plots.draw(None, "a run", {"bits": {"training": ([1, 2], [4.0, 3.0])}})
    assert matplotlib.colors.to_hex(figure.get_facecolor()) == plots.PAPER
    assert figure.get_suptitle() == "a run" and figure._suptitle.get_color() == plots.INK


def test_every_end_has_its_label():
    """Two curves that end alike: their labels are one above the other, the upper one above the axes."""
    figure = plots.draw(None, "two", {"bits": {name: ([1, 2], [3.0, 4.0]) for name in "ab"}})
    labels = figure.axes[0].texts
    assert len(labels) == 2 and all(label.get_annotation_clip() is False for label in labels)
    assert labels[0].xy[1] < labels[1].xy[1]


def test_text_is_coloured_by_its_values():
    page = plots.coloured_text(["<b>", "x", "y\n"], [math.nan, 1.0, 3.0], "bits")
    assert "<b>" not in page and "&lt;b&gt;" in page
    strengths = [float(found) for found in re.findall(r"rgba\([\d, ]+, ([\d.]+)\)", page)]
    assert strengths == [0, 0, 0.85]
    assert "no colour: 1 bits; strongest: 3" in page
