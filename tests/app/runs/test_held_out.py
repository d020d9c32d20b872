"""Defaults that follow from the data, and what held-out rows decide: KL weight, scale, intervals."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import vardrop as vd
from tests.app.runs.test_nothing_lost import same_tensors
from tests.refusals import assert_refused
from vardrop._core.files import write_tensors
from vardrop.app.data import Part
from vardrop.app.runs import Settings, evaluate, evaluate_rows, fit, held_out, load_run, resume
from vardrop.app.runs.held_out import Choice, fold_pairs
from vardrop.app.runs.run_callbacks import RunCallback

QUIET = {"batch_size": 32}


def smooth(rows, seed=0, noise=0.3):
    """Two columns that matter, one that does not, and a target of deviation near 1."""
    made = np.random.default_rng(seed)
    x = made.uniform(-2, 2, (rows, 3))
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + noise * made.standard_normal(rows)
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": 50 + 20 * y})


def classes(rows, seed=0):
    found = smooth(rows, seed)
    return found.assign(y=np.where(found.a + found.b > 0, "high", "low"))


def written(table, folder):
    table.to_csv(folder / "t.csv", index=False)
    return folder / "t.csv"


def fit_table(table, folder, *net, **settings):
    """A fit of a file, without a plain model to compare it with."""
    path, out = written(table, folder), folder / "r"
    return fit(path, *net, target="y", out=out, compare=False, **settings)


# The defaults.


WHOLE_AND_QUICK = [{"epochs": 60, "folds": 2}, pytest.param({}, marks=pytest.mark.slow)]


@pytest.mark.parametrize("made", [smooth, classes])
@pytest.mark.parametrize("settings", WHOLE_AND_QUICK, ids=["quick", "whole"])
def test_a_table_of_150_rows_is_learned_with_nothing_given(tmp_path, made, settings):
    run = fit(written(made(150), tmp_path), target="y", out=tmp_path / "r", **settings)
    assert run.config.net == "mlp50"
    assert run.config.method == vd.bayes_by_backprop(prior=vd.Normal(learned=True))
    found, scores = run.results["held_out"], run.results["metrics"]
    if made is smooth:
        spread = float(run.data.test.y.std()) * run.about.preprocessing.target_std
        assert scores["rmse"] < 0.6 * spread
        assert found["net"]["nll"] < found["mean"]["nll"] - 0.4
    else:
        assert scores["accuracy"] >= 0.8
        assert found["net"]["nll"] < found["majority"]["nll"] - 0.2
    assert found["beta"] in (1.0, 0.3, 0.1)
    assert set(found["weights"]) == {"1", "0.3", "0.1"}
    assert not (tmp_path / "r" / "trials").exists()


def test_what_is_given_stays_and_the_rest_follows_from_the_rows():
    few, many, images = (Settings().for_data(*a) for a in ((200,), (10**6,), (1000, True)))
    assert (few.batch_size, few.epochs, few.lr, few.folds, few.beta) == (25, 625, 1e-2, 4, None)
    assert (many.batch_size, many.epochs, many.lr, many.folds) == (512, 5, 5e-3, 1)
    assert (images.batch_size, images.lr, images.folds, images.beta) == (64, 3e-3, 1, 0.01)
    given = Settings(epochs=7, batch_size=9, lr=0.5, folds=1, beta=0.2)
    assert given.for_data(200) == given
    assert Settings(patience=3).for_data(200).folds == 1


def test_a_given_weight_is_not_chosen_and_a_plain_net_has_none(tmp_path):
    path = written(smooth(80), tmp_path)
    run = fit(path, target="y", out=tmp_path / "given", beta=0.7, epochs=2, **QUIET)
    assert run.choice.beta == 0.7
    assert run.results["held_out"]["weights"] == {"0.7": pytest.approx(
        run.results["held_out"]["net"]["nll"])}  # fmt: skip
    plain = fit(path, "mlp50", None, target="y", out=tmp_path / "plain", epochs=2, **QUIET)
    assert set(plain.results["held_out"]) >= {"net", "mean"}
    assert "plain" not in plain.results["held_out"]


def test_of_many_rows_the_validation_part_chooses(tmp_path):
    run = fit(written(smooth(2900), tmp_path), target="y", out=tmp_path / "r", epochs=2)
    found = run.results["held_out"]
    assert list(found["weights"]) in (["1", "0.1"], ["1", "0.1", "0.01"])
    assert found["weights"][f"{found['beta']:g}"] == min(found["weights"].values())
    assert len(found["weights"]) == 3 or found["weights"]["0.1"] > found["weights"]["1"]
    assert (run.config.net, [r["epoch"] for r in run.history]) == ("mlp", [0, 1])
    assert run.history[-1]["beta"] == pytest.approx(found["beta"])
    assert run.history[-1]["validation"]["nll"] > 0
    longer = resume(tmp_path / "r", epochs=3)
    assert (len(longer.history), longer.choice.beta) == (3, found["beta"])
    assert longer.choice.log_scale != run.choice.log_scale  # of the longer trained net


def test_trials_of_a_large_table_are_as_long_as_its_training(tmp_path):
    """A KL weight that is best after a quarter of the epochs overfits in all of them."""
    epochs = Counter()

    class Count(RunCallback):
        def __init__(self, label=""):
            self.label = label

        def trial(self, label):
            return Count(label)

        def record(self, record, elbo):
            epochs[self.label] += 1

    run = fit_table(
        smooth(30_000), tmp_path, "dense-4", epochs=4, batch_size=4096, callback=Count()
    )
    assert set(epochs) >= {"trial 1-0", "trial 0.1-0"}
    assert set(epochs.values()) == {4}
    assert len(run.history) == 4


# The safety line.


def test_a_net_that_is_no_better_says_so(tmp_path, capsys):
    table = smooth(100).assign(y=np.random.default_rng(1).standard_normal(100))
    run = fit(written(table, tmp_path), target="y", out=tmp_path / "r", epochs=30, **QUIET)
    assert "hardly better than the mean of the target" in run.advice
    assert run.advice in repr(run)
    assert run.results["held_out"]["advice"] == run.advice
    from vardrop.app.cli import printing

    printing.run(run, as_json=False)
    assert run.advice in capsys.readouterr().out


def test_the_advice_names_who_is_as_good():
    spread = torch.linspace(-1, 1, 100).double()

    def advice(**others):
        rows = {"net": 1 + spread, **{k: v + 0.5 * spread for k, v in others.items()}}
        scores = {k: {"nll": float(v.mean())} for k, v in rows.items()}
        return Choice(1.0, 0.0, {}, scores, rows, torch.zeros(0), torch.zeros(0)).advice

    assert advice(plain=1.1, mean=2.0) == ""
    assert advice(plain=0.99) == ""  # a third of a standard error
    found = advice(plain=0.8, mean=2.0)
    assert found.startswith("On held-out rows the plain model is better: NLL 0.800, and 1.000 with")
    assert "--recipe none" in found
    assert "(NLL 1.000) is hardly better than the mean of the target (1.010)" in advice(mean=1.01)
    found = advice(majority=0.5)  # the learning rate was too large
    assert "(NLL 1.000) is worse than the frequencies of the classes (0.500)" in found
    assert "lower learning rate (--lr)" in found
    assert "better" not in found
    assert "hardly better" in advice(mean=math.nan)  # what does not compare is told


# Killed among the trials.


class StopsIn(RunCallback):
    """Interrupts the second set of trials, or the third trial, in its second epoch."""

    def __init__(self, at, label=""):
        self.at, self.label, self.count = at, label, 0

    def trial(self, label):
        self.count += 1
        return StopsIn(self.at, label) if self.count == self.at else RunCallback()

    def on_epoch_end(self, at):
        if self.label and at.epoch == 2:
            raise KeyboardInterrupt


BOTH = [(False, True), (True, False), *(pytest.param(b, b, marks=pytest.mark.slow) for b in (0, 1))]


@pytest.mark.parametrize("own, alone", BOTH)
def test_a_run_stopped_among_its_trials_ends_as_one_that_was_not(tmp_path, own, alone):
    path = written(smooth(80), tmp_path)

    def net(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)) if own else "auto"

    settings = {"target": "y", "epochs": 3, "batch_size": 16}
    settings |= {"clip": 100.0} if alone else {}  # such trials are trained one after the other
    whole = fit(path, net(0), out=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        fit(path, net(0), out=tmp_path / "parts", callback=StopsIn(3 if alone else 2), **settings)
    assert (tmp_path / "parts" / "trials" / "1-1").is_dir()
    assert not (tmp_path / "parts" / "choice.safetensors").exists()
    # With other weights than the first one had.
    check_same(whole, resume(tmp_path / "parts", net(1) if own else None))


def check_same(whole, parts):
    for name in ("best", "checkpoint", "choice", "arrays"):
        assert same_tensors(*(run.directory / f"{name}.safetensors" for run in (whole, parts)))
    assert parts.results == whole.results


VALIDATED = {"target": "y", "epochs": 8, "batch_size": 16, "folds": 1}


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """A run whose KL weight was chosen on the validation part."""
    folder = tmp_path_factory.mktemp("validated")
    path = written(smooth(90), folder)
    return path, fit(path, out=folder / "whole", **VALIDATED)


def test_the_best_trial_on_the_validation_part_is_the_run(validated):
    _, whole = validated
    found = whole.results["held_out"]
    assert {"1", "0.3"} <= set(found["weights"])
    assert found["weights"][f"{found['beta']:g}"] == min(found["weights"].values())
    assert [r["epoch"] for r in whole.history] == list(range(8))
    assert found["net"]["nll"] == found["weights"][f"{found['beta']:g}"]  # it is that trial's net
    assert whole.history[-1]["beta"] == pytest.approx(found["beta"])


@pytest.mark.parametrize("stopped", [1, 3, 4])
def test_a_stop_in_the_first_last_or_plain_trial_changes_nothing(validated, tmp_path, stopped):
    path, whole = validated
    with pytest.raises(KeyboardInterrupt):
        fit(path, out=tmp_path / "parts", callback=StopsIn(stopped), **VALIDATED)
    check_same(whole, resume(tmp_path / "parts"))


# What is made of the choice.


def test_scores_are_in_the_units_of_the_target():
    y = 2 * torch.randn(500, 1)
    p = vd.predict(nn.Linear(1, 1), torch.zeros(500, 1), mode="mean", likelihood=vd.Gaussian(1.0))
    p = dataclasses.replace(p, mean=0 * p.mean, draws=0 * p.draws)
    held = (p, Part(torch.zeros(500, 1), y))
    scores, each, deviations, _ = held_out.score_held_out([held], math.log(2.0), unit=3.0)
    assert scores["rmse"] == pytest.approx(3 * float(y.square().mean().sqrt()), rel=1e-5)
    expected = -torch.distributions.Normal(0.0, 6.0).log_prob(3 * y).flatten().double()
    assert torch.allclose(each, expected, atol=1e-5)
    assert scores["nll"] == pytest.approx(float(expected.mean()), abs=1e-5)
    assert torch.allclose(deviations, y.abs().flatten() / 2)


def test_every_row_is_held_out_once_and_classes_are_spread():
    rows = Part(torch.arange(22.0).unsqueeze(1), torch.tensor([0] * 18 + [1] * 4))
    pairs = fold_pairs(rows, 4, "classification", seed=3)
    assert sorted(torch.cat([h.x.flatten() for _, h in pairs]).tolist()) == list(range(22))
    assert [int(h.y.sum()) for _, h in pairs] == [1, 1, 1, 1]
    for trained, held in pairs:
        assert len(trained.y) + len(held.y) == 22
        assert not set(trained.x.flatten().tolist()) & set(held.x.flatten().tolist())
    with pytest.raises(vd.VardropError, match="`folds` to be at most 22, the rows, but got 30"):
        fold_pairs(rows, 30, "classification", seed=0)


def test_what_targets_alone_say():
    rows = Part(torch.zeros(8, 1), torch.tensor([0, 0, 0, 0, 0, 1, 1, 2]))
    scores, each, *_ = held_out.baseline_scores([(rows, rows)], 4, 1.0)
    assert each.shape == (8,)
    shares = torch.tensor([6, 3, 2, 1]) / 12
    assert scores["accuracy"] == 5 / 8
    assert scores["nll"] == pytest.approx(-float(shares[rows.y].log().mean()), abs=1e-6)
    values = Part(torch.zeros(4, 1), torch.tensor([[1.0], [3.0], [1.0], [3.0]]))
    scores, *_ = held_out.baseline_scores([(values, values)], 0, 2.0)
    assert scores["rmse"] == 2.0
    assert scores["nll"] == pytest.approx(0.5 * math.log(2 * math.pi * math.e) + math.log(2))


def test_intervals_cover_what_they_say(tmp_path):
    run = fit_table(smooth(300), tmp_path, epochs=40, beta=0.3)
    fresh = smooth(4000, seed=1)
    y = torch.tensor(fresh.y.to_numpy(), dtype=torch.float32).unsqueeze(1)
    p = run.predict(fresh)
    for level in (0.8, 0.95):
        lower, upper = run.interval(p, level)
        coverage = float(((lower <= y) & (y <= upper)).float().mean())
        error = math.sqrt(level * (1 - level) * (1 / 240 + 1 / 4000))
        assert abs(coverage - level) < 5 * error, (level, coverage)
    again = load_run(tmp_path / "r")
    assert torch.equal(again.interval(again.predict(fresh)).lower, run.interval(p).lower)
    assert evaluate(run)["metrics"]["coverage95"] > 0.8


def test_a_run_without_its_choice_is_damaged(tmp_path):
    fit_table(smooth(60), tmp_path, epochs=1, **QUIET)
    run = load_run(tmp_path / "r")
    assert run.standing == ""
    scores = {k: v for k, v in run.choice.held_out.items() if k != "net"}
    rows = {k: v for k, v in run.choice.rows.items() if k != "net"}
    choice = dataclasses.replace(run.choice, held_out=scores, rows=rows)
    write_tensors(tmp_path / "r" / "choice.safetensors", *choice.state())
    assert "before the scale of its noise was chosen" in load_run(tmp_path / "r").standing
    (tmp_path / "r" / "choice.safetensors").unlink()
    assert_refused("choice.safetensors, which holds the scale of the no", load_run, tmp_path / "r")


def grouped(groups, seed, rows=None):
    """Groups with an effect of their own, and most rows in the groups where it is small."""
    made = np.random.default_rng(seed)
    effect = made.standard_normal(groups)
    sizes = np.where(np.abs(effect) > 1, 1, made.integers(5, 10, groups)) if rows is None else rows
    group = np.repeat(np.arange(groups), sizes)
    x = made.standard_normal(len(group))
    y = x + effect[group] + 0.1 * made.standard_normal(len(group))
    return pd.DataFrame({"a": x, "group": group, "y": y})


def test_groups_are_the_unit_of_conformal_intervals():
    """Coverage of one random row of a new group, over 2000 calibrations of 39 groups each.

    The guarantee is 0.9 to 0.9 + 1/40. Four standard errors of 2000 calibrations, each judged on one
    new group, are 0.027: an error rate of 1 in 15 000. With rows as units it is far lower.
    """
    made, covered = np.random.default_rng(0), {"group": [], "row": []}
    for seed in range(2000):
        table = grouped(40, seed)
        score, group = np.abs(table.y.to_numpy() - table.a.to_numpy()), table.group.to_numpy()
        zeros = torch.zeros(len(table), 1)
        held = Part(zeros, zeros, None, torch.tensor(group)).take(torch.tensor(group < 39))
        new = made.choice(score[group == 39])
        deviations = torch.tensor(score[: len(held.y)])
        for unit, shares in (("group", held.shares), ("row", torch.ones(len(held.y)))):
            choice = Choice(1.0, 0.0, {}, {}, {}, deviations, shares)
            covered[unit].append(new <= choice.conformal(0.9).quantile)
    assert 0.9 - 0.027 < np.mean(covered["group"]) < 0.9 + 1 / 40 + 0.027
    assert np.mean(covered["row"]) < 0.9 - 0.027


def test_a_rule_of_groups_needs_as_many_as_the_level():
    deviations, group = torch.arange(76.0), torch.arange(76) // 4
    for groups, finite in ((18, False), (19, True)):
        held = Part(torch.zeros(76, 1), torch.zeros(76, 1), None, group).take(group < groups)
        choice = Choice(1.0, 0.0, {}, {}, {}, deviations[: 4 * groups], held.shares)
        assert math.isfinite(choice.conformal(0.95).quantile) == finite
    single = Part(torch.zeros(76, 1), torch.zeros(76, 1))
    rule = Choice(1.0, 0.0, {}, {}, {}, deviations, single.shares).conformal(0.9)
    assert rule.quantile == 69.0  # the ceil(77 x 0.9) = 70th smallest


def test_intervals_of_a_grouped_fit_cover_rows_of_new_groups(tmp_path):
    """200 groups, held out in 4 folds that divide none.

    Coverage of 0.9 has a standard error of 0.021 from 200 groups and 0.013 from the 500 new ones:
    the bounds are four of them, an error rate of 1 in 15 000.
    """
    table = grouped(200, 0)
    run = fit_table(table, tmp_path, group="group", folds=4, test=False, epochs=20, beta=0.1)
    assert float(run.choice.shares.sum()) == pytest.approx(200)
    fresh = grouped(500, 1)
    lower, upper = run.interval(run.predict(fresh), 0.9)
    y = torch.tensor(fresh.y.to_numpy()).unsqueeze(1)
    inside = pd.Series(((lower <= y) & (y <= upper)).flatten().numpy())
    assert abs(inside.groupby(fresh.group).mean().mean() - 0.9) < 4 * math.hypot(0.021, 0.013)


@pytest.mark.parametrize("offset", [1.6e9, 1e22])
def test_targets_of_a_large_mean_keep_their_digits(tmp_path, offset):
    """Such as timestamps: in single precision 1.6e9 has steps of 128."""
    scale = 20 if offset < 1e10 else 1e20  # whose square is infinite in single precision
    table = smooth(300)[["a", "b", "y"]]
    table = table.assign(y=offset + scale * (table.y - 50) / 20)
    run = fit_table(table, tmp_path, epochs=40, beta=0.1, folds=1)
    scores, p = run.results["metrics"], run.predict(table)
    error = p.mean.flatten().numpy() - table.y.to_numpy()
    assert np.sqrt(np.square(error).mean()) < 0.75 * scale
    assert 0.1 * scale < scores["rmse"] < 0.75 * scale
    assert scores["r2"] < 0.95
    lower, upper = (t.flatten().numpy() for t in run.interval(p, 0.95))
    assert 0.85 < np.mean((lower <= table.y) & (table.y <= upper)) <= 1
    assert scores["coverage95"] > 0.8
    fresh = evaluate_rows(load_run(tmp_path / "r"), table)["metrics"]
    assert fresh["rmse"] == pytest.approx(np.sqrt(np.square(error).mean()), rel=1e-3)


def test_the_width_of_the_noise_may_differ_by_row(tmp_path):
    made = np.random.default_rng(0)
    x = made.uniform(-1, 1, 400)
    table = pd.DataFrame({"a": x, "y": 7 + np.where(x > 0, 2.0, 0.2) * made.standard_normal(400)})
    run = fit_table(table, tmp_path, epochs=60, beta=0.1, folds=1, heteroscedastic=True)
    p = load_run(tmp_path / "r").predict(pd.DataFrame({"a": [-0.6, 0.6]}))
    assert float(p.std[1]) > 3 * float(p.std[0])
    assert p.mean.flatten().tolist() == pytest.approx([7, 7], abs=0.8)
    assert run.results["metrics"]["nll"] < 1.2  # one width for all: 1.8
