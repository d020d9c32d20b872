"""How much `shrink` removes: dead channels go whatever pooling, norm or activation follows them."""

import pytest
import torch
from torch import nn

import vardrop as vd

POOLS = {
    "none": nn.Identity,
    "max": lambda: nn.MaxPool2d(2),
    "max, overlapping": lambda: nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
    "max, dilated": lambda: nn.MaxPool2d(2, dilation=2, stride=1),
    "average": lambda: nn.AvgPool2d(2),
    "adaptive max": lambda: nn.AdaptiveMaxPool2d(3),
    "adaptive average": lambda: nn.AdaptiveAvgPool2d(3),
    "power average": lambda: nn.LPPool2d(2, 2),
}
NORMS = {
    "none": nn.Identity,
    "batch": lambda: nn.BatchNorm2d(8),
    "batch, not affine": lambda: nn.BatchNorm2d(8, affine=False),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
}
ACTIVATIONS = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "hardswish": nn.Hardswish,
}
RECIPES = {
    "sparse_vd": vd.sparse_vd(),
    "l0": vd.l0(),
    "structured_pruning": vd.structured_pruning(),
    "beta_bernoulli": vd.beta_bernoulli(),
    "bayesian_compression": vd.bayesian_compression(),
}
_CLOSED = {"logit": -8.0, "log_sigma": 3.0, "raw_a": -9.0, "log_sigma2": 8.0}


class Net(nn.Module):
    """Two convolutions; the first one's channels pass a norm, an activation and a pooling."""

    def __init__(self, norm, activation, pool):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), norm()
        self.activation, self.pool = activation(), pool()
        self.second, self.last = nn.Conv2d(8, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x):
        x = self.pool(self.activation(self.norm(self.first(x))))
        return self.last(self.second(x).mean((2, 3)))


class GlobalMax(Net):
    def forward(self, x):
        x = self.activation(self.norm(self.first(x)))
        return self.last(self.second(x.max(-1, keepdim=True).values).amax((2, 3)))


@torch.no_grad()
def with_dead_channels(net, recipe):
    """Five of the eight channels of the first convolution produce zero."""
    for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d) and m.affine):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    vd.convert(net.eval(), recipe)
    gate = net.first.gate
    if gate is None:
        net.first.weight[3:] = 0
        net.first.log_sigma2[3:] = 4
        return net
    for name, parameter in gate.named_parameters():
        if parameter.dim() == 1 and name in _CLOSED:
            parameter[3:] = _CLOSED[name]
    return net


def check(net):
    x = torch.randn(4, 1, 12, 12)
    small = vd.shrink(net, x).net
    assert small.first.out_channels == 3
    assert small.second.in_channels == 3


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_dead_channels_go_in_front_of_every_pooling(pool, recipe):
    torch.manual_seed(0)
    check(with_dead_channels(Net(nn.Identity, nn.ReLU, POOLS[pool]), RECIPES[recipe]))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dead_channels_go_through_every_norm_and_activation(norm, activation):
    torch.manual_seed(0)
    net = Net(NORMS[norm], ACTIVATIONS[activation], POOLS["max"])
    check(with_dead_channels(net, vd.sparse_vd()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_dead_channels_go_in_front_of_a_maximum_over_positions(recipe):
    torch.manual_seed(0)
    check(with_dead_channels(GlobalMax(nn.Identity, nn.ReLU, nn.Identity), RECIPES[recipe]))
