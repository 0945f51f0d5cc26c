"""What chips cost an hour, from a file that its user edits: `plan` and `launch` multiply by it."""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

from block_recurrent.errors import UserError
from block_recurrent.ranges import RATE
from block_recurrent.slices import GPUS, TPUS, Slice

SHIPPED = Path(__file__).with_name("prices.toml")
KINDS = ("on_demand", "spot")


@dataclass(frozen=True)
class Prices:
    """US dollars per chip and hour, by generation, on demand and spot; and what the file says of itself."""

    file: Path
    about: str
    on_demand: dict[str, float]
    spot: dict[str, float]

    def per_hour(self, where: Slice, spot: bool) -> float | None:
        """Dollars an hour of a slice, or None where the file has no price for its chips."""
        price = (self.spot if spot else self.on_demand).get(where.generation)
        return None if price is None else price * where.devices

    def __str__(self) -> str:
        return f"prices of {self.file}" + (f": {self.about}" if self.about else "")


def read_prices(file: Path | None = None) -> Prices:
    """Prices of the file given, else of the user's own, else of the one beside this module."""
    own = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "block_recurrent" / "prices.toml"
    file = file or (own if own.exists() else SHIPPED)
    try:
        found = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is no file of prices ({error}): see {SHIPPED}") from None
    for name in found.keys() - {"about", *KINDS}:
        raise UserError(f"{file}: {name} is none of about, [on_demand] and [spot]")
    for kind in KINDS:
        check_kind(file, kind, found.setdefault(kind, {}))
    return Prices(file, str(found.get("about", "")), found["on_demand"], found["spot"])


def check_kind(file: Path, kind: str, prices: object) -> None:
    if not isinstance(prices, dict):
        raise UserError(f"{file}: {kind} is a table, [{kind}], with a line such as v5e = 1.20")
    for generation, price in prices.items():
        if generation not in {**TPUS, **GPUS}:
            raise UserError(f"{file}: no chips are called {generation!r}: known are {', '.join([*TPUS, *GPUS])}")
        RATE.check(f"{file}: the {kind} price of {generation}", price)


def dollars(amount: float) -> str:
    return f"${amount:,.2f}" if amount < 100 else f"${amount:,.0f}"
