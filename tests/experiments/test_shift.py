"""The tables of docs/predict.md are those of the stored result."""

import json
from pathlib import Path

import pytest

from experiments.shift import METHODS

ROOT = Path(__file__).parents[2]
OOD = {
    f"{what}, {score}": f"AUROC {data} by {score}"
    for what, data in (("letters", "notMNIST"), ("clothes", "Fashion-MNIST"))
    for score in ("entropy", "information")
}
SHIFT = {name: f"{name}, strength 3" for name in ("accuracy", "NLL", "ECE")}


@pytest.mark.parametrize("columns", [OOD, {"accuracy, clean": "accuracy, clean", **SHIFT}])
def test_the_page_shows_the_tables_of_the_stored_result(columns):
    figures = json.loads((ROOT / "results/shift/mnist.json").read_text())["figures"]

    def cell(name):
        if name not in figures:
            return "-"
        mean, error = figures[name]["mean"], figures[name]["standard_error"]
        digits = 1 if mean > 20 else 3
        return f"{mean:.{digits}f} ± {error:.{digits}f}"

    lines = [f"| method | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    lines += [
        f"| {method} | {' | '.join(cell(f'{key}, {method}') for key in columns.values())} |"
        for method in ("deterministic", "ensemble of 5", *list(METHODS)[1:])
    ]
    assert "\n".join(lines) in (ROOT / "docs/predict.md").read_text()
