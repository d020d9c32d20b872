"""Which of the papers' figures are reached, as computed from both."""

from pathlib import Path

import pytest

from experiments.page import rows
from experiments.runner import experiments, load
from experiments.verdicts import judge, judged, summary
from tests.experiments.toy import describe
from vardrop._core.errors import VardropError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("way, paper, ours, error, verdict", [
    ("lower", 2.0, 1.5, None, "better"),
    ("lower", 2.0, 1.5, 0.3, "reached"),  # within two standard errors
    ("lower", 2.0, 2.5, 0.3, "reached"),
    ("lower", 2.0, 2.5, 0.1, "not reached"),
    ("higher", 68, 68.4, None, "reached"),  # 68 is anything from 67.5 to 68.5
    ("higher", 68, 67.4, None, "not reached"),
    ("higher", 68, 70.0, None, "better"),
    ("lower", 1.92, 1.924, None, "reached"),
    ("lower", 1.92, 1.93, None, "not reached"),
    ("lower", 1.0, 1.4, None, "not reached"),  # not half a unit of 1, which may be 1.0
    ("same", 10.0, 10.9, None, "reached"),
    ("same", 10.0, 11.1, None, "not reached"),
    ("same", 10.0, 11.1, 0.6, "reached"),
    ("same", 0.0, 8e-15, None, "reached"),
    ("same", 0.0, 1e-6, None, "not reached"),
    ("lower", 0.0, 3.7, 2.7, "reached"),
])  # fmt: skip
def test_a_verdict_follows_from_both_figures_and_their_error(way, paper, ours, error, verdict):
    assert judge(way, paper, ours, error) == verdict


def row(name, values, seeds=(0,), **more):
    """A described experiment, and its result where there are values."""
    figures = {k: {"mean": v, "standard_error": None} for k, v in values.items()}
    result = {"figures": figures, "runs": [{}] * len(seeds)} if values else None
    described = {"expected": {"error": 2.0, "size": 10}, "cause": "Too short.", "minutes": 30.0}
    ways = {"judged": {"error": "lower", "size": "higher"}}
    found = {"name": name, "title": name, "seeds": (0,), "result": result}
    return {**found, **described, **ways, **more}


def test_the_summary_counts_what_was_measured_and_names_causes():
    table = [
        row("a/b", {"error": 1.0, "size": 5.0}),
        row("a/c", {"error": 2.0, "size": 10.0}, judged={"error": "lower"}),
        row("a/d", {}),
        row("a/e", {"error": 9.0, "size": 1.0}, judged={}),
    ]
    text = summary(table)
    assert "Of 5 figures that are judged, 1 are better" in text
    said = "1 are reached, 1 are not, and 2 are not run yet; 3 rest on one seed"
    assert said in " ".join(text.split())
    assert "| [a/b](#a-b) | error: 2, 1 |\n" in text
    assert "| [a/b](#a-b) | size: 10, 5 | Too short. |" in text
    assert "| [a/d](#a-d) | 0 of 1 | 30 min |" in text
    assert "a/e" not in text


def test_seeds_that_are_missing_are_named_with_their_time():
    half = row("a/b", {"error": 2.0, "size": 10.0}, seeds=(0,)) | {"seeds": (0, 1, 2)}
    assert "| [a/b](#a-b) | 1 of 3 | 20 min |" in summary([half])


def test_every_figure_that_is_not_reached_has_a_cause():
    table = rows(experiments(ROOT / "experiments"), ROOT / "results")
    assert len(judged(table)) > 50
    unmet = (f for f in judged(table) if f.verdict == "not reached")
    assert [(f.row["name"], f.figure) for f in unmet if not f.row["cause"]] == []


def test_judging_a_figure_that_is_not_expected_is_told(tmp_path):
    more = '[judged]\n"speed" = "higher"\n'
    with pytest.raises(VardropError, match="lower, higher or same for every judged figure"):
        load(describe(tmp_path, more) / "toy" / "run.toml")
    more = '[judged]\n"loss" = "smaller"\n'
    with pytest.raises(VardropError, match="lower, higher or same for every judged figure"):
        load(describe(tmp_path, more) / "toy" / "run.toml")
