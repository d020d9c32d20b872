"""kappa against autograd's Hessian, and its stochastic estimator by a z-test."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

import vardrop as vd
from experiments.diagnostics import accuracies, gradient_variance, likelihood_covariance
from experiments.selective import unlabelled_kappa
from tests.refusals import assert_refused
from tests.replay import replay
from tests.z_scores import assert_mean, assert_same_mean, z_bound
from vardrop.functional.curvature import diagonal_hessian, hutchinson_diagonal
from vardrop.functional.random import GeneratorNoise, draw_from
from vardrop.prediction.kappa import kappa


def small_net():
    net = nn.Sequential(
        nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    vd.convert(net, vd.bayes_by_backprop(log_sigma2=-2.0), include="0")
    return vd.convert(net, vd.variational_dropout(per="layer"), include="4")


def data(sizes=(5, 3)):
    return [(torch.randn(n, 1, 6).double(), torch.randint(3, (n,))) for n in sizes]


def hessian_diagonal(net, name, x, y):
    plain = copy.deepcopy(net).eval()
    weight = dict(plain.named_parameters())[name].detach()

    def log_likelihood(flat):
        output = functional_call(plain, {name: flat.view_as(weight)}, (x,))
        return -functional.cross_entropy(output, y)

    full = torch.autograd.functional.hessian(log_likelihood, weight.flatten())
    return full.diagonal().view_as(weight)


def test_at_the_means_it_matches_the_hessian_of_autograd():
    net, batches = small_net(), data()
    found = kappa(net, batches, samples=0)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert set(found) == {"0", "4"}
    for name, value in found.items():
        expected = net[int(name)].variance() * hessian_diagonal(net, f"{name}.weight", x, y)
        assert (value - expected).abs().max() <= 1e-10
        assert value.abs().max() > 1e-3  # there is something to compare


def test_single_precision_is_within_1e_5():
    net, batches = small_net(), data()
    exact = kappa(net, batches, samples=0)
    single = kappa(net.float(), [(x.float(), y) for x, y in batches], samples=0)
    for name, value in single.items():
        assert (value - exact[name]).abs().max() <= 1e-5


def test_stochastic_estimator_is_unbiased():
    net, batches = small_net(), data((4,))
    exact = kappa(net, batches, samples=0)
    draws = [kappa(net, batches, probes=2, seed=seed, samples=0) for seed in range(400)]
    for name, expected in exact.items():
        sample = torch.stack([d[name] for d in draws])
        assert sample.std(0).max() > 0
        assert_mean(sample, expected)


def test_variance_layer_is_probed_at_zero():
    # At zero means the output is the bias, and log p has a curvature from the softmax alone.
    net = vd.convert(nn.Linear(3, 2, bias=False).double(), vd.variance_layer())
    x = torch.tensor([[1.0, 2.0, 3.0]]).double()
    found = kappa(net, [(x, torch.tensor([0]))], samples=0)[""]
    assert torch.allclose(found, -0.25 * x.square() * net.sigma.detach().square())
    assert not net.weight.requires_grad


def test_tied_weights_are_reported_once_and_the_net_stays():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    vd.convert(net, vd.sparse_vd())
    assert set(kappa(net, [(torch.randn(4, 3), torch.randint(3, (4,)))])) == {"0"}
    assert net.training
    assert (net[0].sampling, net[0].weight.grad) == (None, None)


def test_it_averages_the_hessian_over_draws_of_the_weights():
    net, batches = small_net(), data((4, 2))
    found = kappa(net, batches, seed=5, samples=3)
    again = kappa(net, batches, seed=5, samples=3)
    totals = {name: torch.zeros_like(net[int(name)].weight) for name in found}
    with draw_from(GeneratorNoise(5)):
        for x, y in batches:
            for _ in range(3):
                drawn = copy.deepcopy(net)
                for layer in (drawn[0], drawn[4]):
                    weight = layer.noisy_tensors()["weight"]
                    layer.weight.data.copy_(weight.sample(weight.draw()).detach())
                for name in totals:
                    totals[name] += hessian_diagonal(drawn, f"{name}.weight", x, y) * len(y) / 3
    for name, total in totals.items():
        assert torch.equal(found[name], again[name])
        expected = net[int(name)].variance() * total / 6
        assert (found[name] - expected).abs().max() <= 1e-10


def test_a_variance_layer_before_a_relu_is_seen():
    """At the means every unit is shut; prediction, which draws too, measures the same kappa."""
    net = nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 1))
    vd.convert(net, vd.variance_layer(), include="0")
    x, runs = torch.randn(6, 3), 60
    batch = [(x, torch.zeros(6, 1))]
    half_square = lambda output, y: 0.5 * (output - y).square().sum(1).mean()
    assert not kappa(net, batch, half_square, samples=0)["0"].any()
    # Behind straight pieces the Hessian of a squared error is the Fisher matrix, whatever y is.
    ours = torch.stack([kappa(net, batch, half_square)["0"] for _ in range(runs)])
    theirs = torch.stack([unlabelled_kappa(net, x, vd.Gaussian(1.0))["0"] for _ in range(runs)])
    assert_same_mean(ours, theirs)
    error = ours.std(0) / runs**0.5
    assert (ours.mean(0) < -z_bound(error.numel()) * error).any()  # there is something to compare


@pytest.mark.parametrize("make, batches, options, match", [
    (small_net, data(), {"probes": 0}, "`probes` to be an integer of at least 1, .* None takes"),
    (small_net, [], {}, "Expected `data` to have examples"),
    (lambda: vd.convert(nn.Linear(2, 2), vd.binary_dropout()), [], {}, "to have noisy weights"),
])  # fmt: skip
def test_errors(make, batches, options, match):
    assert_refused(match, kappa, make(), batches, **options)


def test_linear_values_have_no_curvature():
    w, other = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    assert diagonal_hessian(2 * w.sum(), [w])[0].tolist() == [0.0] * 3
    assert hutchinson_diagonal(2 * w.sum(), [w])[0].tolist() == [0.0] * 3
    assert diagonal_hessian(w.pow(3).sum(), [w, other])[1].tolist() == [0.0] * 2


# What all diagnostics keep to: losses per example, and batches that stay as they are.


def per_example(output, y):
    return nn.functional.cross_entropy(output, y, reduction="none").flatten(1).sum(1)


def mean(output, y):
    return per_example(output, y).mean()


@pytest.mark.parametrize("diagnose, loss, number", [
    (kappa, mean, lambda found: found[""].tolist()),
    (gradient_variance, mean, lambda found: found["weight"].value),
    (likelihood_covariance, per_example, lambda found: found.variance.value),
])  # fmt: skip
def test_losses_are_per_example(diagnose, loss, number):
    net = vd.convert(nn.Conv2d(1, 2, 1), vd.bayes_by_backprop(log_sigma2=-3.0))
    images = [(torch.randn(4, 1, 2, 3), torch.randint(2, (4, 2, 3))) for _ in range(6)]
    mine, expected = replay(diagnose, net, images), replay(diagnose, net, images, loss)
    torch.testing.assert_close(number(mine), number(expected))


@pytest.mark.parametrize("diagnose", [accuracies, gradient_variance, kappa, likelihood_covariance])
def test_a_net_that_begins_in_place_leaves_the_batches_alone(diagnose):
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))
    vd.convert(net, vd.bayes_by_backprop(log_sigma2=-3.0))
    batches = [(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0])) for _ in range(4)]
    before = [x.clone() for x, _ in batches]
    diagnose(net, batches)
    assert all(torch.equal(x, b) for (x, _), b in zip(batches, before, strict=True))
