"""`FeatureDistance`: the formula, models written as classes, and clear errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vardrop as vd


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)  # defined first, called last
        self.conv, self.norm = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)

    def features(self, x: Tensor) -> Tensor:
        return self.pool(self.relu(self.norm(self.conv(x)))).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x))


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1, 8, 8, generator=generator)
    return x, torch.randint(0, 3, (300,), generator=generator) * 2  # a class that is missing


@pytest.mark.parametrize("noisy", [False, True])
def test_the_distance_is_the_one_of_the_formula(data, noisy):
    torch.manual_seed(1)
    net, (x, y) = CNN(), data
    plain = net.eval().features(x).double().detach()
    if noisy:
        vd.convert(net, vd.bayes_by_backprop())
    distance = vd.FeatureDistance(net.train(), zip(x.split(70), y.split(70), strict=True))
    means = {k: plain[y == k].mean(0) for k in (0, 2, 4)}
    centred = plain - torch.stack([means[int(k)] for k in y])
    covariance = torch.cov(centred.T, correction=0)  # centred has mean zero
    new = net.eval().features(2 * x[:5]).double().detach()
    gaps = [new - mean for mean in means.values()]
    squares = [(gap @ torch.linalg.inv(covariance) * gap).sum(1) for gap in gaps]
    expected = torch.stack(squares).amin(0)
    torch.testing.assert_close(distance(2 * x[:5]), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(distance([2 * x[:2], 2 * x[2:5]]), distance(2 * x[:5]))
    assert net.training is False
    assert not net.last._forward_pre_hooks


def test_constant_features_and_a_named_layer(data):
    x, y = data
    net = CNN().eval()
    with torch.no_grad():
        net.norm.weight[0], net.norm.bias[0] = 0.0, -1.0  # a dead channel
    distance = vd.FeatureDistance(net, (x, y), layer="last")
    assert distance(x).isfinite().all()
    assert vd.metrics.auroc(distance(x), distance(3 + 3 * x)) > 0.9


def test_errors_name_the_argument(data):
    x, y = data
    with pytest.raises(vd.VardropError, match="`layer` to name a module, but got 'head'"):
        vd.FeatureDistance(CNN(), (x, y), layer="head")
    with pytest.raises(vd.VardropError, match="Name such a layer with `layer`"):
        vd.FeatureDistance(CNN(), (x, y), layer="conv")
    with pytest.raises(vd.VardropError, match="no call of a dense layer"):
        vd.FeatureDistance(nn.Flatten(), (x, y))
    with pytest.raises(vd.VardropError, match="one class index per input"):
        vd.FeatureDistance(CNN(), (x, torch.rand(300)))
