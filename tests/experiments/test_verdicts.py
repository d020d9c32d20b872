"""Verdicts on the papers' results, as computed from both values."""

from pathlib import Path

import pytest

from experiments.page import rows
from experiments.runner import experiments
from experiments.verdicts import Item, count_verdicts, lead, load_items
from tests.refusals import assert_refused

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("direction, paper, ours, error, expected", [
    ("lower", 2.0, 1.5, 0, 1),
    ("lower", 2.0, 1.5, 0.3, 0),  # within two standard errors
    ("lower", 2.0, 2.5, 0.3, 0),
    ("lower", 2.0, 2.5, 0.1, -1),
    ("higher", 68, 68.4, 0, 0),  # 68 is anything from 67.5 to 68.5
    ("higher", 68, 67.4, 0, -1),
    ("higher", 68, 70.0, 0, 1),
    ("lower", 1.92, 1.924, 0, 0),
    ("lower", 1.92, 1.93, 0, -1),
    ("lower", 1.0, 1.4, 0, -1),  # not half a unit of 1, which may be 1.0
    ("same", 10.0, 10.9, 0, 0),
    ("same", 10.0, 11.1, 0, -1),
    ("same", 10.0, 11.1, 0.6, 0),
    ("same", 0.0, 8e-15, 0, 0),
    ("same", 0.0, 1e-6, 0, -1),
    ("lower", 0.0, 3.7, 2.7, 0),
])  # fmt: skip
def test_a_lead_is_more_than_the_slack(direction, paper, ours, error, expected):
    assert lead(direction, paper, ours, error) == expected


def item(values, errors=(None, None)):
    """An item of two values, which are 2 (lower is better) and 10 (higher) in the paper."""
    names = ("error, %", "size")
    results = {
        name: {"mean": value, "standard_error": error}
        for name, value, error in zip(names, values, errors, strict=True)
    }
    row = {"expected": dict(zip(names, (2.0, 10), strict=True))}
    return Item("a", row | {"result": {"figures": results}}, dict(zip(names, ("lower", "higher"), strict=True)), "")  # fmt: skip


@pytest.mark.parametrize("values, verdict", [
    ((1.0, 10), "better"), ((2.0, 10), "reached"), ((1.0, 5), "trade-off"), ((2.0, 5), "behind"),
])  # fmt: skip
def test_the_values_of_an_item_are_judged_together(values, verdict):
    assert item(values).verdict == verdict
    assert count_verdicts([item(values)])[verdict] == 1
    missing = Item("a", {"result": None}, {}, "")
    assert missing.verdict == "not run"


def test_the_variance_is_pooled_over_values_of_one_kind():
    names = ("none, 100 units", "binary, 100 units", "gain")
    errors = {"none, 100 units": 0.0, "binary, 100 units": 0.2, "gain": 9.0}
    figures = {n: {"mean": 1.25, "standard_error": errors[n]} for n in names}
    row = {"expected": dict.fromkeys(names, 1.0), "result": {"figures": figures}}
    judged = Item("a", row, {"none, 100 units": "lower"}, "")
    assert judged.verdict == "reached"  # 2 sqrt(0.04 / 2) = 0.28
    del row["expected"]["binary, 100 units"]
    assert judged.verdict == "behind"


def test_every_item_that_is_not_reached_has_a_cause():
    table = rows(experiments(ROOT / "experiments"), ROOT / "results")
    items = load_items(ROOT / "experiments" / "judged.toml", table)
    assert len(items) == 64
    assert 14 <= sum(bool(item.claim) for item in items) <= 16
    unmet = [item for item in items if item.verdict in ("trade-off", "behind")]
    assert [item.name for item in unmet if not item.row["cause"]] == []


@pytest.mark.parametrize("experiment, figures, claims, error", [
    ("toy/ran", '{ loss = "lower" }', "", "to name an experiment and its expected figures in 'Toy'"),
    ("toy/run", '{ speed = "lower" }', "", r"but got 'toy/run' with \['speed'\]"),
    ("toy/run", '{ loss = "smaller" }', "", r"to be one of .*, but got \['smaller'\]"),
    ("toy/run", '{ loss = "lower" }', 'Toys = "x"', r"to name judged items, but got \['Toys'\]"),
])  # fmt: skip
def test_items_that_do_not_fit_are_refused(tmp_path, experiment, figures, claims, error):
    path = tmp_path / "judged.toml"
    assert load_items(path, []) == []
    path.write_text(f'[[item]]\nname = "Toy"\nexperiment = "{experiment}"\nfigures = {figures}\n')
    path.with_name("claims.toml").write_text(claims)
    assert_refused(error, load_items, path, [{"name": "toy/run", "expected": {"loss": 1.0}}])
