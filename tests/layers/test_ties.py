"""Modules that share a weight have one posterior, one prior and one KL, however they came to it."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import vardrop as vd
from tests.nets import Parts, Tied
from tests.refusals import assert_refused
from tests.replay import replay
from vardrop.testing import RECIPES

WEIGHTS = [n for n, r in RECIPES.items() if not r.gate and r.posterior and r.prior]
GATES = [n for n, r in RECIPES.items() if r.gate and not r.gate.input_dependent]
MADE = ["at once", "one by one"]


def pair(bias=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=bias), nn.ReLU(), nn.Linear(4, 4, bias=bias))
    net[2].weight = net[0].weight
    return net


def convert(net, recipe, made):
    for where in [None] if made == "at once" else ["0", "2"]:
        vd.convert(net, recipe, include=where)
    return net


@torch.no_grad()
def kl(net):
    return replay(vd.kl, net)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("recipe", WEIGHTS)
def test_a_tied_weight_counts_once(recipe, made):
    both = convert(pair(), RECIPES[recipe], made)
    one = vd.convert(nn.Sequential(pair()[0]), RECIPES[recipe])
    torch.testing.assert_close(kl(both), kl(one))
    names = [n for n, _ in both.named_parameters()]
    assert names == [n for n, _ in one.named_parameters()], "noise is shared with the weight"


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("recipe", ["own-noisy_bias", "bayes_by_backprop-learned_prior"])
def test_every_parameter_of_a_tied_pair_learns(recipe, made):
    net = convert(pair(bias=True), RECIPES[recipe], made)
    elbo = vd.ELBO(net, vd.Categorical(), num_data=10)
    elbo(torch.randn(5, 4), torch.zeros(5, dtype=torch.long)).loss.backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("made", MADE)
def test_biases_of_their_own_count_each(made):
    recipe = RECIPES["own-noisy_bias"]
    both = convert(pair(bias=True), recipe, made)
    apart = [vd.convert(layer, recipe) for layer in (pair(bias=True)[0], pair(bias=True)[2])]
    bias = [m.noisy_tensors()["bias"].kl() for m in apart]
    weight = apart[0].noisy_tensors()["weight"].kl()
    torch.testing.assert_close(kl(both), (weight + sum(bias)).detach())


def test_a_tied_bias_counts_once_too():
    net = pair(bias=True)
    net[2].bias = net[0].bias
    vd.convert(net, RECIPES["own-noisy_bias"])
    torch.testing.assert_close(kl(net), kl(nn.Sequential(net[0])))


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("recipe", GATES)
def test_what_gates_say_of_a_tied_weight_is_averaged(recipe, made):
    """A gate keeps a rate and a KL of its own; the weight under both counts once."""
    net = convert(pair(), RECIPES[recipe], made)
    for tensor in net[2].gate.parameters():
        tensor.data.add_(0.3)
    gates = [m.gate for m in (net[0], net[2])]
    own = [t for g in gates if not g.noise.counts_weights and (t := g.kl()) is not None]
    of_weight = [t for g in gates if (t := g.noise.weight_kl(net[0].weight, g.tensors)) is not None]
    expected = sum(own, torch.zeros(())) + sum(of_weight) / 2
    if net[0].posterior:
        expected = expected + net[0].noisy_tensors()["weight"].kl()
    torch.testing.assert_close(kl(net), expected.detach())


def test_what_cannot_be_shared_is_refused():
    net = vd.convert(pair(), vd.sparse_vd(), include="0")
    assert_refused("one posterior and one prior.*same", vd.convert, net, vd.ard(), include="2")
    assert type(net[2]) is nn.Linear
    net, recipe = Tied(), vd.variational_dropout("B", per="input")
    assert_refused("share `log_alpha`.*per='weight'", vd.convert, net, recipe)
    assert [type(m) for m in net.children()] == [nn.Embedding, nn.Linear]
    vd.convert(net, vd.variational_dropout("B", per="weight"))
    assert net.embedding.log_alpha is net.decoder.log_alpha


def test_weights_that_are_computed_are_not_taken_for_tied():
    recipe = vd.Recipe(vd.posteriors.Bernoulli(0.5), vd.Normal(), vd.weight_sample)
    net = vd.convert(nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))), recipe)
    for layer in net:
        parametrize.register_parametrization(layer, "weight", Parts(lambda net, weight: 2 * weight))
    with torch.no_grad():
        expected = sum(m.weight.square().sum() for m in net)  # 1 / (2 (1 - 0.5))
    torch.testing.assert_close(kl(net), expected)
