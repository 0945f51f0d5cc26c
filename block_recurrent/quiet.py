"""TensorFlow's C++ reports on standard error, whatever one sets, that a machine without a GPU has no GPU."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Holds back standard error, down to the file descriptor; what fails inside still tells all."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        kept = os.dup(2)
        os.dup2(held.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            if failed:
                held.seek(0)
                os.write(2, held.read())


def import_tensorflow():
    """TensorFlow for reading data and writing TensorBoard's files only: it must not take an accelerator's memory."""
    with quiet_stderr():
        import tensorflow

        tensorflow.config.set_visible_devices([], "GPU")
    return tensorflow
