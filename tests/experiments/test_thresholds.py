"""Pruning at several thresholds, and the one that held-out images choose."""

import torch
from torch import nn

from experiments import molchanov
from vardrop.conversion import convert
from vardrop.recipes import sparse_vd


def net_with(*log_alphas: float) -> nn.Module:
    """One weight for each value of log alpha, all means 1."""
    net = nn.Linear(len(log_alphas), 1, bias=False)
    nn.init.ones_(net.weight)
    convert(net, sparse_vd())
    with torch.no_grad():
        net.log_sigma2.copy_(torch.tensor([log_alphas]))
    return net


def test_the_lowest_threshold_that_the_held_out_images_allow(monkeypatch):
    test, held = (torch.zeros(1, 1), torch.tensor(0)), (torch.zeros(1, 1), torch.tensor(1))
    by_weights = {4: (5.0, 2.0), 3: (6.0, 2.05), 2: (7.0, 2.1), 1: (8.0, 2.3)}  # test, held out

    def error(net, x, y):
        left = int(net.weight.count_nonzero())
        return by_weights[left][int(y)]

    monkeypatch.setattr(molchanov, "error", error)
    found = molchanov._pruned(net_with(2.5, 1.5, 0.5, -1.0), (2, 1, 0), test, held)
    assert found["chosen threshold"] == 1.0
    assert found["error, chosen threshold, %"] == 7.0
    assert found["compression, chosen threshold"] == 2.0
    assert found["error, %"] == 5.0
    assert found["error, threshold 0, %"] == 8.0
