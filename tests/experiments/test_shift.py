"""The tables of docs/predict.md are those of the stored result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.shift import METHODS

ROOT = Path(__file__).parents[2]
ORDER = ["deterministic", "ensemble of 5", *list(METHODS)[1:]]
STRANGERS = {
    f"{what}, {score}": f"AUROC {title} by {score}"
    for what, title in (("letters", "notMNIST"), ("clothes", "Fashion-MNIST"))
    for score in ("entropy", "information")
}
SHIFT = {name: f"{name}, strength 3" for name in ("accuracy", "NLL", "ECE")}
SHIFT = {"accuracy, clean": "accuracy, clean", **SHIFT}


def _cell(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "-"
    digits = 1 if figure["mean"] > 20 else 3
    return f"{figure['mean']:.{digits}f} ± {figure['standard_error']:.{digits}f}"


def table(figures: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """The figures of a result as a table, a line per method."""
    rows = ["| method | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for method in ORDER:
        cells = (_cell(figures.get(f"{column}, {method}")) for column in columns.values())
        rows.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def test_the_page_shows_the_tables_of_the_stored_result() -> None:
    figures = json.loads((ROOT / "results" / "shift" / "mnist.json").read_text())["figures"]
    page = (ROOT / "docs" / "predict.md").read_text()
    assert table(figures, STRANGERS) in page
    assert table(figures, SHIFT) in page
