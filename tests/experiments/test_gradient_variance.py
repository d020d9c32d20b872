"""Gradient variance against a linear-Gaussian case with a known answer."""

import copy

import pytest
import torch
from torch import Tensor, nn

import vardrop as vd
from experiments.diagnostics import gradient_variance
from tests.refusals import assert_refused

WEIGHTS, BATCH, SIGMA, SPREAD = 20, 5, 0.7, 1.3


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().sum(1).mean()


def linear_gaussian() -> nn.Module:
    net = vd.convert(nn.Linear(1, WEIGHTS, bias=False), vd.bayes_by_backprop()).double()
    with torch.no_grad():
        net.weight.zero_()
        net.log_sigma2.fill_(2 * torch.tensor(SIGMA).log())
    return net


def batches(count: int, spread: float) -> list[tuple[Tensor, Tensor]]:
    x = torch.ones(BATCH, 1, dtype=torch.float64)
    return [(x, spread * torch.randn(BATCH, WEIGHTS).double()) for _ in range(count)]


# y_k = w_k + noise, loss = 1/2 sum_k (w_k - y_k)^2: the gradient is the batch mean of w_ik - y_ik,
# with w_ik one draw a batch or one an example.
KNOWN = [
    (vd.weight_sample, True, SIGMA**2 + SPREAD**2 / BATCH),
    (vd.per_example, True, (SIGMA**2 + SPREAD**2) / BATCH),
    (vd.local_reparameterization, True, (SIGMA**2 + SPREAD**2) / BATCH),
    (vd.flipout, True, (SIGMA**2 + SPREAD**2) / BATCH),
    (None, False, SPREAD**2 / BATCH),
]


@pytest.mark.parametrize(("estimator", "noise", "expected"), KNOWN)
def test_linear_gaussian_case_lies_in_the_interval(estimator, noise, expected) -> None:
    # Ten comparisons in this file share the error rate of 1e-6.
    data = batches(1000, SPREAD)
    result = gradient_variance(linear_gaussian(), data, half_square, estimator, noise)["weight"]
    low, high = result.interval(1 - 1e-7)
    assert low < expected < high
    assert high - low < 0.3 * expected  # the interval says something


@pytest.mark.parametrize("estimator, expected", [
    # Without data noise the gradient to log sigma^2 is the mean of sigma^2 zeta^2 / 2.
    (vd.weight_sample, SIGMA**4 / 2),
    (vd.local_reparameterization, SIGMA**4 / 2 / BATCH),
])  # fmt: skip
def test_gradient_of_the_noise_parameter(estimator, expected) -> None:
    result = gradient_variance(linear_gaussian(), batches(1000, 0.0), half_square, estimator)
    low, high = result["log_sigma2"].interval(1 - 1e-7)
    assert low < expected < high


def test_num_data_scales_by_its_square_and_repeats_add_pairs() -> None:
    net, data = linear_gaussian(), batches(4, 1.0)
    once = gradient_variance(net, data, half_square, noise=False)["weight"]
    given = {"noise": False, "num_data": 10, "repeats": 3}
    scaled = gradient_variance(net, data, half_square, **given)["weight"]
    assert scaled.value == pytest.approx(100 * once.value)
    assert (once.repetitions, scaled.repetitions) == (2, 6)


def test_net_stays_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    vd.convert(net, vd.sparse_vd(), include="0")
    net[2].weight.grad = torch.ones(2, 4)
    before = copy.deepcopy(net.state_dict())
    data = [(torch.randn(6, 3), torch.randint(2, (6,))) for _ in range(4)]
    gradient_variance(net, data, estimator=vd.per_example)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert torch.equal(net[2].weight.grad, torch.ones(2, 4))
    assert net[0].weight.grad is None
    assert net[0].estimator == vd.local_reparameterization
    assert (net.training, net[0].sampling) == (True, None)


def test_frozen_and_unused_parameters() -> None:
    net = vd.convert(nn.Linear(3, 2), vd.variance_layer())
    data = [(torch.randn(6, 3), torch.randint(2, (6,))) for _ in range(4)]
    assert set(gradient_variance(net, data)) == {"sigma", "bias"}
    assert gradient_variance(net, data, noise=False)["sigma"].value == 0


def test_estimator_is_restored_after_an_error() -> None:
    net = linear_gaussian()
    uneven = [*batches(3, 1.0), (torch.ones(2, 1).double(), torch.ones(2, WEIGHTS).double())]
    with pytest.raises(vd.VardropError, match="Expected batches of one size, but got 5 and 2"):
        gradient_variance(net, uneven, half_square, vd.flipout)
    assert net.estimator == vd.local_reparameterization


def test_errors() -> None:
    with pytest.raises(vd.VardropError, match="Expected `loader` to yield at least 4 batches"):
        gradient_variance(linear_gaussian(), batches(3, 1.0), half_square)
    net = vd.convert(nn.Linear(2, 2), vd.dropconnect())
    with pytest.raises(vd.VardropError, match="Expected an estimator that fits the posterior"):
        gradient_variance(net, [], estimator=vd.flipout)
    assert_refused("Expected `net` to have noisy modules", gradient_variance, nn.Linear(2, 2), [])
