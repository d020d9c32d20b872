"""Rows that count by their class, in training and not in the test; twelve of two thousand."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.utils.class_weight import compute_sample_weight

import vardrop as vd
from tests.app.cli.calling import call
from tests.refusals import assert_refused
from vardrop.app.data.splits import with_class_weight
from vardrop.app.runs import Settings, fit, load_run, resume

QUICK = {"folds": 1, "beta": 0.1, "compare": False}


def rare(seed=0, rows=2000, positives=12):
    """A rare class that two of five columns tell in part."""
    g = np.random.default_rng(seed)
    x = g.normal(size=(rows, 5))
    score = x[:, 0] + x[:, 1] + 0.5 * g.normal(size=rows)
    frame = pd.DataFrame(x, columns=list("abcde"))
    frame["ill"] = np.where(score.argsort().argsort() < rows - positives, "no", "yes")
    return frame


def test_balanced_weights_are_scikit_learns():
    data = vd.load_dataset(rare(rows=300, positives=40), target="ill")
    found = with_class_weight(data, "balanced")
    known = torch.cat([data.train.y, data.validation.y]).numpy()
    given = torch.cat([found.train.weight, found.validation.weight]).numpy()
    assert given == pytest.approx(compute_sample_weight("balanced", known))
    assert found.test is data.test


def test_weights_by_class_multiply_those_of_the_rows():
    frame = rare(rows=300, positives=40).assign(often=2.0)
    data = vd.load_dataset(frame, target="ill", weight="often")
    found = with_class_weight(data, {"yes": 5.0})
    assert found.train.weight.tolist() == [10.0 if y else 2.0 for y in data.train.y.tolist()]
    balanced = with_class_weight(data, "balanced").train
    sums = torch.bincount(balanced.y, balanced.weight)
    assert float(sums[0] / sums[1]) == pytest.approx(1, rel=0.05)  # of both parts, exactly
    assert torch.equal(found.test.weight, data.test.weight)


@pytest.fixture(scope="module")
def plain_and_balanced(tmp_path_factory):
    """A run without weights and one with balanced weights."""
    base = tmp_path_factory.mktemp("weights")
    rare().to_csv(base / "t.csv", index=False)
    arguments = {"target": "ill", "epochs": 40, **QUICK}
    plain = fit(base / "t.csv", "mlp50", out=base / "plain", **arguments)
    balanced = fit(base / "t.csv", "mlp50", out=base / "w", class_weight="balanced", **arguments)
    return base, plain, balanced


def test_weights_find_more_of_the_rare_class_and_say_what_they_do(plain_and_balanced):
    _, plain, balanced = plain_and_balanced
    rare = [run.results["confusion"][1] for run in (plain, balanced)]
    recall = [right / (wrong + right) for wrong, right in rare]
    assert recall[1] > recall[0]
    mean = [float(run.predict(run.data.test.x).probs[:, 1].mean()) for run in (plain, balanced)]
    assert mean[1] > 3 * mean[0]  # data with other frequencies; 4.2 to 6.2 for four tables
    assert "The classes were weighted in training" in " ".join(balanced.results["notes"])
    assert "weighted" not in " ".join(plain.results["notes"])
    majority = [run.results["baseline"] for run in (plain, balanced)]
    assert majority[0] == majority[1]  # test rows count once


def test_probabilities_go_back_by_the_weights(plain_and_balanced):
    """p(k) / w(k), normalised, suits data with the original frequencies better.

    The Brier scores of 8000 new examples are compared in pairs, by the z-score of their mean
    difference, which is 10.7 for this table. Another draw of new examples falls below the bound of
    5 in 1 of 10^8 cases. Over other tables, each with 12 positives, it varies more with the model:
    0.9 for one of six and 4.1 to 19.9 for the others. The ECE was no sound measure here: the
    correction halves it for seven of eight tables on their 400 test examples, but for three of
    eight on 8000 new ones, because few bins have positives.
    """
    _, _, run = plain_and_balanced
    new = rare(100, 8000, 48)
    p = run.predict(new).probs.double()
    counts = torch.tensor(run.results["known"]["counts"])
    back = p * counts  # balanced weights are n / (K counts)
    back = back / back.sum(1, keepdim=True)
    y = torch.tensor((new.ill == "yes").to_numpy(float))
    gain = (p[:, 1] - y).square() - (back[:, 1] - y).square()
    assert float(gain.mean() / (gain.std() / len(y) ** 0.5)) > 5
    assert abs(float(back[:, 1].mean()) - 48 / 8000) < 0.5 * abs(float(p[:, 1].mean()) - 48 / 8000)


def test_the_weights_stay_with_the_run(plain_and_balanced):
    base, _, run = plain_and_balanced
    assert load_run(base / "w").config.settings.class_weight == "balanced"
    assert resume(base / "w").results == run.results
    with pytest.raises(vd.VardropError, match="`class_weight` to stay 'balanced'.* but got None"):
        resume(base / "w", class_weight=None)


def test_the_command_takes_weights(tmp_path, capsys):
    rare(rows=200, positives=12).to_csv(tmp_path / "t.csv", index=False)
    fixed = ("--target", "ill", "--epochs", 2, "--folds", 1, "--beta", 1, "--no-compare")
    given = ("fit", tmp_path / "t.csv", *fixed, "--out")
    assert call(*given, tmp_path / "a", "--class-weight", "balanced", "--json") == 0
    event = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert event["metrics"].keys() >= {"auroc", "average_precision", "f1"}
    assert event["baseline"]["name"] == "majority"
    assert call(*given, tmp_path / "b", "--class-weight", "yes=16.5,no=1") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "most frequent class" in shown
    assert "The classes were weighted in training" in shown
    assert load_run(tmp_path / "b").config.settings.class_weight == {"yes": 16.5, "no": 1.0}
    assert call(*given, tmp_path / "c", "--class-weight", "yes") == 2
    assert "weights by class such as no=1,yes=10, but got 'yes'" in capsys.readouterr().err
    assert call(*given, tmp_path / "d", "--class-weight", "maybe=2") == 1
    assert "for the classes no, yes, but got 'maybe'" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_names_of_classes_may_be_numbers(tmp_path):
    frame = rare(rows=60, positives=20)
    frame["ill"] = (frame["ill"] == "yes").astype(int)
    given = {"class_weight": {0: 1, 1.0: 3}, "epochs": 1, **QUICK}
    run = fit(frame, target="ill", out=tmp_path / "r", **given)
    assert run.config.settings.class_weight == {"0": 1, "1": 3}


@pytest.mark.parametrize("wrong", ["even", 3, {"yes": -1}, {3: 1.0}, {"yes": float("nan")}])
def test_other_weights_are_refused(wrong):
    assert_refused("Expected `class_weight", Settings, class_weight=wrong)


def test_numbers_have_no_classes_to_weigh(tmp_path):
    given = {"target": "a", "class_weight": "balanced", "out": tmp_path / "r", **QUICK}
    frame, told = rare(rows=60).drop(columns="ill"), "`class_weight` needs classes.*is a number"
    assert_refused(told, fit, frame, **given)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("given", [{"class_weight": "balanced"}, {"weight": "often"}])
def test_a_head_has_a_loss_of_its_own(tmp_path, given):
    rows, given = rare(rows=60).assign(often=1), {"target": "ill", **given, **QUICK}
    told = "Weights of rows or classes are not supported by methods with a head"
    assert_refused(told, fit, rows, "mlp50", vd.dropmax(), out=tmp_path / "r", **given)
    assert not (tmp_path / "r").exists()
