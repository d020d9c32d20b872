"""Summaries of log alpha: shared alphas count for every weight, infinities are allowed."""

import math

import torch
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused


def additive(log_alpha):
    net = vd.convert(nn.Linear(len(log_alpha), 1), vd.sparse_vd())
    net.weight.data.fill_(1.0)
    net.log_sigma2.data.copy_(torch.tensor([log_alpha]))
    return net


def test_summary_and_sparsity_of_known_alphas():
    net = nn.Sequential(additive([float(i) for i in range(11)]), additive([-5.0, 5.0]))
    first, second = vd.alpha_summary(net, threshold=3.0).layers
    assert (first.name, first.weights, first.above) == ("0", 11, 8)
    assert (first.low, first.median, first.high) == (1.0, 5.0, 9.0)
    assert (second.weights, second.above) == (2, 1)
    s = vd.sparsity(net, threshold=3.0)
    assert (s.by_layer, s.total) == ({"0": 8 / 11, "1": 0.5}, 9 / 13)
    assert s.compression == 13 / 4


def test_shared_alphas_infinite_alphas_and_gates_count():
    recipe = vd.variational_dropout(per="layer", drop_rate=0.99, max_alpha=None)
    s = vd.sparsity(nn.Sequential(vd.convert(nn.Linear(4, 3), recipe), additive([0.0] * 4)))
    assert (s.weights, s.total) == ({"0": 12, "1": 4}, 12 / 16)
    variance = vd.convert(nn.Linear(4, 3), vd.variance_layer())
    assert vd.alpha_summary(variance).layers[0].median == math.inf
    assert vd.sparsity(variance).compression == math.inf
    assert str(vd.sparsity(variance)) == "sparsity at log alpha >= 3: 100.0% (infx) | (net) 100.0%"
    gated = vd.convert(nn.Linear(4, 3), vd.variational_dropout("A"))
    assert vd.sparsity(gated).weights == {"gate": 4}


def test_text():
    lines = str(vd.alpha_summary(nn.Sequential(additive([0.0, 4.0])))).splitlines()
    assert lines[0].split() == ["layer", "weights", "10", "%", "median", "90", "%", ">=", "3"]
    assert lines[1].split() == ["0", "2", "0.00", "0.00", "0.00", "50.0%"]


def test_a_net_without_an_alpha_is_refused():
    dropout = vd.convert(nn.Linear(2, 2), vd.binary_dropout())
    assert_refused("Expected `net` to have modules with an alpha", vd.alpha_summary, dropout)
