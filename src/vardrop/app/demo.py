"""The demo: a plain net and its sparse twin on scikit-learn's digits, and a report of both."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vardrop.app.report import report
from vardrop.app.runs import Run, compress, evaluate, fit
from vardrop.app.runs.callbacks import Observer, ProgressBar, on_terminal
from vardrop.app.runs.config import free_directory, prepare
from vardrop.recipes import sparse_vd

_NET, _OUT_OF_DISTRIBUTION = "lenet5", "photos"


def main(out: str | Path | None = None) -> Table:
    """Train both nets, look at their uncertainty, prune the noisy one, print a table.

    Args:
        out: a directory; runs/demo-<number> by default.
    """
    directory = free_directory("demo") if out is None else Path(out)
    prepare(directory, force=False)
    plain = fit("digits", _NET, None, out=directory / "plain", observer=_bar("plain"))
    sparse = fit(
        "digits",
        _NET,
        sparse_vd(),
        out=directory / "sparse",
        observer=_bar("sparse VD"),
        compare=False,  # the plain net has just been trained
    )
    for run in (plain, sparse):
        evaluate(run, [_OUT_OF_DISTRIBUTION])
    compress(sparse)
    table = _table(plain, sparse)
    Console().print(table)
    path = report([sparse.directory, plain.directory], directory / "report.html")
    print(f"report: {path.resolve()}")
    return table


def _bar(label: str) -> Observer:
    return ProgressBar(label) if on_terminal() else Observer()


def _table(plain: Run, sparse: Run) -> Table:
    sizes = sparse.data.sizes
    table = Table(
        title=f"scikit-learn digits: {sizes['train']} images to train, {sizes['test']} to test"
    )
    # The area under the ROC curve tells digits from patches of photographs by their entropy.
    for column in ("net", "accuracy", "NLL", "ECE", "AUROC photos", "weights left"):
        table.add_column(column, justify="left" if column == "net" else "right")
    small = sparse.results["compression"]
    before, after = small["weights_before"], small["weights_after"]
    _add_row(table, "plain", plain, f"{before:,}")
    _add_row(table, "sparse VD", sparse, f"{before:,}")
    accuracy = f"{100 * small['test_score_after']:.1f} %"
    left = f"{after:,} ({100 * after / before:.1f} %)"
    table.add_row("pruned", accuracy, "", "", "", left)
    return table


def _add_row(table: Table, name: str, run: Run, weights: str) -> None:
    scores, apart = run.results["metrics"], run.results["ood"][_OUT_OF_DISTRIBUTION]
    table.add_row(
        name,
        f"{100 * scores['accuracy']:.1f} %",
        f"{scores['nll']:.3f}",
        f"{scores['ece']:.3f}",
        f"{apart['auroc_entropy']:.3f}",
        weights,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="a directory; runs/demo-<number> by default")
    main(parser.parse_args().out)
