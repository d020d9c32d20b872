"""The page of results: its lines, its plots, and that docs/ holds what results/ says."""

import json
from pathlib import Path

import pytest

from experiments import page
from experiments.page import picture, plot, rows, text, write_page
from experiments.runner import experiments, finished, reproduce, result_path
from tests.experiments.toy import describe, toy_training

ROOT = Path(__file__).parents[2]
CURVES = '[plot]\nx = "epoch"\ny = ["loss"]\nlog = "y"\n'
BARS = '[plot]\nbars = "s"\n'


@pytest.fixture
def folder(tmp_path):
    """Descriptions of a run that is done, one that is half done and one that is not."""
    described = describe(tmp_path / "experiments", CURVES, "toy/done")
    describe(described, BARS, "toy/half")
    describe(described, CURVES, "toy/never")
    known = experiments(described)
    for name, seeds in (("toy/done", 3), ("toy/half", 1)):
        found = reproduce(known[name], {"toy_training": toy_training}, tmp_path / f"{name}.json")
        for _ in range(seeds):
            next(found)
    return tmp_path


def table(folder):
    return rows(experiments(folder / "experiments"), folder)


def test_a_line_has_the_papers_figure_beside_ours(folder):
    page = text(table(folder))
    done, half, never = (line for line in page.splitlines() if line.startswith("| 3 |"))
    cells = [cell.strip() for cell in done.split("|")[1:-1]]
    assert cells[:4] == ["3", "[A toy](#toy-done)", "loss", "0.5"]
    assert "±" in cells[4]
    assert cells[5] == "3"
    assert "±" not in half
    assert "| 1 of 3 |" in half
    assert "not run yet" in never
    assert "For tests." in page
    assert "| seed | 1.00 ± 0.58 |" in page
    assert page.count("![A toy]") == 2


@pytest.mark.parametrize("mean, error, written", [
    (4913.6, 896.4, "4 910 ± 900"), (1.6261, 0.1312, "1.63 ± 0.13"),
    (98.2, 0.0312, "98.200 ± 0.031"), (8.331e-15, 1.2e-15, "8.3e-15 ± 1.2e-15"),
    (9.8, 0.0, "9.8 ± 0"), (-64321.0, None, "-64 321"), (0.99876, None, "0.9988"),
])  # fmt: skip
def test_figures_have_the_digits_that_their_error_allows(folder, mean, error, written):
    (row, *_) = table(folder)
    row["result"]["figures"]["seed"] = {"mean": mean, "standard_error": error}
    assert f"| seed | {written} |" in text([row])


def test_the_headline_shows_figures_the_paper_has_not(folder):
    (row, *_) = table(folder)
    page = text([row | {"headline": ("seed",)}])
    assert "| | | seed | - | 1.00 ± 0.58 |" in page
    assert "| figure | ours |" not in page


def test_plots_name_the_digest_of_their_data(folder):
    found = table(folder)
    path = write_page(found, folder / "docs")
    assert path.read_text() == text(found)
    for row in found[:2]:
        png = (folder / "docs" / "results" / picture(row)).read_bytes()
        assert png.startswith(b"\x89PNG")
        assert row["digest"].encode() in png
        assert row["digest"] in path.read_text()
    assert plot(found[2]) is None
    assert len(list((folder / "docs" / "results").iterdir())) == 2


def test_the_page_in_docs_is_up_to_date():
    found = rows(experiments(ROOT / "experiments"), ROOT / "results")
    remedy = "run `vardrop reproduce --page`"
    assert (ROOT / "docs" / "results.md").read_text() == text(found), remedy
    drawn = [row for row in found if row["result"] is not None and row["plot"]]
    for row in drawn:
        png = (ROOT / "docs" / "results" / picture(row)).read_bytes()
        assert row["digest"].encode() in png, f"{picture(row)} is out of date: {remedy}"
    assert {p.name for p in (ROOT / "docs" / "results").glob("*.png")} == set(map(picture, drawn))


def test_every_figure_of_the_table_was_measured():
    for row in rows(experiments(ROOT / "experiments"), ROOT / "results"):
        if row["result"] is not None:
            assert {*row["expected"], *row["headline"]} <= set(row["result"]["figures"]), row


def test_results_have_the_words_of_their_descriptions():
    for experiment in experiments(ROOT / "experiments").values():
        path = result_path(experiment, ROOT / "results")
        if not finished(experiment, path):
            continue
        words = json.loads(path.read_text())
        for key in ("name", "title", "paper", "source", "expected", "notes"):
            assert words[key] == getattr(experiment, key), f"{path}: `vardrop reproduce --page`"


def test_every_result_has_a_description():
    known = experiments(ROOT / "experiments").values()
    described = {result_path(e, ROOT / "results") for e in known}
    assert set((ROOT / "results").glob("*/*.json")) <= described


def test_tables_on_the_standard_splits_stand_side_by_side():
    def row(name, ours, published):
        figures = {
            "NLL, sparse VD": {"mean": ours, "standard_error": 0.01},
            "NLL, plain": {"mean": 3.0, "standard_error": 0.1},
            "RMSE, plain": {"mean": 9.0, "standard_error": 0.1},
        }
        expected = dict(zip(("NLL, MC dropout", "NLL, ensemble"), published, strict=True))
        described = {"name": f"uci/{name}", "function": "standard_splits", "expected": expected}
        return {**described, "result": {"figures": figures}}

    table = [row("a", 1.0, (1.2, 1.1)), row("b", 2.0, (2.1, 1.9)), row("c", 0.0, (0.0, 1.0))]
    found = page._splits([*table, {**row("d", 1.0, (2.0, 2.0)), "result": None}])
    assert "on 1 of 3 tables" in found
    assert "| method | [a](#uci-a) | [b](#uci-b) | [c](#uci-c) |" in found
    assert "| sparse VD | 1.000 ± 0.010 | 2.000 ± 0.010 | 0.000 ± 0.010 |" in found
    assert "| published: ensemble | 1.1 | 1.9 | 1 |" in found
    assert "RMSE" not in found
