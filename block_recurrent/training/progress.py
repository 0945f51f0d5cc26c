"""A small file that shows from outside that a run moves: every few seconds, not only at checkpoints.

BLOCK_RECURRENT_PROGRESS=/some/file python -m block_recurrent.train ...
    {"time": 1763503200.1, "state": "training", "step": 120, "steps": 1000}
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

VARIABLE = "BLOCK_RECURRENT_PROGRESS"  # names the file; without it none is written
EVERY = 5.0  # seconds between two signs of life in the same state


class ProgressFile:
    """Rewrites the file as a whole: a reader never meets half of it. A run goes on where it cannot be written."""

    def __init__(self, place: str | None, steps: int):
        self.place, self.steps = place and Path(place), steps
        self.written, self.failed = 0.0, False
        self.tell("starting", 0)

    def tell(self, state: str, step: int) -> None:
        """Writes the state of the run, and the last step that it has finished."""
        self.state, self.step, self.written = state, step, time.time()
        if self.place is None:
            return
        about = {"time": self.written, "state": state, "step": step, "steps": self.steps}
        beside = self.place.with_name(f"{self.place.name}.new")
        try:
            self.place.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(about) + "\n")
            beside.replace(self.place)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            if not self.failed:
                print(f"{VARIABLE}: {self.place} cannot be written ({error}); the run goes on", file=sys.stderr)
            self.failed = True

    def alive(self, step: int) -> None:
        """Writes the same state again where the last sign of life is some seconds old."""
        if time.time() - self.written >= EVERY:
            self.tell(self.state, step)


def progress_file(steps: int, active: bool) -> ProgressFile:
    """Returns the file that the environment names; only the main process has one that is written."""
    return ProgressFile(os.environ.get(VARIABLE) if active else None, steps)
