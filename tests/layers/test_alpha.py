"""Summaries of log alpha: shared alphas count for every weight, infinities are allowed."""

import math

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.refusals import assert_refused
from vardrop.layers.alpha import alpha_summary, sparsity


def additive(log_alpha: list[float]) -> nn.Linear:
    net = vd.convert(nn.Linear(len(log_alpha), 1), vd.sparse_vd())
    net.weight.data.fill_(1.0)
    net.log_sigma2.data.copy_(torch.tensor([log_alpha]))
    return net


def test_summary_and_sparsity_of_known_alphas() -> None:
    net = nn.Sequential(additive([float(i) for i in range(11)]), additive([-5.0, 5.0]))
    first, second = alpha_summary(net, threshold=3.0).layers
    assert (first.name, first.weights, first.above) == ("0", 11, 8)
    assert (first.low, first.median, first.high) == (1.0, 5.0, 9.0)
    assert (second.weights, second.above) == (2, 1)
    s = sparsity(net, threshold=3.0)
    assert s.by_layer == {"0": 8 / 11, "1": 0.5}
    assert s.total == 9 / 13
    assert s.compression == 13 / 4


def test_shared_alpha_counts_for_every_weight() -> None:
    recipe = vd.variational_dropout(per="layer", drop_rate=0.99, max_alpha=None)
    s = sparsity(nn.Sequential(vd.convert(nn.Linear(4, 3), recipe), additive([0.0, 0.0, 0.0, 0.0])))
    assert s.weights == {"0": 12, "1": 4}
    assert s.total == 12 / 16


def test_variance_layer_has_infinite_alpha_and_nothing_to_keep() -> None:
    net = vd.convert(nn.Linear(4, 3), vd.variance_layer())
    assert alpha_summary(net).layers[0].median == math.inf
    assert sparsity(net).compression == math.inf
    assert str(sparsity(net)) == "sparsity at log alpha >= 3: 100.0% (infx) | (net) 100.0%"


def test_gate_counts_its_units() -> None:
    assert sparsity(vd.convert(nn.Linear(4, 3), vd.variational_dropout("A"))).weights == {"gate": 4}


def test_text() -> None:
    lines = str(alpha_summary(nn.Sequential(additive([0.0, 4.0])))).splitlines()
    assert lines[0].split() == ["layer", "weights", "10", "%", "median", "90", "%", ">=", "3"]
    assert lines[1].split() == ["0", "2", "0.00", "0.00", "0.00", "50.0%"]


def test_errors() -> None:
    assert_refused("Expected `net` to have noisy modules", sparsity, nn.Linear(2, 2))
    with pytest.raises(vd.VardropError, match="Expected `net` to have modules with an alpha"):
        alpha_summary(vd.convert(nn.Linear(2, 2), vd.binary_dropout()))
