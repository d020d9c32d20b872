"""A small objective with its data, and a callback, for the tests of training."""

import torch
from torch import nn

import vardrop as vd
from vardrop.tuning import Callback


class After(Callback):
    """Calls a function after every step; True ends the training."""

    def __init__(self, function):
        self.function = function

    def on_step(self, at, loss):
        return self.function(at)


def data(n=50):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(3)), torch.arange(n) % 3


def objective():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return vd.ELBO(vd.convert(net, vd.sparse_vd()), vd.Categorical(), 50)


def adam(elbo, lr=1e-2):
    return torch.optim.Adam(vd.parameter_groups(elbo, lr=lr))
