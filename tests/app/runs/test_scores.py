"""Scores for people: equal to scikit-learn's, and in words where the rows cannot tell."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import metrics as sklearn

from tests.app.cli.calling import call, printed
from tests.app.runs.test_class_weights import rare as rare_table
from tests.refusals import assert_refused
from vardrop.app.cli import printing
from vardrop.app.runs import evaluate, evaluate_rows, fit, load_run
from vardrop.app.runs.held_out import Choice
from vardrop.app.runs.scores import baseline_prediction, class_scores, number_scores

G = torch.Generator().manual_seed(0)
QUICK = {"epochs": 2, "folds": 1, "beta": 1.0, "compare": False}


def cases(classes, rows=300):
    probs = (2 * torch.randn(rows, classes, generator=G, dtype=torch.float64)).softmax(1)
    return probs, probs.multinomial(1, generator=G)[:, 0]


def scored(probs, y, shares=None):
    names = [f"c{k}" for k in range(probs.shape[1])]
    usual = torch.bincount(y, minlength=len(names)) / len(y)
    shares = usual if shares is None else torch.tensor(shares)
    return class_scores(probs, probs[range(len(y)), y].log(), y, names, shares)


def test_scores_of_many_classes_are_scikit_learns():
    probs, y = cases(4)
    found = scored(probs, y)
    p, t, guess = probs.numpy(), y.numpy(), probs.argmax(1).numpy()
    expected = {
        "accuracy": sklearn.accuracy_score(t, guess),
        "balanced_accuracy": sklearn.balanced_accuracy_score(t, guess),
        "auroc": sklearn.roc_auc_score(t, p, multi_class="ovr"),
        "average_precision": sklearn.average_precision_score(np.eye(4)[t], p),
        "f1": sklearn.f1_score(t, guess, average="macro"),
        "nll": sklearn.log_loss(t, p),
        "brier": np.square(p - np.eye(4)[t]).sum(1).mean(),
    }
    assert {k: found.metrics[k] for k in expected} == pytest.approx(expected)
    assert found.confusion == sklearn.confusion_matrix(t, guess).tolist()
    assert found.notes == []


def test_two_classes_are_scored_by_the_rarer_one_and_uneven_ones_not_by_accuracy():
    probs, y = cases(2)
    for shares, rarer in (([0.4, 0.6], 0), ([0.6, 0.4], 1)):
        found = scored(probs, y, shares)
        area = sklearn.average_precision_score((y == rarer).numpy(), probs[:, rarer].numpy())
        assert found.metrics["average_precision"] == pytest.approx(area)
        assert found.metrics["auroc"] == pytest.approx(sklearn.roc_auc_score(y, probs[:, 1]))
        assert f"is for c{rarer}, the rarer class." in found.notes[0]
    assert next(iter(scored(probs, y, [0.5, 0.5]).metrics)) == "accuracy"
    first = list(scored(probs, y, [0.9, 0.1]).metrics)[:3]
    assert first == ["balanced_accuracy", "auroc", "accuracy"]


def test_a_class_without_a_row_is_left_out_with_a_word():
    probs, y = cases(3)
    kept = y != 2
    found = scored(probs[kept], y[kept], [0.3, 0.3, 0.4])
    (note,) = found.notes
    assert note == "The test part has no row of class c2: averages over classes leave it out."
    areas = [sklearn.roc_auc_score(y[kept] == k, probs[kept, k]) for k in range(2)]
    assert found.metrics["auroc"] == pytest.approx(sum(areas) / 2)


@pytest.mark.parametrize("classes", [2, 4])
def test_rows_count_by_their_weights_and_not_at_all_with_zero(classes):
    """Also where a class has no other rows: the scores are those of rows repeated so often."""
    probs, y = cases(classes)
    weight = torch.randint(0, 4, (len(y),), generator=G) * (y != 1)
    names, usual = [f"c{k}" for k in range(classes)], torch.bincount(y, minlength=classes) / len(y)
    logs = probs[range(len(y)), y].log()
    found = class_scores(probs, logs, y, names, usual, weight.double())
    again = torch.arange(len(y)).repeat_interleave(weight)
    expected = class_scores(probs[again], logs[again], y[again], names, usual)
    assert found.metrics == pytest.approx(expected.metrics)
    assert found.notes == expected.notes


def test_a_single_class_leaves_nothing_to_tell_apart():
    probs, y = torch.tensor([[0.9, 0.1]]).repeat(5, 1), torch.zeros(5).long()
    found = scored(probs, y, [0.994, 0.006])
    assert next(iter(found.metrics.items())) == ("balanced_accuracy", None)
    assert not {found.metrics[n] for n in ("auroc", "average_precision", "f1")} - {None}
    assert "has no row of class c1: balanced accuracy, AUROC," in found.notes[0]
    assert "99.4% of the training rows are of one class. Use balanced accuracy" in found.notes[1]


def test_a_probability_of_zero_is_bounded_and_told():
    probs, y = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([1, 0])
    found = class_scores(probs, torch.tensor([-math.inf, -0.5]), y, ["a", "b"], probs.mean(0))
    assert found.metrics["nll"] == pytest.approx((87.3365 + 0.5) / 2, rel=1e-5)
    assert "labels of 1 rows have probability 0" in " ".join(found.notes)


def test_scores_of_numbers_are_scikit_learns():
    y = torch.randn(200, 1, generator=G, dtype=torch.float64)
    mean, std = y + 0.3 * torch.randn(200, 1, generator=G), torch.full((200, 1), 0.3).double()
    normal = torch.distributions.Normal(mean, std)
    found = number_scores(mean, std, normal.log_prob(y), y, (mean - 0.6, mean + 0.6)).metrics
    t, p = y.flatten().numpy(), mean.flatten().numpy()
    expected = {
        "rmse": sklearn.root_mean_squared_error(t, p), "mae": sklearn.mean_absolute_error(t, p),
        "r2": sklearn.r2_score(t, p), "nll": -float(normal.log_prob(y).mean()),
        "coverage95": np.mean(np.abs(t - p) <= 0.6), "width95": 1.2,
    }  # fmt: skip
    assert {k: found[k] for k in expected} == pytest.approx(expected)


def test_equal_targets_leave_r2_undefined():
    y = torch.ones(4)
    found = number_scores(y, y, -y, y, (y, y))
    assert found.metrics["r2"] is None
    assert "are equal" in found.notes[0]


def test_baselines_know_the_training_rows_alone():
    y, p = torch.tensor([0, 1]), baseline_prediction({"counts": [3, 1]}, 2)
    shares = torch.tensor([0.75, 0.25])
    found = class_scores(p.probs, p.log_prob(y), y, ["a", "b"], shares).metrics
    assert found["accuracy"] == found["balanced_accuracy"] == found["auroc"] == 0.5
    assert found["nll"] == pytest.approx(-(math.log(4 / 6) + math.log(2 / 6)) / 2)
    values, p = torch.arange(3.0)[:, None], baseline_prediction({"mean": 1.0, "std": 1.0}, 3)
    interval = p.interval(0.95)
    numbers = number_scores(p.mean, p.std, p.log_prob(values), values, interval).metrics
    assert (numbers["rmse"], numbers["r2"]) == (pytest.approx(math.sqrt(2 / 3)), pytest.approx(0))
    assert numbers["width95"] == pytest.approx(2 * 1.959964, rel=1e-5)


def test_the_difference_to_others_has_its_standard_error():
    rows = {"net": torch.tensor([1.0, 2.0, 3.0, 4.0]), "plain": torch.tensor([1.0, 1.0, 3.0, 3.0])}

    def against(rows):
        return Choice(1.0, 0.0, {}, {}, rows, torch.zeros(0), torch.zeros(0)).against()

    assert against(rows) == {"plain": {"nll": 0.5, "error": 0.25}}
    assert against({"plain": rows["plain"]}) == {}


@pytest.fixture(scope="module")
def rare(tmp_path_factory):
    base = tmp_path_factory.mktemp("rare")
    rare_table().to_csv(base / "t.csv", index=False)
    return fit(base / "t.csv", "mlp", target="ill", out=base / "run", **QUICK)


def test_with_twelve_in_two_thousand_accuracy_is_no_headline(rare, capsys):
    found = rare.results
    assert found["metrics"]["accuracy"] > 0.98
    assert found["baseline"]["accuracy"] == pytest.approx(398 / 400, abs=0.003)
    assert found["baseline"]["balanced_accuracy"] == 0.5
    assert list(found["metrics"])[:2] == ["balanced_accuracy", "auroc"]
    assert repr(rare).index("balanced_accuracy") < repr(rare).index(", accuracy")
    printing.run(rare, as_json=False)
    shown = capsys.readouterr().out
    assert shown.index("balanced accuracy") < shown.index("│ accuracy")
    assert "are of one class. Use balanced accuracy" in " ".join(shown.split())


def test_results_are_json_without_a_test_row_of_a_class(rare):
    loaded = load_run(rare.directory)
    test = loaded.data.test
    object.__setattr__(loaded.data, "test", type(test)(*(t[test.y == 0] for t in test)))
    assert evaluate(loaded)["metrics"]["balanced_accuracy"] is None
    json.loads((rare.directory / "results.json").read_text(), parse_constant=pytest.fail)
    assert "undefined" in repr(loaded)


def test_without_a_test_part_held_out_rows_are_scored(tmp_path, capsys):
    x = torch.randn(60, 2, generator=G)
    settings = {**QUICK, "folds": 2, "out": tmp_path / "run"}
    run = fit((x.numpy(), x[:, 0].numpy()), "mlp", test=False, **settings)
    found = evaluate(run)
    assert (found["metrics"], len(found["layers"])) == ({}, 3)
    assert found["notes"] == ["There is no test part: the scores are on rows that were held out in turn."]  # fmt: skip
    printing.run(run, as_json=False)
    shown = capsys.readouterr().out
    assert "scores on held-out examples" in shown
    assert "mean of the target" in shown
    assert_refused("OOD detection needs test rows", evaluate, run, ["photos"])


def test_validation_is_in_the_units_of_the_table(tmp_path):
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).numpy()
    run = lambda unit: fit((x, unit * x[:, 0]), "mlp", out=tmp_path / f"{unit}", **QUICK)
    nll = [run(unit).history[-1]["validation"] for unit in (1.0, 1000.0)]
    assert nll[1]["nll"] - nll[0]["nll"] == pytest.approx(math.log(1000), abs=1e-3)
    assert nll[1]["rmse"] == pytest.approx(1000 * nll[0]["rmse"], rel=1e-3)


# A run scored on rows of a new table: what they have, what they lack, and the same numbers.


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
    note = evaluate_rows(run, base / "t.csv")["notes"][0]
    assert "is the data that the run was trained on" in note


WRONG = {
    "no target": (lambda f: f.drop(columns="price"), "The target column 'price' of .* is empty or missing"),
    "no value": (lambda f: f.assign(price=None), "The target column 'price' of the Data"),
    "no column": (lambda f: f.drop(columns=["town", "day"]), "training in .*, but no 'town', 'day'"),
    "text": (lambda f: f.assign(price="much"), "Expected numbers in column 'price'"),
    "images": (lambda f: 3, "Expected `data` to be a name, a file"),
    "narrow": (lambda f: (f[["size"]].to_numpy(), f["price"]), "Expected 3 columns, as in the training"),
}  # fmt: skip


@pytest.mark.parametrize("change, told", WRONG.values(), ids=WRONG)
def test_rows_that_cannot_be_scored_are_refused(runs, change, told):
    assert_refused(told, evaluate_rows, runs[1], change(table(10)))


def test_a_class_that_the_run_does_not_know_is_refused(runs):
    odd = table(10).assign(kind=["high", "low", "low", "odd"] + ["low"] * 6)
    assert_refused("'high', 'low' in column 'kind'.*'odd' in row 4", evaluate_rows, runs[2], odd)


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
