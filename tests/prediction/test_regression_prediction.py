"""Regression: mixtures, densities, and a heteroscedastic toy with a gap outside the data."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused
from vardrop.prediction import Prediction, predict
from vardrop.prediction.prediction import mixture_quantile


def noisy_line() -> nn.Module:
    torch.manual_seed(0)
    return vd.convert(nn.Linear(2, 1), vd.bayes_by_backprop(log_sigma2=0.0))


def test_gaussian_variances_add_up() -> None:
    net, x, n = noisy_line(), torch.ones(3, 2), 4000
    p = predict(net, x, n, likelihood=vd.Gaussian(0.5), seed=0, keep=n)
    assert torch.equal(p.aleatoric, torch.full((3, 1), 0.25))
    torch.testing.assert_close(p.epistemic, p.draws.var(0))
    torch.testing.assert_close(p.std.square(), p.aleatoric + p.epistemic)
    assert (p.epistemic / 2 - 1).abs().max() < 6 * math.sqrt(2 / n)  # two weights of variance 1


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_intervals_are_those_of_the_mixture_not_of_one_normal(level: float) -> None:
    net, x = noisy_line(), torch.ones(1, 2)
    p = predict(net, x, 20, likelihood=vd.Gaussian(0.1), seed=0)
    means = p.draws.double().flatten()
    for found, tail in zip(p.interval(level), ((1 - level) / 2, (1 + level) / 2), strict=True):
        exact = brentq(lambda t, q=tail: norm.cdf((t - means) / 0.1).mean() - q, -50, 50)
        assert float(found) == pytest.approx(exact, abs=1e-4)


def test_without_noise_of_the_targets_intervals_are_quantiles_of_the_draws() -> None:
    p = predict(noisy_line(), torch.ones(1, 2), 50, likelihood=vd.Values(), seed=0)
    lower, upper = p.interval(0.9)
    torch.testing.assert_close(lower, p.draws.quantile(0.05, 0))
    torch.testing.assert_close(upper, p.draws.quantile(0.95, 0))


def test_probabilities_have_intervals_over_the_draws() -> None:
    net = vd.convert(nn.Linear(2, 3), vd.bayes_by_backprop(log_sigma2=0.0))
    p = predict(net, torch.ones(2, 2), 40, seed=0)
    lower, upper = p.interval(0.5)
    assert ((lower <= p.draws.softmax(2).median(0).values) & (upper >= lower)).all()
    torch.testing.assert_close(upper, p.draws.softmax(2).quantile(0.75, 0))


def test_mixture_quantiles_of_extreme_parts() -> None:
    mean, std = torch.tensor([[-1000.0], [1000.0]]), torch.tensor([[1e-3], [1e-3]])
    assert float(mixture_quantile(mean, std, 0.25)) == pytest.approx(-1000, abs=1e-2)
    assert float(mixture_quantile(mean, std, 0.75)) == pytest.approx(1000, abs=1e-2)


def test_the_log_density_is_the_log_of_the_mean_density() -> None:
    net, x = noisy_line(), torch.randn(4, 2)
    y = torch.randn(4, 1)
    p = predict(net, x, 30, likelihood=vd.Gaussian(0.5), seed=0)
    density = norm.pdf((y - p.draws).double() / 0.5) / 0.5
    torch.testing.assert_close(
        p.log_prob(y).double(), torch.tensor(density).mean(0).squeeze(1).log(), rtol=1e-4, atol=1e-4
    )
    far = p.log_prob(y + 1e4)  # every density underflows; its logarithm does not
    assert torch.isfinite(far).all()


def test_classes_and_binary_targets_have_log_probabilities() -> None:
    net = vd.convert(nn.Linear(2, 3), vd.bayes_by_backprop(log_sigma2=0.0))
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 2, 1])
    p = predict(net, x, 10, seed=0)
    torch.testing.assert_close(p.log_prob(y), p.probs[torch.arange(4), y].log())
    binary = predict(net, x, 10, likelihood=vd.Bernoulli(), seed=0)
    target = torch.tensor([[0.0, 1.0, 1.0]]).expand(4, 3)
    probs = binary.draws.sigmoid()
    chosen = torch.where(target > 0, probs, 1 - probs).prod(2)  # of the three together
    torch.testing.assert_close(binary.log_prob(target), chosen.mean(0).log())
    entropies = -(binary.probs.xlogy(binary.probs) + (1 - binary.probs).xlogy(1 - binary.probs))
    torch.testing.assert_close(binary.entropy, entropies)
    assert binary.epistemic.min() >= 0


def test_classes_may_have_further_axes() -> None:
    net = vd.convert(nn.Conv2d(1, 3, 1), vd.bayes_by_backprop(log_sigma2=0.0))
    p = predict(net, torch.randn(2, 1, 4, 4), 10, seed=0)
    assert p.probs.shape == (2, 3, 4, 4)
    assert p.entropy.shape == p.epistemic.shape == (2, 4, 4)
    y = torch.randint(3, (2, 4, 4))
    each = p.draws.log_softmax(2).gather(2, y.expand(10, 1, 2, 4, 4).transpose(1, 2)).squeeze(2)
    together = each.flatten(2).sum(2).exp().mean(0).log()  # all pixels of an image under one draw
    torch.testing.assert_close(p.log_prob(y), together)


def classes() -> Prediction:
    return predict(vd.convert(nn.Linear(2, 3), vd.bayes_by_backprop()), torch.ones(2, 2), 4)


def values(noise_std: float = 0.0, keep: int = 4) -> Prediction:
    likelihood = vd.Gaussian(noise_std) if noise_std else vd.Values()
    options = {"likelihood": likelihood, "keep": keep}
    return predict(noisy_line(), torch.ones(2, 2), 4, **options)


@pytest.mark.parametrize("ask, match", [
    (
        lambda: classes().interval(1.0),
        "`level` to be a finite number and above 0 and below 1, but got 1.0",
    ),
    (lambda: classes().log_prob(torch.tensor([0, 3])), "classes from 0 to 2, but got 3"),
    (lambda: classes().log_prob(torch.tensor([0, -1])), "classes from 0 to 2, but got -1"),
    (lambda: classes().log_prob(torch.zeros(2)), "class indices of shape"),
    (lambda: values().probs, "a classification for `probs`"),
    (lambda: values().entropy, "a classification for `entropy`"),
    (lambda: values().log_prob(torch.zeros(2, 1)), "a likelihood with a density"),
    (
        lambda: values(0.1).log_prob(torch.zeros(2)),
        r"shape \(2, 1\) of the prediction, but got \(2,\)",
    ),
    (lambda: values(keep=0).interval(0.9), "kept draws, but got none"),
])  # fmt: skip
def test_bad_questions_are_refused(ask: object, match: str) -> None:
    assert_refused(match, ask)
