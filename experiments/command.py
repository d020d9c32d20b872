"""`vardrop reproduce`: run an experiment, list them all, check their quick versions."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich import progress
from rich.console import Console
from rich.table import Table

from experiments import (
    cifar,
    concrete,
    demo,
    estimators,
    gal,
    gap,
    havasi,
    kingma,
    lee_bb,
    lee_dropmax,
    louizos,
    molchanov,
    neklyudov,
    neklyudov_uses,
    packing,
    shift,
    slim,
    slim_cnns,
    tables,
    text,
    uci,
    uncertainty,
)
from experiments.page import rows, write_pages
from experiments.readme import write_tables
from experiments.runner import (
    Experiment,
    Function,
    experiments,
    finished,
    forget,
    named,
    outside,
    reproduce,
    result_path,
    reword,
)
from experiments.trainings import ProgressCallback
from experiments.verdicts import load_items

# What descriptions may name; another experiment is a function here and a TOML file.
FUNCTIONS: dict[str, Function] = {
    function.__name__: function
    for function in (
        kingma.kl_approximations,
        kingma.gradient_variances,
        kingma.epoch_seconds,
        kingma.width_errors,
        kingma.averaged_errors,
        kingma.plain_levels,
        molchanov.sparse_mnist,
        molchanov.random_labels,
        louizos.packed_bytes,
        louizos.fewer_channels,
        havasi.coded_bytes,
        lee_bb.sparse_units,
        lee_dropmax.class_heads,
        lee_dropmax.gain_by_count,
        neklyudov.variance_lenet5,
        neklyudov.parameterisation,
        neklyudov.selective_propagation,
        neklyudov.noise_tolerance,
        neklyudov_uses.attacks,
        neklyudov_uses.exploration,
        neklyudov_uses.variance_toys,
        shift.shifted_digits,
        shift.tuned_digits,
        concrete.line_fits,
        tables.defaults,
        uci.standard_splits,
        gal.identity,
        gal.toy,
        slim.slim_beside_others,
        slim.slim_against_simple,
        slim_cnns.slim_cnns,
        cifar.narrow_cifar,
        uncertainty.tuned_resnet,
        packing.compare_packing,
        lee_dropmax.tuned_heads,
        estimators.compare_estimators,
        demo.compare_demo,
        gap.score_gap,
        text.character_lstm,
        text.smaller_transformer,
    )
}


def show(directory: Path, results: Path) -> None:
    """One line per experiment: row, name, seeds done, minutes expected, what and whose."""
    known = experiments(directory)
    width = max(len(name) for name in known)
    for name, e in known.items():
        done = len(finished(e, result_path(e, results)))
        seeds = "done" if done == len(e.seeds) else f"{done}/{len(e.seeds)}"
        print(
            f"{e.row or '-':>2}  {name:<{width}}  {seeds:>4}  {e.minutes:>4.0f} min  "
            f"{e.title} [{e.paper}; {e.source}]"
        )


def run(directory: Path, name: str, results: Path, force: bool) -> None:
    """Run one experiment to its end, from where it stands."""
    torch.set_flush_denormal(True)
    experiment = named(experiments(directory), name)
    out = result_path(experiment, results)
    if force:
        forget(out)
    with _progress(name, experiment.minutes) as tell:
        *_, result = reproduce(experiment, FUNCTIONS, out, tell=tell)
    _print_figures(experiment, result["figures"])
    print(f"result: {out}")


def quick(directory: Path, only: str | None, results: Path | None, force: bool) -> int:
    """Run the quick versions and check their bounds; 1 where a figure lies outside."""
    torch.set_flush_denormal(True)
    known = experiments(directory)
    chosen = list(known.values()) if only is None else [named(known, only)]
    failed = 0
    with TemporaryDirectory() as temporary:
        for experiment in chosen:
            out = result_path(experiment, results or Path(temporary))
            if force:
                forget(out)
            failed += not _check(experiment, out, table=only is not None)
    return 1 if failed else 0


def page(directory: Path, results: Path, docs: Path) -> None:
    """Write results.md, a page per paper and the plots from the results that exist."""
    described = experiments(directory)
    for experiment in described.values():
        reword(experiment, result_path(experiment, results))
    table = rows(described, results)
    print(write_pages(table, load_items(directory / "judged.toml", table), docs))
    if (directory / "readme.toml").is_file():
        write_tables(docs.parent, table)


def _check(experiment: Experiment, out: Path, table: bool) -> bool:
    """Run one quick version and print its figures: all of them, or those that have bounds."""
    start = time.monotonic()
    with _progress(f"quick {experiment.name}") as tell:
        (result,) = reproduce(experiment, FUNCTIONS, out, quick=True, tell=tell)
    figures, took = result["figures"], time.monotonic() - start
    wrong = outside(figures, experiment.bounds)
    bounded = ", ".join(f"{key} = {figures[key]['mean']:.4g}" for key in experiment.bounds)
    if table:
        _print_figures(experiment, figures, bounds=True)
    print(f"{experiment.name}: {'failed' if wrong else 'ok'} ({took:.0f} s): {bounded}", flush=True)
    for line in wrong:
        print(f"{experiment.name}: {line}", flush=True)
    return not wrong


def _print_figures(experiment: Experiment, found: Mapping[str, Any], bounds: bool = False) -> None:
    """What was measured, beside the paper's figures or, of a quick version, its own bounds."""
    table = Table(title=experiment.name)
    table.add_column("figure")
    for column in ("ours", "bounds") if bounds else ("ours", "standard error", "paper"):
        table.add_column(column, justify="right")
    for key, value in found.items():
        if bounds:
            low, high = experiment.bounds.get(key, (None, None))
            more = ["" if low is None else f"{low:.4g} to {high:.4g}"]
        else:
            shown = (value["standard_error"], experiment.expected.get(key))
            more = ["" if v is None else f"{v:.4g}" for v in shown]
        table.add_row(key, f"{value['mean']:.4g}", *more)
    Console().print(table)


@contextmanager
def _progress(name: str, minutes: float | None = None) -> Iterator[ProgressCallback | None]:
    """A bar with the time left on a terminal; elsewhere lines, where minutes are expected."""
    if not sys.stderr.isatty():
        yield None if minutes is None else _Lines(name, minutes)
        return
    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        speed_estimate_period=1800,  # an epoch may take minutes
    ) as bar:
        task = bar.add_task(name, total=1.0)
        yield lambda done, text: bar.update(task, completed=done, description=f"{name} {text}")


class _Lines:
    """Prints how far a run is, once a minute and after every seed."""

    def __init__(self, name: str, minutes: float) -> None:
        self.name, self.minutes = name, minutes
        self.first: tuple[float, float] | None = None  # when the first news came, and how far
        self.said = time.monotonic()

    def __call__(self, done: float, text: str) -> None:
        now = time.monotonic()
        then, before = self.first = self.first or (now, done)
        if now - self.said < 60 and not text.endswith("done"):
            return
        speed = (done - before) / max(now - then, 1e-9)
        left = (1 - done) / speed / 60 if speed else self.minutes * (1 - done)
        print(f"{self.name}: {done:.0%}, {text}; about {left:.0f} min left", flush=True)
        self.said = now
