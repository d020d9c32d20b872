"""Likelihoods: densities in log space, one convention, one object for every verb."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import vardrop as vd
from tests.refusals import assert_refused
from tests.z_scores import assert_mean, assert_variance
from vardrop.likelihoods import Likelihood, resolve_likelihood

CASES = {
    "categorical": (vd.Categorical(), (4, 3), torch.tensor([0, 2, 1, 1])),
    "pixels": (vd.Categorical(), (4, 3, 2, 2), torch.randint(3, (4, 2, 2))),
    "bernoulli": (vd.Bernoulli(), (4, 3), torch.randint(2, (4, 3)).float()),
    "gaussian": (vd.Gaussian(0.7), (4, 3), torch.randn(4, 3)),
    "learned deviation": (vd.Gaussian(0.7, learned=True), (4, 2, 3), torch.randn(4, 2, 3)),
    "heteroscedastic": (vd.HeteroscedasticGaussian(), (4, 6), torch.randn(4, 3)),
}


def reference(likelihood: Likelihood, output: Tensor, y: Tensor) -> Tensor:
    """log p of every target by torch's own distributions."""
    if isinstance(likelihood, vd.Categorical):
        return torch.distributions.Categorical(logits=output.movedim(1, -1)).log_prob(y)
    if isinstance(likelihood, vd.Bernoulli):
        return torch.distributions.Bernoulli(logits=output).log_prob(y)
    if isinstance(likelihood, vd.Gaussian):
        return torch.distributions.Normal(output, 0.7).log_prob(y)
    mean, log_variance = output.chunk(2, -1)
    return torch.distributions.Normal(mean, (0.5 * log_variance).exp()).log_prob(y)


@pytest.mark.parametrize("name", CASES)
def test_the_nll_sums_over_targets_and_averages_over_examples(name: str) -> None:
    likelihood, shape, y = CASES[name]
    output = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = -reference(likelihood, output, y).reshape(4, -1).sum(1).mean()
    torch.testing.assert_close(likelihood(output, y), expected)
    torch.testing.assert_close(likelihood.nll(output, y), expected)


@pytest.mark.parametrize("name", CASES)
def test_the_log_probability_is_that_of_a_mixture_of_draws(name: str) -> None:
    likelihood, shape, y = CASES[name]
    draws = torch.randn(7, *shape, generator=torch.Generator().manual_seed(0))
    each = torch.stack([reference(likelihood, d, y).reshape(4, -1).sum(1) for d in draws])
    torch.testing.assert_close(likelihood.log_prob(draws, y), each.exp().mean(0).log())
    torch.testing.assert_close(likelihood.log_prob(draws[:1], y), each[0])


@pytest.mark.parametrize("likelihood", [vd.Categorical(), vd.Bernoulli()], ids=repr)
def test_parts_of_extreme_logits_are_finite(likelihood: Likelihood) -> None:
    draws = torch.tensor([[[1e4, -1e4], [0.0, 200.0]], [[-3e4, 3e4], [0.0, 200.0]]])
    parts = likelihood.parts(draws)
    assert parts.log_probs.isfinite().all()
    assert parts.aleatoric.isfinite().all()
    assert parts.aleatoric.min() >= 0


def test_a_class_of_probability_zero_adds_no_entropy() -> None:
    assert not vd.Categorical().parts(torch.tensor([[[-math.inf, 0.0]]])).aleatoric.any()
    assert not vd.Bernoulli().parts(torch.tensor([[-math.inf]])).aleatoric.any()


@pytest.mark.parametrize("name", CASES)
def test_samples_have_the_distribution_of_the_target(name: str) -> None:
    likelihood, shape, _ = CASES[name]
    output = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    drawn = torch.stack([likelihood.sample(output) for _ in range(2000)])
    if isinstance(likelihood, vd.Categorical):
        assert_mean(torch.stack([(drawn == c).float() for c in range(3)], 2), output.softmax(1))
    elif isinstance(likelihood, vd.Bernoulli):
        assert_mean(drawn, output.sigmoid())
    else:
        parts = likelihood.parts(output.unsqueeze(0))
        assert_mean(drawn, parts.location[0])
        assert_variance(drawn, parts.aleatoric[0])


def test_the_deviation_of_a_gaussian_is_public_and_fixed_copies_keep_it() -> None:
    learned = vd.Gaussian(0.5, learned=True)
    fixed = learned.frozen_copy()
    learned.log_std.data.fill_(math.log(2.0))
    assert (float(learned.std), float(fixed.std)) == (pytest.approx(2.0), pytest.approx(0.5))
    assert not list(fixed.parameters())
    assert repr(fixed) == "Gaussian(std=0.5)"


def test_values_have_no_density() -> None:
    draws = torch.randn(3, 2, 1)
    parts = vd.Values().parts(draws)
    assert torch.equal(parts.location, draws)
    assert not parts.aleatoric.any()
    with pytest.raises(vd.VardropError, match="a likelihood with a density, but got Values"):
        vd.Values().nll(draws[0], draws[0])


def test_an_objective_brings_its_likelihood() -> None:
    net = vd.convert(nn.Linear(2, 1), vd.bayes_by_backprop())
    elbo = vd.ELBO(net, vd.Gaussian(0.3), num_data=10)
    assert resolve_likelihood(elbo, None) == (net, elbo.likelihood)
    other = vd.Values()
    assert resolve_likelihood(elbo, other) == (net, other)
    assert resolve_likelihood(net, other) == (net, other)
    own = vd.ELBO(net, lambda output, y: output.mean(), num_data=10)
    assert_refused("Expected `likelihood` to be one of vardrop's", resolve_likelihood, own, None)
    assert_refused("one of vardrop's.*but got 'gaussian'", resolve_likelihood, net, "gaussian")
    assert_refused("a torch.nn.Module or an ELBO, but got 3", resolve_likelihood, 3, None)


@pytest.mark.parametrize("likelihood, output, y, match", [
    (vd.Categorical(), torch.zeros(2, 3), torch.tensor([0, 3]), "classes from 0 to 2"),
    (vd.Categorical(), torch.zeros(2, 3), torch.zeros(2), "class indices of shape"),
    (vd.Bernoulli(), torch.zeros(2, 1), torch.zeros(2), r"shape \(2, 1\)"),
    (vd.Bernoulli(), torch.zeros(2), torch.tensor([0.5, 1.0]), "zeros and ones"),
    (vd.Gaussian(), torch.zeros(2, 1), torch.zeros(2), r"shape \(2, 1\)"),
])  # fmt: skip
def test_targets_that_do_not_fit_are_refused(likelihood, output, y, match: str) -> None:
    assert_refused(match, likelihood.check_target, output, y)
