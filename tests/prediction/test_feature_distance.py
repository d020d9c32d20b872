"""`FeatureDistance`: the formula, models written as classes, and clear errors."""

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.nets import Parts
from tests.refusals import assert_refused


def features(net, x):
    return net.pool(net.relu(net.norm(net.conv(x)))).mean((2, 3))


def cnn():
    body = {"conv": nn.Conv2d(1, 6, 3), "norm": nn.BatchNorm2d(6), "pool": nn.MaxPool2d(2)}
    last = nn.Linear(6, 3)  # defined first, called last
    run = lambda net, x: net.last(features(net, x))
    return Parts(run, last=last, **body, relu=nn.ReLU(inplace=True))


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1, 8, 8, generator=generator)
    return x, torch.randint(0, 3, (300,), generator=generator) * 2  # a class that is missing


@pytest.mark.parametrize("noisy", [False, True])
def test_the_distance_is_the_one_of_the_formula(data, noisy):
    torch.manual_seed(1)
    net, (x, y) = cnn(), data
    plain = features(net.eval(), x).double().detach()
    if noisy:
        vd.convert(net, vd.bayes_by_backprop())
    distance = vd.FeatureDistance(net.train(), zip(x.split(70), y.split(70), strict=True))
    means = {k: plain[y == k].mean(0) for k in (0, 2, 4)}
    centred = plain - torch.stack([means[int(k)] for k in y])
    covariance = torch.cov(centred.T, correction=0)  # centred has mean zero
    new = features(net.eval(), 2 * x[:5]).double().detach()
    gaps = [new - mean for mean in means.values()]
    squares = [(gap @ torch.linalg.inv(covariance) * gap).sum(1) for gap in gaps]
    expected = torch.stack(squares).amin(0)
    torch.testing.assert_close(distance(2 * x[:5]), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(distance([2 * x[:2], 2 * x[2:5]]), distance(2 * x[:5]))
    assert net.training is False
    assert not net.last._forward_pre_hooks


def test_constant_features_and_a_named_layer(data):
    x, y = data
    net = cnn().eval()
    with torch.no_grad():
        net.norm.weight[0], net.norm.bias[0] = 0.0, -1.0  # a dead channel
    distance = vd.FeatureDistance(net, (x, y), layer="last")
    assert distance(x).isfinite().all()
    assert vd.metrics.auroc(distance(x), distance(3 + 3 * x)) > 0.9


def test_errors_name_the_argument(data):
    x, y = data
    for match, net, labels, options in (
        ("`layer` to name a module, but got 'head'", cnn(), y, {"layer": "head"}),
        ("Name such a layer with `layer`", cnn(), y, {"layer": "conv"}),
        ("no call of a dense layer", nn.Flatten(), y, {}),
        ("one class index per input", cnn(), torch.rand(300), {}),
    ):
        assert_refused(match, vd.FeatureDistance, net, (x, labels), **options)
