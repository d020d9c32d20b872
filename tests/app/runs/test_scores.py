"""Scores for people: equal to scikit-learn's, and in words where the rows cannot tell."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import metrics as sklearn

from tests.refusals import assert_refused
from vardrop.app.cli import printing
from vardrop.app.runs import evaluate, fit, load_run
from vardrop.app.runs.callbacks import RunCallback
from vardrop.app.runs.held_out import Choice
from vardrop.app.runs.scores import class_scores, constant, majority, number_scores

G = torch.Generator().manual_seed(0)
QUICK = {"epochs": 2, "folds": 1, "beta": 1.0, "compare": False, "callback": RunCallback()}


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
    assert found.notes == [
        "The test part has no row of class c2: averages over classes leave it out."
    ]
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
    counts, y = torch.tensor([3, 1]), torch.tensor([0, 1])
    found = majority(counts, y, ["a", "b"])
    assert found["accuracy"] == found["balanced_accuracy"] == found["auroc"] == 0.5
    assert found["nll"] == pytest.approx(-(math.log(4 / 6) + math.log(2 / 6)) / 2)
    numbers = constant(1.0, 1.0, torch.tensor([0.0, 1.0, 2.0]))
    assert numbers["rmse"] == pytest.approx(math.sqrt(2 / 3))
    assert numbers["r2"] == pytest.approx(0)
    assert numbers["width95"] == pytest.approx(2 * 1.959964, rel=1e-5)


def test_the_difference_to_others_has_its_standard_error():
    rows = {"net": torch.tensor([1.0, 2.0, 3.0, 4.0]), "plain": torch.tensor([1.0, 1.0, 3.0, 3.0])}

    def against(rows):
        return Choice(1.0, 0.0, {}, {}, rows, torch.zeros(0), torch.zeros(0)).against()

    assert against(rows) == {"plain": {"nll": 0.5, "error": 0.25}}
    assert against({"plain": rows["plain"]}) == {}


@pytest.fixture(scope="module")
def rare(tmp_path_factory):
    base, x = tmp_path_factory.mktemp("rare"), torch.randn(2000, 3, generator=G)
    frame = pd.DataFrame(x.numpy(), columns=["a", "b", "c"])
    frame["ill"] = ["yes" if i < 12 else "no" for i in x[:, 0].argsort().argsort().tolist()]
    frame.to_csv(base / "t.csv", index=False)
    return fit(base / "t.csv", "mlp", target="ill", out=base / "run", **QUICK)


def test_with_twelve_in_two_thousand_accuracy_is_no_headline(rare, capsys):
    found = rare.results
    assert found["metrics"]["accuracy"] > 0.98
    assert found["baseline"]["accuracy"] > 0.98
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
    nll = [
        fit((x, unit * x[:, 0]), "mlp", out=tmp_path / f"{unit}", **QUICK).history[-1]["validation"]
        for unit in (1.0, 1000.0)
    ]
    assert nll[1]["nll"] - nll[0]["nll"] == pytest.approx(math.log(1000), abs=1e-3)
    assert nll[1]["rmse"] == pytest.approx(1000 * nll[0]["rmse"], rel=1e-3)
