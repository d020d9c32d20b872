"""Variance layers draw the moments they state, and the swap keeps variances and reports its KL."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal as TorchNormal, kl_divergence

import vardrop as vd
from tests.refusals import assert_refused

FOUR = {
    "layer": vd.MultiplicativeGaussian(0.5, per="layer"),
    "neuron": vd.MultiplicativeGaussian(0.5, per="output"),
    "weight": vd.MultiplicativeGaussian(0.5, per="weight"),
    "additive": vd.AdditiveGaussian(-3.0),
}


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("noisy_bias", [False, True])
def test_swap_keeps_variances_and_reports_the_kl(name, noisy_bias):
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    vd.convert(net, vd.Recipe(FOUR[name], vd.LogUniform(), noisy_bias=noisy_bias), include="0")
    layer = net[0]
    assert isinstance(layer, vd.Variational)
    mean, std = layer.weight.detach().clone(), layer.variance().detach().sqrt()
    expected = kl_divergence(TorchNormal(mean, std), TorchNormal(0 * mean, std)).sum()
    if noisy_bias:
        bias = layer.bias.detach().clone()
        bias_std = layer.noisy_tensors()["bias"].variance().detach().sqrt()
        normals = TorchNormal(bias, bias_std), TorchNormal(0 * bias, bias_std)
        expected += kl_divergence(*normals).sum()
    swap = vd.to_variance(net)
    assert swap.kl == {"0": pytest.approx(expected.item(), rel=1e-9)}
    assert swap.total == sum(swap.kl.values())
    assert torch.allclose(layer.variance(), std.square(), rtol=1e-12, atol=0)
    assert layer.posterior == vd.ZeroMean()
    assert bool((layer.weight == 0).all())
    assert not layer.weight.requires_grad
    if noisy_bias:
        assert torch.allclose(layer.bias_sigma, bias_std)


def test_swap_reports_one_over_two_alpha_a_weight():
    recipe = vd.variational_dropout(per="layer", drop_rate=0.8, max_alpha=None)
    swap = vd.to_variance(vd.convert(nn.Linear(4, 3), recipe))
    assert swap.total == pytest.approx(12 / (2 * 4), rel=1e-6)
    assert str(swap).splitlines()[1] == "  (net)  12 weights  1.5 nats, 0.125 per weight"


def test_swap_leaves_everything_else():
    parts = vd.AdditiveGaussian(), vd.Normal(std=0.5, learned=True), vd.flipout
    recipe = vd.Recipe(*parts, vd.GaussianDropout(0.2))
    net = vd.convert(nn.Linear(4, 3), recipe).eval()
    gate = net.gate
    net.prior_log_std.data.fill_(0.7)
    net.sampling = True
    vd.to_variance(net)
    assert (net.estimator, net.prior, net.sampling) == (vd.flipout, recipe.prior, True)
    assert net.gate is gate
    assert not net.training
    assert net.prior_log_std.item() == pytest.approx(0.7)


def test_swapped_net_trains_and_reverts():
    net = vd.convert(nn.Linear(4, 3), vd.variational_dropout(per="layer"))
    vd.to_variance(net)
    elbo = vd.ELBO(net, vd.Categorical(), num_data=10)
    elbo(torch.randn(5, 4), torch.zeros(5).long()).loss.backward()
    assert net.sigma.grad is not None
    assert vd.kl(net).item() == 0
    assert vd.revert(net).weight.requires_grad


def test_where_selects_layers():
    net = vd.convert(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), vd.sparse_vd())
    assert list(vd.to_variance(net, include="1").kl) == ["1"]
    assert vd.noisy.noisy_modules(net)["0"].posterior == vd.AdditiveGaussian()


def test_swap_refuses_what_has_no_gaussian():
    net = vd.convert(nn.Linear(2, 2), vd.dropconnect())
    assert_refused(r"Expected module '\(net\)' to have a Gaussian", vd.to_variance, net)
    assert_refused("`include` to select layers with noisy", vd.to_variance, net, include="x")
    assert_refused("Expected `net` to have noisy modules", vd.to_variance, nn.Linear(2, 2))


@pytest.mark.parametrize("gate", [vd.BetaBernoulli(a=0.5), vd.Standout(), vd.NormalJeffreys()])
def test_a_gate_stays_as_it_is(gate):
    recipe = vd.Recipe(vd.AdditiveGaussian(-4.0), vd.LogUniform(), gate=gate)
    net = vd.convert(nn.Conv2d(2, 3, 3), recipe).eval()
    with torch.no_grad():
        net.bias.fill_(5.0)
        net.weight.zero_()
        if isinstance(gate, vd.NormalJeffreys):
            net.gate.mu.mul_(0.3)
    x, own, tensors = torch.randn(1, 2, 5, 5), net.gate, copy.deepcopy(net.gate.state_dict())
    expected = net(x)  # the means are zero: the swap changes nothing
    vd.to_variance(net)
    assert net.gate is own
    torch.testing.assert_close(dict(net.gate.state_dict()), dict(tensors), rtol=0, atol=0)
    assert torch.equal(net.bias, torch.full((3,), 5.0))
    assert torch.equal(net(x), expected)
    torch.testing.assert_close(net.sigma.detach(), torch.full_like(net.weight, math.exp(-2.0)))
