"""Selective prediction: noise only for the weights that the likelihood feels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vardrop as vd
from experiments.selective import MaskedNoise, select, unlabelled_kappa
from tests.refusals import assert_refused


@pytest.mark.parametrize("draw", ["estimator", "functions"])
def test_only_the_selected_weights_are_noisy(draw: str) -> None:
    net = vd.convert(nn.Linear(3, 2), vd.bayes_by_backprop(log_sigma2=0.0))
    kappa = {"": torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])}
    n = 4000
    some = select(net, kappa, 0.5).net
    p = vd.predict(some, torch.eye(3), n, draw=draw, likelihood=vd.Values(), seed=0)
    variance = p.draws.var(0)
    assert variance[0, 0] == pytest.approx(1.0, abs=6 * (2 / n) ** 0.5)
    variance[0, 0] = 0
    assert variance.max() < 1e-6  # what the floor of local reparameterisation leaves
    assert type(net.posterior) is vd.AdditiveGaussian


def test_kappa_of_a_linear_classifier_is_exact_in_expectation() -> None:
    net, x = vd.convert(nn.Linear(3, 4), vd.bayes_by_backprop(log_sigma2=-20.0)), torch.randn(50, 3)
    probs = net.eval()(x).softmax(1)
    # - E_x p (1 - p) x^2, from the softmax; 64 probes a weight, six standard errors of a square.
    exact = -(probs * (1 - probs)).T @ x.square() / 50 * torch.exp(torch.tensor(-20.0))
    assert (unlabelled_kappa(net, x)[""] / exact - 1).abs().max() < 6 * (2 / 64) ** 0.5


@pytest.mark.parametrize("likelihood, outputs, exact", [
    (vd.Gaussian(0.5), 1, 4.0), (vd.Bernoulli(), 1, 0.25), (vd.HeteroscedasticGaussian(), 2, None),
])  # fmt: skip
def test_scores_of_the_other_likelihoods(
    likelihood: vd.likelihoods.Likelihood, outputs: int, exact: float | None
) -> None:
    net = vd.convert(nn.Linear(1, outputs, bias=False), vd.bayes_by_backprop(log_sigma2=0.0))
    net.weight.data.zero_()
    net.log_sigma2.data.fill_(-30.0)
    found = unlabelled_kappa(net, torch.ones(20_000, 1), likelihood)[""] / -net.variance()
    # N(0, s^2): 1 / s^2. Bernoulli: p (1 - p). Log variance: 1 for the mean, 1/2 for itself.
    expected = torch.tensor([[1.0], [0.5]]) if exact is None else torch.tensor([[exact]])
    assert (found / expected - 1).abs().max() < 6 * (2 / 64) ** 0.5


def test_selected_noise_answers_as_a_posterior() -> None:
    whole = vd.AdditiveGaussian(0.0)
    q, axes = MaskedNoise(whole), vd.Linear.axes
    weight = torch.ones(1, 2)
    tensors = {**q.initial(weight, axes), "sampled": torch.tensor([[1.0, 0.0]])}
    assert q.variance(weight, tensors).tolist() == [[1.0, 0.0]]
    assert q.perturbation(weight, torch.ones(1, 2), tensors).tolist() == [[1.0, 0.0]]
    assert torch.equal(q.log_alpha(weight, tensors), whole.log_alpha(weight, tensors))
    assert q.symmetric
    assert q.learned
    assert not q.zero_mean
    assert vd.from_json(vd.to_json(q)) == q


def test_bad_input_is_refused() -> None:
    net = vd.convert(nn.Linear(3, 2), vd.sparse_vd())
    assert_refused("`threshold` to be a finite number and at least 0", select, net, {}, -1.0)
    assert_refused(r"none for \[''\]", select, net, {}, 0.1)
    plain, told = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), "noisy weights to select from"
    assert_refused(f"Expected {told}, but got none", select, plain, {}, 0.1)
    told = "a likelihood with a density"
    assert_refused(told, unlabelled_kappa, net, torch.ones(2, 3), vd.Values())
