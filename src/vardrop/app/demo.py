"""The demo: a plain model and a sparse one on scikit-learn's digits, and a report of both."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from vardrop.app.report import report
from vardrop.app.runs import Run, compress, evaluate, fit
from vardrop.app.runs.config import free_directory, prepare
from vardrop.app.runs.run_callbacks import ProgressBar, RunCallback, on_terminal
from vardrop.recipes import sparse_vd

_NET, _OOD = "lenet5", "photos"


def main(out: str | Path | None = None) -> Table:
    """Train both models, evaluate their uncertainty, prune the noisy one, print a table.

    Args:
        out: a directory; runs/demo-<number> by default.
    """
    directory = free_directory("demo") if out is None else Path(out)
    prepare(directory, force=False)
    plain = fit("digits", _NET, None, out=directory / "plain", callback=_bar("plain"))
    sparse = fit(
        "digits",
        _NET,
        sparse_vd(),
        out=directory / "sparse",
        callback=_bar("sparse VD"),
        compare=False,  # the plain model has just been trained
    )
    for run in (plain, sparse):
        evaluate(run, [_OOD])
    compress(sparse)
    table = _table(plain, sparse)
    Console().print(table)
    path = report([sparse.directory, plain.directory], directory / "report.html")
    print(f"report: {path.resolve()}")
    return table


def _bar(label: str) -> RunCallback:
    return ProgressBar(label) if on_terminal() else RunCallback()


def _table(plain: Run, sparse: Run) -> Table:
    sizes, small = sparse.data.sizes, sparse.results["compression"]
    before, after = small["weights_before"], small["weights_after"]
    title = f"scikit-learn digits: {sizes['train']} images to train, {sizes['test']} to test"
    table = Table("model", title=title)
    for column in ("accuracy", "NLL", "ECE", "AUROC photos", "weights left"):
        table.add_column(column, justify="right")
    for name, run in (("plain", plain), ("sparse VD", sparse)):
        scores, ood = run.results["metrics"], run.results["ood"][_OOD]
        numbers = (scores["nll"], scores["ece"], ood["auroc_entropy"])
        cells = (f"{number:.3f}" for number in numbers)
        table.add_row(name, f"{scores['accuracy']:.1%}", *cells, f"{before:,}")
    left = f"{after:,} ({after / before:.1%})"
    table.add_row("pruned", f"{small['test_score_after']:.1%}", "", "", "", left)
    return table
