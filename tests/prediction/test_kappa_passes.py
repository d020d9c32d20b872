"""What all diagnostics keep to: losses per example, and batches that stay as they are."""

import pytest
import torch
from torch import nn

import vardrop as vd
from experiments.diagnostics import accuracies, gradient_variance, likelihood_covariance
from vardrop.prediction.kappa import kappa

IMAGES = [(torch.randn(4, 1, 2, 3), torch.randint(2, (4, 2, 3))) for _ in range(6)]


def pixels():
    return vd.convert(nn.Conv2d(1, 2, 1), vd.bayes_by_backprop(log_sigma2=-3.0))


def per_example(output, y):
    return nn.functional.cross_entropy(output, y, reduction="none").flatten(1).sum(1)


def mean(output, y):
    return per_example(output, y).mean()


def same(first, second):
    """The results of two calls from one seed."""
    found = []
    for call in (first, second):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            found.append(call())
    return found


def test_kappa_is_per_example():
    net = pixels()
    mine, expected = same(lambda: kappa(net, IMAGES), lambda: kappa(net, IMAGES, mean))
    torch.testing.assert_close(mine, expected)


def test_gradients_and_likelihoods_are_per_example():
    net = pixels()
    mine, expected = same(
        lambda: gradient_variance(net, IMAGES), lambda: gradient_variance(net, IMAGES, mean)
    )
    assert mine["weight"].value == pytest.approx(expected["weight"].value)
    mine, expected = same(
        lambda: likelihood_covariance(net, IMAGES),
        lambda: likelihood_covariance(net, IMAGES, per_example),
    )
    assert mine.variance.value == pytest.approx(expected.variance.value)


@pytest.mark.parametrize("diagnose", [accuracies, gradient_variance, kappa, likelihood_covariance])
def test_a_net_that_begins_in_place_leaves_the_batches_alone(diagnose):
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))
    vd.convert(net, vd.bayes_by_backprop(log_sigma2=-3.0))
    batches = [(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0])) for _ in range(4)]
    before = [x.clone() for x, _ in batches]
    diagnose(net, batches)
    assert all(torch.equal(x, b) for (x, _), b in zip(batches, before, strict=True))
