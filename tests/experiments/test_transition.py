"""Accuracies by mean, draw and ensemble, and the shares of alpha, on nets with known answers."""

import math

import pytest
import torch
from torch import nn

import vardrop as vd
from experiments.diagnostics import accuracies, transition
from tests.refusals import assert_refused


def test_ensemble_averages_probabilities() -> None:
    # Three unequal draws of a classifier: the votes go to class 1, the mean probability to class 0.
    class Scripted(vd.noisy.Noisy):
        outputs = iter([[0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            row = next(self.outputs) if self.is_sampling else [0.0, 1.0]
            return torch.tensor([row]).log().expand(len(x), 2)

    found = accuracies(Scripted(), [(torch.zeros(4, 1), torch.zeros(4).long())], samples=3)
    assert found.ensemble == 1.0
    assert found.sample == pytest.approx(1 / 3)
    assert found.deterministic == 0.0


def test_batches_of_different_size_are_weighted() -> None:
    net = vd.convert(nn.Linear(1, 2, bias=False), vd.bayes_by_backprop(log_sigma2=-40.0))
    net.weight.data.copy_(torch.tensor([[1.0], [-1.0]]))
    x = torch.ones(3, 1)
    loader = [(x, torch.tensor([0, 0, 0])), (x[:1], torch.tensor([1]))]
    assert accuracies(net, loader, samples=2).ensemble == 0.75


def test_variance_layer_is_blind_by_its_mean() -> None:
    # |w x| tells |x|, and the mean tells nothing: every logit is the bias.
    net = nn.Sequential(nn.Linear(1, 400, bias=False), nn.ReLU(), nn.Linear(400, 2))
    vd.convert(net, vd.variance_layer(), include="0")
    with torch.no_grad():
        net[0].sigma.fill_(1.0)
        net[2].weight.copy_(torch.tensor([[-1.0], [1.0]]).expand(2, 400))
        net[2].bias.copy_(torch.tensor([400.0, -400.0]))
    found = accuracies(net, [(torch.tensor([[0.1], [10.0]]), torch.tensor([0, 1]))], samples=5)
    assert (found.deterministic, found.sample, found.ensemble) == (0.5, 1.0, 1.0)


def test_batchnorm_and_modes_stay() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    vd.convert(net, vd.sparse_vd(), include="0")
    net[1].eval()
    accuracies(net, [(torch.randn(5, 3), torch.zeros(5).long())], samples=2)
    assert ([m.training for m in net], net[1].num_batches_tracked) == ([True, False, True], 0)
    assert net[0].sampling is None


def test_shares_of_alpha() -> None:
    net = vd.convert(nn.Linear(4, 2, bias=False), vd.sparse_vd())
    with torch.no_grad():
        net.weight.fill_(1.0)
        net.log_sigma2.copy_(torch.tensor([[-1.0, -2.0, 0.0, 1.0], [2.9, 3.0, 4.0, math.inf]]))
        state = transition(net, [(torch.ones(1, 4), torch.zeros(1).long())], samples=1)
    assert (state.below_one, state.between, state.above) == (0.25, 0.375, 0.375)
    assert str(state).startswith("alpha < 1: 25.0%, 1..e^3: 37.5%, >= e^3: 37.5% | accuracy det ")


def test_errors() -> None:
    net = vd.convert(nn.Linear(2, 2), vd.sparse_vd())
    with pytest.raises(vd.VardropError, match=r"shape \(8,\) in `loader`, but got \(8, 1\)"):
        accuracies(net, [(torch.zeros(8, 2), torch.zeros(8, 1).long())])
    assert_refused("Expected `loader` to yield batches", accuracies, net, [])
