"""Regression: mixtures, densities, and a heteroscedastic toy with a gap outside the data."""

import math

import pytest
import torch
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused
from vardrop.prediction import apply_temperature, conformal, fit_temperature, predict
from vardrop.prediction.prediction import Summary, mixture_quantile

CATEGORICAL = vd.Categorical()


def prediction_of(outputs, likelihood=CATEGORICAL):
    """Of draws (S, N, ...) of the outputs."""
    reduction = Summary(likelihood, 0)
    reduction.add(outputs)
    return reduction.prediction()


def noisy_line():
    torch.manual_seed(0)
    return vd.convert(nn.Linear(2, 1), vd.bayes_by_backprop(log_sigma2=0.0))


def test_gaussian_variances_add_up():
    net, x, n = noisy_line(), torch.ones(3, 2), 4000
    p = predict(net, x, n, likelihood=vd.Gaussian(0.5), seed=0, keep=n)
    assert torch.equal(p.aleatoric, torch.full((3, 1), 0.25))
    torch.testing.assert_close(p.epistemic, p.draws.var(0))
    torch.testing.assert_close(p.std.square(), p.aleatoric + p.epistemic)
    assert (p.epistemic / 2 - 1).abs().max() < 6 * math.sqrt(2 / n)  # two weights of variance 1


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_intervals_are_those_of_the_mixture_not_of_one_normal(level):
    net, x = noisy_line(), torch.ones(1, 2)
    p = predict(net, x, 20, likelihood=vd.Gaussian(0.1), seed=0)
    means = p.draws.double().flatten()
    for found, tail in zip(p.interval(level), ((1 - level) / 2, (1 + level) / 2), strict=True):
        exact = brentq(lambda t, q=tail: norm.cdf((t - means) / 0.1).mean() - q, -50, 50)
        assert float(found) == pytest.approx(exact, abs=1e-4)


def test_without_noise_of_the_targets_intervals_are_quantiles_of_the_draws():
    p = predict(noisy_line(), torch.ones(1, 2), 50, likelihood=vd.Values(), seed=0)
    lower, upper = p.interval(0.9)
    torch.testing.assert_close(lower, p.draws.quantile(0.05, 0))
    torch.testing.assert_close(upper, p.draws.quantile(0.95, 0))


def test_probabilities_have_intervals_over_the_draws():
    net = vd.convert(nn.Linear(2, 3), vd.bayes_by_backprop(log_sigma2=0.0))
    p = predict(net, torch.ones(2, 2), 40, seed=0)
    lower, upper = p.interval(0.5)
    assert ((lower <= p.draws.softmax(2).median(0).values) & (upper >= lower)).all()
    torch.testing.assert_close(upper, p.draws.softmax(2).quantile(0.75, 0))


def test_mixture_quantiles_of_extreme_parts():
    mean, std = torch.tensor([[-1000.0], [1000.0]]), torch.tensor([[1e-3], [1e-3]])
    assert float(mixture_quantile(mean, std, 0.25)) == pytest.approx(-1000, abs=1e-2)
    assert float(mixture_quantile(mean, std, 0.75)) == pytest.approx(1000, abs=1e-2)


def test_the_log_density_is_the_log_of_the_mean_density():
    net, x, y = noisy_line(), torch.randn(4, 2), torch.randn(4, 1)
    p = predict(net, x, 30, likelihood=vd.Gaussian(0.5), seed=0)
    density = norm.pdf((y - p.draws).double() / 0.5) / 0.5
    torch.testing.assert_close(
        p.log_prob(y).double(), torch.tensor(density).mean(0).squeeze(1).log(), rtol=1e-4, atol=1e-4
    )
    far = p.log_prob(y + 1e4)  # every density underflows; its logarithm does not
    assert torch.isfinite(far).all()


def test_classes_and_binary_targets_have_log_probabilities():
    net = vd.convert(nn.Linear(2, 3), vd.bayes_by_backprop(log_sigma2=0.0))
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 2, 1])
    p = predict(net, x, 10, seed=0)
    torch.testing.assert_close(p.log_prob(y), p.probs[torch.arange(4), y].log())
    binary = predict(net, x, 10, likelihood=vd.Bernoulli(), seed=0)
    target, probs = torch.tensor([[0.0, 1.0, 1.0]]).expand(4, 3), binary.draws.sigmoid()
    chosen = torch.where(target > 0, probs, 1 - probs).prod(2)  # of the three together
    torch.testing.assert_close(binary.log_prob(target), chosen.mean(0).log())
    entropies = -(binary.probs.xlogy(binary.probs) + (1 - binary.probs).xlogy(1 - binary.probs))
    torch.testing.assert_close(binary.entropy, entropies)
    assert binary.epistemic.min() >= 0


def test_classes_may_have_further_axes():
    net = vd.convert(nn.Conv2d(1, 3, 1), vd.bayes_by_backprop(log_sigma2=0.0))
    p = predict(net, torch.randn(2, 1, 4, 4), 10, seed=0)
    assert p.probs.shape == (2, 3, 4, 4)
    assert p.entropy.shape == p.epistemic.shape == (2, 4, 4)
    y = torch.randint(3, (2, 4, 4))
    each = p.draws.log_softmax(2).gather(2, y.expand(10, 1, 2, 4, 4).transpose(1, 2)).squeeze(2)
    together = each.flatten(2).sum(2).exp().mean(0).log()  # all pixels of an image under one draw
    torch.testing.assert_close(p.log_prob(y), together)


def classes():
    return predict(vd.convert(nn.Linear(2, 3), vd.bayes_by_backprop()), torch.ones(2, 2), 4)


def values(noise_std=0.0, keep=4):
    likelihood = vd.Gaussian(noise_std) if noise_std else vd.Values()
    options = {"likelihood": likelihood, "keep": keep}
    return predict(noisy_line(), torch.ones(2, 2), 4, **options)


@pytest.mark.parametrize("ask, match", [
    (lambda: classes().interval(1.0), "`level` to be a finite number and above 0 and below 1, but got 1.0"),
    (lambda: classes().log_prob(torch.tensor([0, 3])), "classes from 0 to 2, but got 3"),
    (lambda: classes().log_prob(torch.tensor([0, -1])), "classes from 0 to 2, but got -1"),
    (lambda: classes().log_prob(torch.zeros(2)), "class indices of shape"),
    (lambda: values().probs, "a classification for `probs`"),
    (lambda: values().entropy, "a classification for `entropy`"),
    (lambda: values().log_prob(torch.zeros(2, 1)), "a likelihood with a density"),
    (lambda: values(0.1).log_prob(torch.zeros(2)), r"shape \(2, 1\) to match `prediction`, but got shape \(2,\)"),
    (lambda: values(keep=0).interval(0.9), "kept draws, but got none"),
])  # fmt: skip
def test_bad_questions_are_refused(ask, match):
    assert_refused(match, ask)


# Calibration after the fact: the temperature is found, the coverage is what is promised.


def overconfident(rows, seed, factor=3.0):
    """Logits `factor` times too large, with classes from the true ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 4, generator=generator)
    y = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return prediction_of(factor * logits.unsqueeze(0)), y


def test_the_temperature_is_the_minimum_of_the_nll():
    p, y = overconfident(5000, seed=0)
    found = fit_temperature(p, y)
    reference = minimize_scalar(
        lambda t: float(vd.metrics.nll(apply_temperature(p.probs.double(), t), y)), bounds=(0.1, 10),
        method="bounded", options={"xatol": 1e-8},
    )  # fmt: skip
    assert found == pytest.approx(reference.x, rel=1e-4)
    assert found == pytest.approx(3.0, rel=0.1)


def test_scaling_mends_the_calibration_of_other_data():
    found = fit_temperature(*overconfident(5000, seed=0))
    p, y = overconfident(5000, seed=1)
    assert vd.metrics.ece(apply_temperature(p.probs, found), y) < 0.3 * vd.metrics.ece(p.probs, y)


def test_certain_classes_stay_in_range():
    assert torch.isfinite(apply_temperature(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 5.0)).all()
    p, _ = overconfident(50, seed=0)
    assert fit_temperature(p, p.probs.argmax(1)) < 0.01  # never wrong: as cold as it gets


@pytest.mark.parametrize("likelihood", [vd.Categorical(), vd.Gaussian(0.5)], ids=repr)
def test_a_conformal_rule_is_for_the_mode_that_it_was_fitted_on(likelihood):
    net = vd.convert(nn.Linear(4, 3), vd.bayes_by_backprop()).eval()
    x, given = torch.randn(40, 4), {"likelihood": likelihood}
    y = torch.randint(3, (40,)) if likelihood.class_axis is not None else torch.randn(40, 3)
    sampled, moments = predict(net, x, seed=0, **given), predict(net, x, mode="moments", **given)
    by_draws, by_moments = conformal(sampled, y), conformal(moments, y)
    rules = (by_draws, sampled, moments, "moments"), (by_moments, moments, sampled, "sample")
    for rule, same, other, mode in rules:
        apply = rule.classes if same.classifies else rule.interval
        apply(same)
        assert_refused(f'but got mode="{mode}".*Fit the rule again', apply, other)
        assert_refused(f'but got mode="{mode}"', vd.freeze, net, mode=mode, conformal=rule, **given)
    joined = predict(net, x.split(20), mode="moments", **given)
    apply = by_draws.classes if joined.classifies else by_draws.interval
    assert_refused('but got mode="moments"', apply, joined)


@pytest.mark.parametrize("likelihood", [vd.Gaussian(0.1), vd.Values()])
def test_the_interval_of_moments_is_exact_and_needs_no_draws(likelihood):
    x, level = torch.randn(3, 2, generator=torch.Generator().manual_seed(1)), 0.9
    p = predict(noisy_line(), x, 4, mode="moments", likelihood=likelihood, keep=0)
    for bound, tail in zip(p.interval(level), (0.05, 0.95), strict=True):
        exact = torch.from_numpy(norm.ppf(tail, p.mean.double(), p.std.double())).float()
        torch.testing.assert_close(bound, exact)


def test_a_prediction_by_moments_is_not_rescaled():
    net = vd.convert(nn.Linear(4, 1), vd.bayes_by_backprop()).eval()
    given = {"mode": "moments", "likelihood": vd.Gaussian(0.5)}
    p = predict(net, torch.randn(3, 4), **given)
    assert_refused(r'mode="moments".*likelihood=p.likelihood.scaled', p.rescale, 1.0)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_conformal_sets_cover_as_promised(level):
    fresh, y = overconfident(400, seed=0)
    rules = [conformal(*overconfident(100, seed), level) for seed in range(1, 201)]
    inside = torch.stack([rule.classes(fresh) for rule in rules]).float()
    mean = float(inside.gather(2, y.view(1, -1, 1).expand(200, -1, 1)).mean())
    # Over calibration sets the coverage is at least the level; the test rows add their own error.
    error = math.sqrt(level * (1 - level) * (1 / 400 + 1 / (200 * 100)))
    assert mean > level - 5 * error
    assert mean < level + 1 / 101 + 5 * error


def test_too_few_rows_give_the_whole_set():
    rule = conformal(*overconfident(5, seed=0), 0.99)
    assert math.isinf(rule.quantile)
    assert rule.classes(overconfident(3, seed=1)[0]).all()


def test_bad_input_is_refused():
    p, y = overconfident(20, seed=0)
    net, x = vd.convert(nn.Linear(2, 1), vd.bayes_by_backprop()), torch.ones(3, 2)
    values, binary = (predict(net, x, likelihood=q) for q in (vd.Gaussian(1.0), vd.Bernoulli()))
    certain = predict(net, x, mode="mean", likelihood=vd.Values())
    for match, call, *arguments in (
        ("`temperature` to be a finite number and above 0, but got 0", apply_temperature, p.probs, 0.0),
        ("classes from 0 to 3, but got 9", fit_temperature, p, torch.full((20,), 9)),
        ("classes from 0 to 3, but got 9", conformal, p, torch.full((20,), 9)),
        ("`level` to be a finite number and above 0 and below 1", conformal, p, y, 1.5),
        ("regression for `interval`, but got classes", conformal(p, y).interval, p),
        (r"shape \(3, 1\) to match `prediction`, but got shape \(3,\)", conformal, values, torch.zeros(3)),
        ("a positive `std` for every example", conformal, certain, torch.zeros(3, 1)),
        (r"but got Bernoulli\(\)", conformal, binary, torch.zeros(3, 1)),
    ):  # fmt: skip
        assert_refused(match, call, *arguments)


def certain(mean):
    """A prediction of values with mean and deviation one."""
    return prediction_of(mean.unsqueeze(0), vd.Gaussian(1.0))


@pytest.mark.parametrize("rows", [5, 30])
@pytest.mark.parametrize("dependent", [True, False])
def test_conformal_intervals_hold_all_outputs_of_a_row(rows, dependent):
    generator = torch.Generator().manual_seed(0)
    outputs, level, trials = 40, 0.9, 2000
    noise = torch.randn(trials, rows + 1, 1 if dependent else outputs, generator=generator)
    mean = torch.randn(rows + 1, outputs, generator=generator)
    y = mean + 0.5 * noise  # half of the deviation that is predicted
    held, fresh, covered = certain(mean[:rows]), certain(mean[rows:]), []
    for trial in y:
        lower, upper = conformal(held, trial[:rows], level).interval(fresh)
        covered.append(bool(((trial[rows:] >= lower) & (trial[rows:] <= upper)).all()))
    found, error = sum(covered) / trials, math.sqrt(level * (1 - level) / trials)
    assert found > level - 5 * error
    assert found < min(level + 1 / (rows + 1) + 5 * error, 1.0) or rows < 9


def test_conformal_sets_hold_all_pixels_of_a_row():
    generator = torch.Generator().manual_seed(0)
    logits, trials, rows, level = torch.randn(1, 3, generator=generator), 1500, 19, 0.9
    held, fresh = (prediction_of(logits.view(1, 1, 3, 1).expand(1, n, 3, 20)) for n in (rows, 1))
    probs = logits.softmax(1).expand(trials * (rows + 1), 3)
    classes = torch.multinomial(probs, 1, generator=generator)
    y = classes.view(trials, rows + 1, 1).expand(trials, rows + 1, 20)  # pixels of a row agree
    covered = [
        bool(conformal(held, t[:rows], level).classes(fresh).gather(1, t[rows:].unsqueeze(1)).all())
        for t in y
    ]
    assert sum(covered) / trials > level - 5 * math.sqrt(level * (1 - level) / trials)


def test_binary_predictions_have_a_temperature_too():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5000, 1, generator=generator)
    y = torch.bernoulli(logits.sigmoid(), generator=generator)
    p = prediction_of(3 * logits.unsqueeze(0), vd.Bernoulli())
    found = fit_temperature(p, y)
    assert found == pytest.approx(3.0, rel=0.1)
    torch.testing.assert_close(apply_temperature(p, found), (3 * logits / found).sigmoid())


def test_a_prediction_is_tempered_in_log_space():
    p = prediction_of(torch.tensor([[[0.0, 200.0]]]))
    assert float(p.probs[0, 0]) == 0.0
    expected = torch.tensor([[0.0, 2.0]]).softmax(1)
    torch.testing.assert_close(apply_temperature(p, 100.0), expected)


@pytest.mark.parametrize("std", [0.1, 1.0, 10.0])
def test_the_width_of_values_does_not_depend_on_where_it_starts(std):
    x, net, error = torch.randn(50, 2), torch.nn.Linear(2, 1).eval(), 0.0098 * torch.randn(50, 1)
    found = vd.calibrate(net, (x, net(x).detach() + error), vd.Gaussian(std=std))
    assert float(found.std) == pytest.approx(float(error.square().mean().sqrt()), rel=1e-3)
