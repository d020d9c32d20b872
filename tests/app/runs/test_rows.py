"""A run scored on rows of a new table: what they have, what they lack, and the same numbers."""

import json

import numpy as np
import pandas as pd
import pytest

from tests.app.cli.calling import call, printed
from tests.refusals import assert_refused
from vardrop._core.errors import VardropError
from vardrop.app.runs import evaluate_rows, fit, load_run
from vardrop.app.runs.run_callbacks import RunCallback

QUICK = {"epochs": 3, "folds": 1, "beta": 1.0, "compare": False, "callback": RunCallback()}


def table(rows=120, seed=0):
    g = np.random.default_rng(seed)
    frame = pd.DataFrame({
        "name": [f"row {i}" for i in range(rows)],
        "size": g.normal(size=rows).round(3),
        "town": g.choice(["Ulm", "Bern", "Rome"], rows),
        "day": pd.date_range("2020-01-01", periods=rows).astype(str),
    })  # fmt: skip
    frame["price"] = 3 * frame["size"] + (frame["town"] == "Ulm") + 7
    frame["kind"] = np.where(frame["price"] > 7, "high", "low")
    frame["often"] = g.integers(1, 4, rows)
    return frame


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base, frame = tmp_path_factory.mktemp("rows"), table()
    frame.to_csv(base / "t.csv", index=False)
    given = {"id": "name", "drop": ["kind", "often"], **QUICK}
    numbers = fit(base / "t.csv", target="price", out=base / "n", **given)
    given = {"drop": ["price", "name"], "weight": "often"}
    return base, numbers, fit(frame, target="kind", out=base / "c", **given, **QUICK)


def test_the_test_part_again_has_the_scores_of_the_run(runs):
    _, numbers, classes = runs
    for run in (numbers, classes):
        frame = table()
        x = run.inputs(frame)
        own = [int((x == row).all(1).nonzero()) for row in run.data.test.x]
        found = evaluate_rows(load_run(run.directory), frame.iloc[own])
        assert found["rows"] == len(run.data.test.y)
        for part in ("metrics", "baseline"):
            expected = {k: v for k, v in run.results[part].items() if k != "name"}
            assert {k: found[part][k] for k in expected} == pytest.approx(expected, rel=1e-5)


def test_files_frames_and_arrays_agree(runs, tmp_path):
    (_, run, _), frame = runs, table(40, seed=1)
    frame.to_csv(tmp_path / "new.csv", index=False)
    pair = frame.drop(columns="price"), frame["price"]
    ways = [tmp_path / "new.csv", str(tmp_path / "new.csv"), frame, pair]
    ways.append((frame[["size", "town", "day"]].to_numpy(object), frame["price"].to_numpy()))
    found = [evaluate_rows(run, data)["metrics"] for data in ways]
    assert all(scores == found[0] for scores in found)


def test_what_the_training_had_not_is_told(runs):
    (_, run, _), frame = runs, table(10, seed=1)
    frame.loc[2, "town"], frame.loc[3, "size"], frame.loc[4, "day"] = "Oslo", None, None
    frame.loc[5, "price"] = None
    found = evaluate_rows(run, frame)
    assert found["rows"] == 9
    assert found["notes"][:4] == [
        "1 rows without a value of 'price' were left out.",
        "Column 'size': 1 missing values, filled as in training.",
        "Column 'town': 1 rows with a new category (Oslo), taken for none.",
        "Column 'day': 1 missing values, filled as in training.",
    ]


def test_rows_count_by_their_weight_where_there_is_one(runs):
    (_, _, run), frame = runs, table(30, seed=2)
    repeated = frame.loc[np.repeat(frame.index, frame["often"].to_numpy())].assign(often=1)
    weighed, twice = evaluate_rows(run, frame, 0), evaluate_rows(run, repeated, 0)
    assert weighed["metrics"] == pytest.approx(twice["metrics"], rel=1e-5)
    without = evaluate_rows(run, frame.drop(columns="often"))
    assert "has no weight column 'often': each row counts once." in without["notes"][0]


def test_the_rows_of_the_training_are_told_as_such(runs):
    base, run, _ = runs
    assert (
        "is the data that the run was trained on" in evaluate_rows(run, base / "t.csv")["notes"][0]
    )


WRONG = {
    "no target": (lambda f: f.drop(columns="price"), "The target column 'price' of .* is empty or missing"),
    "no value": (lambda f: f.assign(price=None), "The target column 'price' of the Data"),
    "no column": (lambda f: f.drop(columns=["town", "day"]), "training in .*, but no 'town', 'day'"),
    "text": (lambda f: f.assign(price="much"), "Expected numbers in column 'price'"),
    "images": (lambda f: 3, "Expected `data` to be a name, a file"),
    "narrow": (lambda f: (f[["size"]].to_numpy(), f["price"]), "Expected 3 columns, as in the training"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_rows_that_cannot_be_scored_are_refused(runs, case):
    change, told = WRONG[case]
    assert_refused(told, evaluate_rows, runs[1], change(table(10)))


def test_a_class_that_the_run_does_not_know_is_refused(runs):
    with pytest.raises(VardropError, match="classes high, low in column 'kind'.*'odd' in row 4"):
        evaluate_rows(runs[2], table(10).assign(kind=["high", "low", "low", "odd"] + ["low"] * 6))


def test_the_command_scores_and_writes_predictions(runs, tmp_path, capsys):
    (base, run, _), frame = runs, table(12, seed=3)
    frame.to_csv(tmp_path / "new.csv", index=False)
    given = ("evaluate", base / "n", "--data", tmp_path / "new.csv")
    before = run.results
    shown = " ".join(printed(capsys, *given, "--predictions", tmp_path / "p.csv").out.split())
    assert "scores on 12 rows of" in shown
    assert "RMSE" in shown
    assert "mean of the target" in shown
    written = pd.read_csv(tmp_path / "p.csv")
    assert list(written)[:3] == ["name", "price", "mean"]
    assert written["name"].tolist() == frame["name"].tolist()
    event = json.loads(printed(capsys, *given, "--json").out)
    assert (event["event"], event["rows"], event["baseline"]["name"]) == ("rows", 12, "mean")
    assert load_run(base / "n").results == before  # the run stays as it is
    assert call(*given, "--ood", "photos") == 2
    assert call("evaluate", base / "n", "--predictions", tmp_path / "p.csv") == 2
    assert call(*given, "--predictions", base / "n" / "config.json") == 1


def test_a_polars_frame_is_taken_as_it_is(runs):
    polars, (_, run, _) = pytest.importorskip("polars"), runs
    frame = table(40, seed=1)
    expected = evaluate_rows(run, frame)["metrics"]
    assert evaluate_rows(run, polars.from_pandas(frame))["metrics"] == expected
