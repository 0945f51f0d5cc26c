"""Being told to stop: preemption's SIGTERM, or Ctrl-C."""

import os
import signal


class StopRequest:
    """Remembers SIGTERM or Ctrl-C until the current step is done; a second one is obeyed at once."""

    def __enter__(self) -> "StopRequest":
        self.requested = ""
        self.previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _note(self, number: int, frame) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = signal.Signals(number).name

    def __exit__(self, *exception) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
