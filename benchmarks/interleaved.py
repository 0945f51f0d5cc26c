"""Timing on a shared, noisy machine: cases take turns, and their medians are compared."""

import statistics
import time
from collections.abc import Callable


def medians(cases: dict[str, Callable[[], None]], repetitions: int) -> dict[str, float]:
    """Median seconds of each case over rounds in which every case runs once; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(repetitions + 1):
        for name, run in cases.items():
            began = time.perf_counter()
            run()
            if round_number:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}
