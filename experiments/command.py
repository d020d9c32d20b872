"""`vardrop reproduce`: run an experiment, list them all, check their quick versions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.descriptions import Experiment, experiments, named
from experiments.page import write_page
from experiments.registry import FUNCTIONS
from experiments.rows import rows
from experiments.runner import finished, forget, outside, reproduce, result_path
from experiments.watch import Tell
from vardrop.training.observers import on_terminal


def show(directory: Path, results: Path) -> None:
    """One line an experiment: what it is, how long it takes, what is done."""
    known = experiments(directory)
    done = {n: len(finished(e, result_path(e, results))) for n, e in known.items()}
    _list(list(known.values()), done)


def run(directory: Path, name: str, results: Path, force: bool) -> None:
    """Run one experiment to its end, from where it stands."""
    experiment = named(experiments(directory), name)
    out = result_path(experiment, results)
    if force:
        forget(out)
    with _progress(name, experiment.minutes) as tell:
        *_, result = reproduce(experiment, FUNCTIONS, out, tell=tell)
    _figures(name, result["figures"], experiment.expected)
    print(f"result: {out}")


def quick(directory: Path, only: str | None, results: Path | None, force: bool) -> int:
    """Run the quick versions and check their bounds; 1 where a figure lies outside."""
    known = experiments(directory)
    chosen = list(known.values()) if only is None else [named(known, only)]
    failed = 0
    with TemporaryDirectory() as temporary:
        for experiment in chosen:
            out = result_path(experiment, results or Path(temporary))
            if force:
                forget(out)
            start = time.monotonic()
            with _progress(f"quick {experiment.name}") as tell:
                (result,) = reproduce(experiment, FUNCTIONS, out, quick=True, tell=tell)
            wrong = outside(result["figures"], experiment.bounds)
            took = time.monotonic() - start
            print(f"{experiment.name}: {'failed' if wrong else 'ok'} ({took:.0f} s)", flush=True)
            for line in wrong:
                print(f"{experiment.name}: {line}", flush=True)
            failed += bool(wrong)
    return 1 if failed else 0


def page(directory: Path, results: Path, docs: Path) -> None:
    """Write results.md and its plots from the results that there are."""
    print(write_page(rows(experiments(directory), results), docs))


@contextmanager
def _progress(name: str, minutes: float | None = None) -> Iterator[Tell | None]:
    """A bar with the time left on a terminal; elsewhere lines, where minutes are expected."""
    if not on_terminal():
        yield None if minutes is None else _Lines(name, minutes)
        return
    from rich import progress

    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        speed_estimate_period=1800,  # an epoch may take minutes
    ) as bar:
        task = bar.add_task(name, total=1.0)
        yield lambda share, text: bar.update(task, completed=share, description=f"{name} {text}")


class _Lines:
    """Prints how far a run is, once a minute and after every seed."""

    def __init__(self, name: str, minutes: float) -> None:
        self.name, self.minutes = name, minutes
        self.first: tuple[float, float] | None = None  # when the first news came, and the share
        self.said = time.monotonic()

    def __call__(self, share: float, text: str) -> None:
        now = time.monotonic()
        then, before = self.first = self.first or (now, share)
        if now - self.said < 60 and not text.endswith("done"):
            return
        speed = (share - before) / max(now - then, 1e-9)
        left = (1 - share) / speed / 60 if speed else self.minutes * (1 - share)
        print(f"{self.name}: {share:.0%}, {text}; about {left:.0f} min left", flush=True)
        self.said = now


def _list(found: Sequence[Experiment], done: Mapping[str, int]) -> None:
    """The experiments of the papers: row, name, seeds done, minutes expected, what and whose."""
    width = max(len(e.name) for e in found)
    for e in found:
        seeds = "done" if done[e.name] == len(e.seeds) else f"{done[e.name]}/{len(e.seeds)}"
        print(
            f"{e.row or '-':>2}  {e.name:<{width}}  {seeds:>4}  {e.minutes:>4.0f} min  "
            f"{e.title} [{e.paper}; {e.source}]"
        )


def _figures(name: str, found: Mapping[str, Any], expected: Mapping[str, float]) -> None:
    """What an experiment measured, beside the paper's figures."""
    table = Table(title=name)
    table.add_column("figure")
    for column in ("ours", "standard error", "paper"):
        table.add_column(column, justify="right")
    for key, value in found.items():
        error, paper = value["standard_error"], expected.get(key)
        cells = ("" if v is None else f"{v:.4g}" for v in (value["mean"], error, paper))
        table.add_row(key, *cells)
    Console().print(table)
