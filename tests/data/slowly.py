"""A source that takes its time, so that a test can kill it half-way."""

import time
from dataclasses import dataclass

from block_recurrent.data.text_files import TextFiles


@dataclass(frozen=True)
class SlowTextFiles(TextFiles):
    def read(self, unit, dropped):
        time.sleep(0.5)
        yield from super().read(unit, dropped)
