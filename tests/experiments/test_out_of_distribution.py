"""Out-of-domain detection by epistemic uncertainty: MNIST against letters and clothes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from experiments import ood
from vardrop.data import Images, load_images
from vardrop.errors import VardropError


def _load(name: str, split: str) -> Images:
    try:
        return load_images(name, split)
    except VardropError as error:
        pytest.skip(f"the image sets are not here: {error}")


RESULT = Path(__file__).parents[2] / "results" / "prediction" / "strangers.json"


@pytest.mark.slow
def test_the_table_of_strangers_on_mnist() -> None:
    for name in ("mnist", *ood.OTHERS):
        _load(name, "test")
    figures = ood.out_of_domain(seed=0, epochs=3)["figures"]
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


def test_the_page_shows_the_table_of_the_stored_result() -> None:
    page = (RESULT.parents[2] / "docs" / "predict.md").read_text()
    assert ood.table(json.loads(RESULT.read_text())["figures"]) in page


def test_the_table_on_small_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    data, test = Images(x[:600], y[:600]), Images(x[1200:], y[1200:])
    monkeypatch.setattr(ood, "_WIDTHS", (64, 64, 32, 10))
    rows = ood.strangers(data, test, {"itself": test}, epochs=12, samples=8)
    assert [row.method for row in rows] == list(ood.METHODS)
    assert rows[0].accuracy > 0.6  # deterministic; the others need longer on so few digits
    for row in rows:
        # The same rows and the same seed give the same scores, which nothing can tell apart.
        assert row.auroc == {"itself": 0.5}
    images = {"mnist": data, "notmnist": test, "fashion-mnist": test}
    monkeypatch.setattr(ood, "load_images", lambda name, split="train": images[name])
    figures = ood.out_of_domain(0, epochs=1, samples=2, examples=100)["figures"]
    text = ood.table({k: {"mean": v, "standard_error": None} for k, v in figures.items()})
    assert f"| deterministic | {figures['accuracy, deterministic']:.4f} | " in text
    assert len(figures) == 3 * len(ood.METHODS)
