import torch
from torch import nn
from torch.nn import functional

from tests.compression.nets import Residual
from tests.refusals import assert_refused
from vardrop.tuning import fine_tune, reestimate_batchnorm


def test_fine_tuning_lowers_the_loss_and_keeps_zeros():
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    net[0].weight.data[torch.rand(8, 5) < 0.5] = 0
    zeros = net[0].weight == 0
    x, y = torch.randn(64, 5), torch.randint(0, 3, (64,))
    before = functional.cross_entropy(net(x), y)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    fine_tune(net, [(x, y)], functional.cross_entropy, optimizer, epochs=40)
    assert functional.cross_entropy(net(x), y) < 0.9 * before
    assert torch.equal(net[0].weight == 0, zeros)
    assert not net[0].weight._backward_hooks
    refused = "Expected `epochs` to be an integer of at least 1, but got 0"
    assert_refused(refused, fine_tune, net, [(x, y)], functional.cross_entropy, optimizer, epochs=0)


def test_batchnorm_statistics_are_those_of_the_data():
    net = Residual().eval()
    data = [torch.randn(50, 3, 8, 8) * 2 + 1 for _ in range(4)]
    reestimate_batchnorm(net, [(x, None) for x in data])
    with torch.no_grad():
        first = [net.stem(x) for x in data]
    mean = torch.stack([f.mean((0, 2, 3)) for f in first]).mean(0)
    variance = torch.stack([f.var((0, 2, 3)) for f in first]).mean(0)
    assert torch.allclose(net.norm.running_mean, mean, atol=1e-5)
    assert torch.allclose(net.norm.running_var, variance, rtol=1e-4)
    assert not net.norm.training
    assert net.norm.momentum == 0.1
    assert_refused("Expected `net` to have BatchNorm", reestimate_batchnorm, nn.Linear(2, 2), [])
