"""The ranges of numbers that a person gives, by flag or by config: one line says which are allowed.

A range is the `type` of an argparse argument, `WHOLE_1("3")`, and checks a value of a config, `WHOLE_1.check(name, 3)`.
"""

import argparse
import math
import numbers
from dataclasses import dataclass
from typing import Any

from block_recurrent.errors import UserError

LARGE = 2**63 - 1  # the largest int64: a bound that needs no mention


@dataclass(frozen=True)
class Range:
    """Finite numbers from `least` to `most`, both allowed, or beyond `above` and `below`, which are not."""

    whole: bool = False
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __str__(self) -> str:
        bounds = [
            *([f", {self.least:,} or more"] if self.least > -LARGE else []),
            *([f" above {self.above:,}"] if self.above > -LARGE else []),
            *([f", {self.most:,} or less"] if self.most < LARGE else []),
            *([f", below {self.below:,}"] if self.below < LARGE else []),
        ]
        return "".join(["a whole number" if self.whole else "a number", *bounds])

    def holds(self, value: Any) -> bool:
        kind = numbers.Integral if self.whole else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        return abs(value) < math.inf and self.least <= value <= self.most and self.above < value < self.below

    def __call__(self, text: str) -> int | float:
        """Parses the value of a flag."""
        try:
            value = int(text) if self.whole else float(text)
        except ValueError:
            value = None
        if value is None or not self.holds(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {self}")
        return value

    def check(self, name: str, value: Any) -> None:
        """Raises a UserError over a value that is out of range."""
        if not self.holds(value):
            raise UserError(f"{name} is {value!r}: give {self}")


WHOLE_0 = Range(whole=True, least=0, most=LARGE)
WHOLE_1 = Range(whole=True, least=1, most=LARGE)
SEED = Range(whole=True, least=0, most=2**31 - 1)  # jax.random.key takes no more in a compiled function
FINITE = Range()
RATE = Range(least=0)
POSITIVE = Range(above=0)
SHARE = Range(least=0, most=1)
DROPOUT = Range(least=0, below=1)
