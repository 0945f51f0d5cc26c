"""Being told to stop: preemption's SIGTERM, or Ctrl-C."""

import os
import signal

from block_recurrent.training import processes


class Stopped(Exception):
    """What was being done need not be finished: a stop was asked for, by what the message names."""


class StopRequest:
    """Remembers SIGTERM or Ctrl-C until the next place to stop; a second one is obeyed at once.

    In a run of several processes JAX has SIGTERM: whichever of them gets it, all stop at the same place.
    """

    def __init__(self):
        self.requested, self.places = "", 0

    def __enter__(self) -> "StopRequest":
        signals = (signal.SIGTERM, signal.SIGINT) if processes.client() is None else ()
        self.previous = {number: signal.signal(number, self._note) for number in signals}
        return self

    def due(self) -> str:
        """What asks for a stop here, if anything does; asked by all processes at the same places, step by step."""
        self.places += 1
        return "SIGTERM" if processes.preempted(self.places) else self.requested

    def check(self) -> None:
        """A place to stop in the middle of something."""
        if asked := self.due():
            raise Stopped(asked)

    def _note(self, number: int, frame) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = signal.Signals(number).name

    def __exit__(self, *exception) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
