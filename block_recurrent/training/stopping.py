"""Being told to stop: preemption's SIGTERM, or Ctrl-C."""

import os
import signal

from block_recurrent.training import processes


class StopRequest:
    """Remembers SIGTERM or Ctrl-C until the current step is done; a second one is obeyed at once.

    In a run of several processes JAX has SIGTERM: whichever of them gets it, all stop at the same step.
    """

    def __enter__(self) -> "StopRequest":
        self.requested = ""
        signals = (signal.SIGTERM, signal.SIGINT) if processes.client() is None else ()
        self.previous = {number: signal.signal(number, self._note) for number in signals}
        return self

    def due(self, step: int) -> str:
        """What asks for a stop at this step, if anything does; asked once at every step."""
        return "SIGTERM" if processes.preempted(step) else self.requested

    def _note(self, number: int, frame) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = signal.Signals(number).name

    def __exit__(self, *exception) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
