"""Numbers that a person gives are in range, or one line says which are."""

import argparse
import math

import pytest

from block_recurrent.commandline import command_parser
from block_recurrent.errors import UserError
from block_recurrent.ranges import DROPOUT, RATE, SEED, WHOLE_1


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "one", "nan", "9" * 20])
def test_a_flag_out_of_range_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number, 1 or more"):
        WHOLE_1(text)


@pytest.mark.parametrize("value", [1.0, 2, -0.5, math.nan, math.inf, True, "0.1", None])
def test_a_dropout_out_of_range_is_refused(value):
    with pytest.raises(UserError, match=r"DROPOUT is .*: give a number, 0 or more, below 1"):
        DROPOUT.check("DROPOUT", value)


def test_numbers_in_range_are_taken():
    assert (WHOLE_1("3"), RATE("0.5"), SEED(str(2**31 - 1))) == (3, 0.5, 2**31 - 1)
    DROPOUT.check("DROPOUT", 0)


def test_a_parser_complains_in_one_line():
    parser = command_parser("example", "An example.")
    parser.add_argument("--rows", type=WHOLE_1)
    with pytest.raises(UserError, match=r"^--rows: '0' is not a whole number, 1 or more; .* --help"):
        parser.parse_args(["--rows=0"])
