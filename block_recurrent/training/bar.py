"""The last lines of a terminal while a run trains: a bar of its steps, and below it the figures."""

import time
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

GAP = "   "


class Bar:
    """Stays below everything that is printed; what `show` and `advance` are given is drawn four times a second."""

    def __init__(self, console: Console, steps: int, step: int):
        self.console, self.steps, self.step = console, steps, step
        self.state, self.figures = "starting", ()
        self.begun, self.first, self.left = time.monotonic(), None, ""
        self.live = Live(get_renderable=self.screen, console=console, refresh_per_second=4)
        self.live.start()

    def show(self, state: str, figures: Sequence[str], now: bool = False) -> None:
        """Changes what the run does, and the figures; with `now` at once on the screen."""
        self.state, self.figures = state, figures
        if now:
            self.live.refresh()

    def screen(self) -> Group:
        """The lines, in the terminal's width of this moment."""
        head = Table.grid(expand=True, padding=(0, 1))
        for column in ({"min_width": 10}, {"ratio": 1}, {}):
            head.add_column(no_wrap=True, **column)
        bar = ProgressBar(total=self.steps, completed=self.step)
        head.add_row(self.state, bar, f"{self.step:,}/{self.steps:,} steps  {self.left or f'for {self.elapsed()}'}")
        lines = flowed(self.figures, self.console.width)
        return Group(head, *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))

    def advance(self, step: int) -> None:
        """Moves the bar; the time that is left follows from all steps but the first, in which the program compiles."""
        now = time.monotonic()
        self.step = step
        if self.first is None:
            self.first = (now, step)
        elif step > self.first[1]:
            each = (now - self.first[0]) / (step - self.first[1])
            self.left = f"{in_seconds(each * (self.steps - step))} left"

    def close(self, done: bool) -> None:
        """Leaves on the screen how it ended, and after what time."""
        self.state, self.left = "done" if done else "stopped", f"in {self.elapsed()}"
        self.live.stop()

    def elapsed(self) -> str:
        return in_seconds(time.monotonic() - self.begun)


def in_seconds(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def flowed(pieces: Sequence[str], width: int) -> list[str]:
    """Fills lines with pieces; a line breaks only between two of them."""
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + len(GAP) + len(piece) <= width:
            lines[-1] += GAP + piece
        else:
            lines.append(piece)
    return lines
