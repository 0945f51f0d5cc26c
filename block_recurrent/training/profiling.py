"""A trace of a few steps, for TensorBoard's profiler or ui.perfetto.dev."""

import jax
from etils import epath

from block_recurrent.data import files

WARM_UP = 3  # steps that compile and settle


class Profile:
    """Traces `steps` steps, once a few have been taken since `begun`; none where `steps` is 0.

    Of several processes the first is traced: in one folder they would write over each other.
    """

    def __init__(self, folder: epath.Path, begun: int, steps: int):
        self.folder, self.mirror, self.tracing = folder, files.Mirror(folder), False
        self.first = begun + WARM_UP
        self.last = self.first + (steps if jax.process_index() == 0 else 0)

    def at(self, step: int) -> None:
        """Told of every step before it is taken."""
        if self.tracing and step >= self.last:
            self.close()
        elif step == self.first < self.last:
            jax.profiler.start_trace(self.mirror.folder, create_perfetto_trace=True)
            self.tracing = True

    def close(self) -> None:
        if self.tracing:
            self.tracing = False
            jax.profiler.stop_trace()
            self.mirror.upload()
            print(f"profile: tensorboard --logdir={self.folder}, or perfetto_trace.json.gz below it in ui.perfetto.dev")
