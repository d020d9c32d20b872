"""Function draws: one net of frozen weights and masks, the same for every batch."""

import copy

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.nets import assert_unchanged
from tests.refusals import assert_refused
from tests.z_scores import assert_mean, assert_variance

RECIPES = [
    vd.bayes_by_backprop(log_sigma2=-2.0), vd.Recipe(vd.AdditiveGaussian(-2.0), noisy_bias=True),
    vd.variance_layer("sign"), vd.dropconnect(0.3), vd.binary_dropout(0.4),
    vd.variational_dropout("A"),
]  # fmt: skip


def conv_net(recipe):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip
    return vd.convert(net, recipe)


def images(rows=5):
    return torch.randn(rows, 1, 5, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_row_gets_the_same_output_in_every_batch(recipe):
    f, x = vd.draw(conv_net(recipe), seed=0), images()
    whole = f(x)
    torch.testing.assert_close(torch.cat([f(x[2:]), f(x[:2])]), torch.cat([whole[2:], whole[:2]]))
    torch.testing.assert_close(f(x[3:4]), whole[3:4])
    f.train()
    f.eval()
    torch.testing.assert_close(f(x), whole)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_seed_gives_the_same_function_and_leaves_net_and_generator(recipe):
    net, state = conv_net(recipe).train(), torch.get_rng_state()
    with assert_unchanged(net):
        first, again, other = vd.draw(net, seed=0), vd.draw(net, seed=0), vd.draw(net, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first(images()), again(images()))
    assert not torch.equal(first(images()), other(images()))
    assert not any(p.requires_grad for p in first.parameters())


def test_the_drawn_net_is_made_of_plain_layers_and_can_be_copied():
    net = vd.convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), vd.sparse_vd())
    f = vd.draw(net, seed=0)
    assert [type(m) for m in f] == [nn.Linear, nn.ReLU, nn.Linear]
    assert not any(isinstance(m, vd.noisy.Noisy) for m in f.modules())
    assert set(f.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    x = torch.randn(2, 4)
    assert torch.equal(copy.deepcopy(f)(x), f(x))
    assert f(x.requires_grad_()).requires_grad


def test_draws_are_different_functions_that_stay_as_they_are():
    net, x = vd.convert(nn.Linear(4, 3), vd.bayes_by_backprop(log_sigma2=0.0)), torch.randn(2, 4)
    functions = list(vd.draws(net, 3, seed=0))
    outputs = [f(x) for f in functions]
    assert not torch.equal(outputs[0], outputs[1])
    assert all(torch.equal(f(x), y) for f, y in zip(functions, outputs, strict=True))
    assert torch.equal(outputs[0], vd.draw(net, seed=0)(x))


def test_weights_have_the_moments_of_the_posterior():
    net = vd.convert(nn.Linear(3, 2), vd.bayes_by_backprop(log_sigma2=-1.0))
    weights = torch.stack([f.weight for f in vd.draws(net, 1000, seed=0)])
    assert_mean(weights, net.weight.detach())
    assert_variance(weights, net.variance().detach())


def test_tied_layers_draw_one_weight():
    layer = nn.Linear(4, 4)
    net = vd.convert(nn.Sequential(layer, nn.ReLU(), layer), vd.bayes_by_backprop())
    f = vd.draw(net)
    assert f[0] is f[2]
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    f = vd.draw(vd.convert(net, vd.bayes_by_backprop(log_sigma2=0.0)))
    assert f[0].weight is f[1].weight


def test_a_gate_holds_one_mask_for_all_rows_and_uses():
    gate = vd.Gate(vd.BinaryDropout(0.5), units=50)
    y = vd.draw(nn.Sequential(gate), seed=0)(torch.ones(4, 50))
    assert (y == y[0]).all()
    assert 0 < (y[0] == 0).sum() < 50
    assert torch.equal(vd.draw(gate, seed=0)(torch.ones(4, 50)), y)
    twice = vd.draw(nn.Sequential(gate, gate), seed=0)
    assert twice[0] is twice[1]
    assert set(twice(torch.ones(1, 50)).unique().tolist()) == {0.0, 4.0}


def test_bad_input_is_refused():
    assert_refused("noisy modules or dropout, but got Linear", vd.draw, nn.Linear(2, 1))
    assert_refused("`samples` to be an integer of at least 1", vd.draws, nn.Linear(2, 1), 0)
    assert_refused("dropout inside LSTM", vd.draw, nn.LSTM(2, 2, num_layers=2, dropout=0.5))


def test_held_noise_is_refused_in_an_exported_graph():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    f, x = vd.draw(net, seed=0), torch.randn(3, 4)
    assert_refused("the graph would draw its noise again", torch.export.export, f, (x,))


def test_a_drawn_function_leaves_the_means_of_a_variance_layer_fixed():
    net = vd.convert(nn.Sequential(nn.Linear(3, 2)), vd.variance_layer())
    before = {name: p.requires_grad for name, p in net.named_parameters()}
    f = vd.draw(net, seed=0)
    assert {name: p.requires_grad for name, p in net.named_parameters()} == before
    assert float(f[0].weight.detach().abs().min()) > 0
