"""A contender in a process of its own: it runs once for every line it reads, and answers with its seconds.

Imported by scripts that run under several interpreters and source trees: it needs the standard library alone.
"""

import json
import resource
import sys
import time
from collections.abc import Callable


def serve(run: Callable[[], object], amount: int, parameters: int = 0) -> None:
    """Warms up, then answers each line of standard input; `amount` is the tokens that one run makes or learns from."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # packages print what they like
    for _ in range(2):
        run()

    def answer(**values) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"peak_megabytes": peak, **values}), file=answers, flush=True)

    answer(amount=amount, parameters=parameters)
    for _ in sys.stdin:
        began = time.perf_counter()
        run()
        answer(seconds=time.perf_counter() - began)
