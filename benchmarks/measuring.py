"""Times of several calls taken in turns, and what they are relative to a reference."""

from __future__ import annotations

import random
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from goals import asked
from profiling import heaviest

Run = Callable[[], object]
Row = dict[str, Any]
WARM = 3  # first calls that allocate, and load kernels
LONG = 0.3  # seconds of first calls after which there are no more


@dataclass(frozen=True)
class Settings:
    """How long to measure: `rounds` at most, fewer once `seconds` are over, never under three."""

    rounds: int = 60
    seconds: float = 60.0
    threads: int = 1
    quick: bool = False

    def clock(self) -> Callable[[], float]:
        """Processor time on one thread, so that other work on the machine weighs less."""
        return time.process_time if self.threads == 1 else time.perf_counter


def turns(runs: Mapping[str, Run], settings: Settings) -> dict[str, list[float]]:
    """Seconds of every call in every round; each round has every call once, in a new order."""
    clock, order = settings.clock(), random.Random(0)
    for run in runs.values():
        start = time.perf_counter()
        for _ in range(WARM):
            run()
            if time.perf_counter() - start > LONG:
                break
    times: dict[str, list[float]] = {name: [] for name in runs}
    names, start = list(runs), time.perf_counter()
    for done in range(settings.rounds):
        if done >= 3 and time.perf_counter() - start > settings.seconds:
            break
        order.shuffle(names)
        for name in names:
            begin = clock()
            runs[name]()
            times[name].append(clock() - begin)
    return times


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def rows(
    group: str, case: str, runs: Mapping[str, Run], settings: Settings, reference: str = "plain"
) -> list[Row]:
    """One row a call: median and quartiles, in milliseconds and over the reference's median."""
    times = turns(runs, settings)
    unit = statistics.median(times[reference])
    found = []
    for name, values in times.items():
        low, middle, high = quartiles(values)
        row = {
            "group": group, "case": case, "candidate": name, "threads": settings.threads,
            "ms": 1e3 * middle, "ratio": middle / unit, "low": low / unit, "high": high / unit,
            "rounds": len(values),
        }  # fmt: skip
        if settings.threads == 1 and asked(group, case, name):
            row["profile"] = heaviest(runs[name])
        found.append(row)
    return found


def figure(group: str, case: str, candidate: str, ratio: float | None, note: str = "") -> Row:
    """A row for what is not a time in turns: memory, a failure, a check."""
    return {"group": group, "case": case, "candidate": candidate, "ratio": ratio, "note": note}


def reason(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    first = (str(error).splitlines() or [""])[0][:160]
    return f"fails: {type(error).__name__}: {first} ({last.name})"


def working(
    group: str, case: str, makers: Mapping[str, Callable[[], Run]]
) -> tuple[dict[str, Run], list[Row]]:
    """The calls that work once, and a row with the reason for each that does not."""
    runs: dict[str, Run] = {}
    failed = []
    for name, make in makers.items():
        try:
            run = make()
            run()
            runs[name] = run
        except Exception as error:
            failed.append(figure(group, case, name, None, reason(error)))
    return runs, failed


def once(rows: list[Row]) -> list[Row]:
    """Plain torch and our nets ran beside every library: their first rows stand for all."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(row["candidate"], row)
    return list(found.values())


def repeated(run: Run, times: int) -> Run:
    def many() -> None:
        for _ in range(times):
            run()

    return many


def per_call(found: list[Row], counts: Mapping[str, int], reference: str = "plain") -> list[Row]:
    """The rows of calls that were repeated, brought back to one call."""
    unit = counts.get(reference, 1)
    for row in found:
        often = counts.get(row["candidate"], 1)
        row["ms"] /= often
        for key in ("ratio", "low", "high"):
            row[key] *= unit / often
    return found


def train_step(loss: Callable[[], torch.Tensor], parameters: Any, fused: bool | None = None) -> Run:
    """A step of Adam on a loss; `fused=None` is torch's default."""
    optimizer = torch.optim.Adam(parameters, lr=1e-3, fused=fused)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def plain_step(net: torch.nn.Module, x: Any, y: Any, fused: bool | None = None) -> Run:
    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(net(x), y)

    return train_step(loss, net.parameters(), fused)
