"""Out-of-distribution detection by epistemic uncertainty: MNIST against letters and clothes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from experiments import out_of_distribution as ood, trainings
from vardrop.data import Images, load_images
from vardrop.errors import VardropError

ROOT = Path(__file__).parents[2]


def _load(name: str, split: str) -> Images:
    try:
        return load_images(name, split)
    except VardropError as error:
        pytest.skip(f"the image sets are not here: {error}")


def _cell(figure: Mapping[str, Any]) -> str:
    error = figure["standard_error"]
    return f"{figure['mean']:.4f}" + ("" if error is None else f" ± {error:.4f}")


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures of a result as the Markdown table of docs/predict.md, a line per method."""
    columns = ["accuracy", *(f"AUROC {title}" for title in ood.OTHERS.values())]
    rows = ["| method | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for method, make in ood.METHODS.items():
        normed = any(isinstance(m, nn.BatchNorm1d) for m in make().modules())
        cells = (_cell(figures[f"{column}, {method}"]) for column in columns)
        rows.append(f"| {method}{' (with BatchNorm)' * normed} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


@pytest.mark.slow
def test_the_table_on_mnist() -> None:
    for name in ("mnist", *ood.OTHERS):
        _load(name, "test")
    figures = ood.five_methods(seed=0, epochs=3)["figures"]
    print(figures)
    for key, value in figures.items():
        # Better than a coin by far: six standard errors are 0.02 for 10 000 rows a side.
        assert value > (0.96 if key.startswith("accuracy") else 0.52), key
    for title in ood.OTHERS.values():
        known = figures[f"AUROC {title}, deterministic"]
        assert all(
            figures[f"AUROC {title}, {method}"] > known
            for method in ("dropout", "sparse VD", "variance net")
        )


def test_the_page_shows_the_table_of_the_stored_result_and_names_the_net_with_batchnorm() -> None:
    page = (ROOT / "docs" / "predict.md").read_text()
    result = ROOT / "results" / "out_of_distribution" / "mnist.json"
    assert table(json.loads(result.read_text())["figures"]) in page
    assert "| variance net (with BatchNorm) |" in page


def test_the_table_on_small_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    data, test = Images(x[:600], y[:600]), Images(x[1200:], y[1200:])
    monkeypatch.setattr(ood, "_WIDTHS", (64, 64, 32, 10))
    lines = ood.lines(data, test, {"itself": test}, epochs=12, samples=8)
    assert [line.method for line in lines] == list(ood.METHODS)
    assert lines[0].accuracy > 0.6  # deterministic; the others need longer on so few digits
    for line in lines:
        # The same rows and the same seed give the same scores, which nothing can tell apart.
        assert line.auroc == {"itself": 0.5}
    sets = {"mnist": data, "notmnist": test, "fashion-mnist": test}
    monkeypatch.setattr(trainings, "load_images", lambda name, split="train": sets[name])
    figures = ood.five_methods(0, epochs=1, samples=2, examples=100)["figures"]
    text = table({k: {"mean": v, "standard_error": None} for k, v in figures.items()})
    assert f"| deterministic | {figures['accuracy, deterministic']:.4f} | " in text
    assert len(figures) == 3 * len(ood.METHODS)
