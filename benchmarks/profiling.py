"""What holds a goal: the operations that take the time of one call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile

SHOWN = 6
CALLS, SECONDS = 10, 0.2  # as many calls as fit


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that the profiler's own library writes to the error stream."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def heaviest(run: Callable[[], object]) -> list[tuple[str, float]]:
    """The operations with the largest shares of the time of a call."""
    with _quiet(), profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
            if time.perf_counter() - start > SECONDS:
                break
    events = found.key_averages()
    total = sum(e.self_cpu_time_total for e in events)
    first = sorted(events, key=lambda e: -e.self_cpu_time_total)[:SHOWN]
    return [(e.key, e.self_cpu_time_total / total) for e in first]


def sentence(shares: list[tuple[str, float]]) -> str:
    """The shares as words."""
    if not shares:
        return "no operation of torch"
    return ", ".join(
        f"{name.removeprefix('aten::')[:40]} {100 * share:.0f} %" for name, share in shares
    )
