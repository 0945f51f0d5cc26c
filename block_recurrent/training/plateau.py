"""What the held-out losses of a run decide: a lower learning rate, and when to stop.

Every decision is a function of the losses so far alone, oldest first: a run that goes on decides as it did before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from block_recurrent.ranges import SHARE, WHOLE_0, WHOLE_1, Range

RANGES = {"factor": Range(above=0, most=1), "floor": SHARE, "after": WHOLE_0}
RANGES |= {"over": WHOLE_1, "patience": WHOLE_1, "stop_after": WHOLE_1}


@dataclass(frozen=True)
class Plateau:
    """Multiplies the learning rate by `factor` after an evaluation, later than the first `after` of them, whose loss

    - is larger than each of the `over` before it: by default the rule of the R-Transformer's authors (Wang et al. 2019,
      the code of their experiments on music), for whom an evaluation is an epoch; or
    - ends `patience` evaluations in a row without a new best, counted anew after each reduction (in PyTorch's
      ReduceLROnPlateau patience is one less).

    A rule that is None does not apply. The product of all factors stays at `floor` or above. The run stops when
    `stop_after` evaluations in a row brought no new best.
    """

    factor: float = 0.1
    over: int | None = 3
    after: int = 10
    patience: int | None = None
    floor: float = 0.0
    stop_after: int | None = None

    def __post_init__(self):
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None or name in ("factor", "after", "floor"):
                allowed.check(f"Plateau.{name}", value)

    def scale(self, losses: Sequence[float]) -> float:
        """What the learning rate is multiplied by after these evaluations."""
        scale, reduced = 1.0, 0  # `reduced`: how many evaluations there were at the last reduction
        for count in range(self.after + 1, len(losses) + 1):
            if self._is_due(losses[:count], count - reduced):
                scale, reduced = max(scale * self.factor, self.floor), count
        return scale

    def _is_due(self, losses: Sequence[float], since: int) -> bool:
        """Whether the last of the losses, the `since`-th after a reduction, brings one."""
        before = losses[-self.over - 1 : -1] if self.over is not None else ()
        has_risen = len(before) > 0 and losses[-1] > max(before)
        has_stalled = self.patience is not None and min(since, since_best(losses)) >= self.patience
        return has_risen or has_stalled

    def stops(self, losses: Sequence[float]) -> bool:
        """Whether the run is over after these evaluations."""
        return self.stop_after is not None and len(losses) > 0 and since_best(losses) >= self.stop_after


STEADY = Plateau(over=None)  # never reduces, never stops


def best(losses: Sequence[float]) -> int:
    """The place of the lowest loss, the first of equals."""
    return min(range(len(losses)), key=losses.__getitem__)


def since_best(losses: Sequence[float]) -> int:
    """How many evaluations there were after the best."""
    return len(losses) - 1 - best(losses)
