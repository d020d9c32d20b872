"""Train, choose, shrink, pack: on the small digits that come with scikit-learn."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import vardrop as vd
from tests.compression.nets import Residual, accuracy
from tests.nets import digits
from tests.refusals import assert_refused, unchanged
from vardrop.compression import choose_threshold, pack, shrink, unpack, zero_pruned_weights


def test_sparse_net_of_digits_gets_small_and_stays_good(tmp_path):
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    x, y = (part[order] for part in digits())
    train, validation, test = ((x[a:b], y[a:b]) for a, b in ((0, 1200), (1200, 1500), (1500, None)))

    def fresh():
        return nn.Sequential(nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 10))

    net = vd.convert(fresh(), vd.sparse_vd())
    elbo = vd.ELBO(net, vd.Categorical(), num_data=1200)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=3e-3, noise_lr=1e-2))
    rates = {"beta": vd.linear_warmup(10, 60), "rate": lambda epoch: 0.97 ** max(0, epoch - 60)}
    list(vd.tuning.train(elbo, optimizer, *train, 120, 100, **rates))
    chosen = choose_threshold(net.eval(), validation, accuracy, max_drop=0.01)
    small, plan = shrink(net, x[:1], chosen, drop_inputs=True)
    assert plan.compression > 10
    assert torch.allclose(small(x), zero_pruned_weights(net, chosen)[0](x), atol=1e-5)
    report = pack(vd.Shrunk(small, plan), tmp_path / "net.vdp")
    assert report.ratio > 25
    decoded = unpack(tmp_path / "net.vdp", into=fresh())
    full = accuracy(zero_pruned_weights(net, math.inf)[0](test[0]), test[1])
    assert full > 0.93
    assert accuracy(decoded(test[0]), test[1]) > full - 0.04


def test_fine_tuning_lowers_the_loss_and_keeps_zeros():
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    net[0].weight.data[torch.rand(8, 5) < 0.5] = 0
    zeros, x, y = net[0].weight == 0, torch.randn(64, 5), torch.randint(0, 3, (64,))
    before = functional.cross_entropy(net(x), y)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    assert vd.fine_tune(net, [(x, y)], functional.cross_entropy, optimizer, epochs=40) is net
    assert functional.cross_entropy(net(x), y) < 0.9 * before
    assert torch.equal(net[0].weight == 0, zeros)
    assert not net[0].weight._backward_hooks


def test_batchnorm_statistics_are_those_of_the_data():
    net, data = Residual().eval(), [torch.randn(50, 3, 8, 8) * 2 + 1 for _ in range(4)]
    vd.reestimate_batchnorm(net, [(x, None) for x in data])
    with torch.no_grad():
        first = [net.stem(x) for x in data]
    mean = torch.stack([f.mean((0, 2, 3)) for f in first]).mean(0)
    variance = torch.stack([f.var((0, 2, 3)) for f in first]).mean(0)
    assert torch.allclose(net.norm.running_mean, mean, atol=1e-5)
    assert torch.allclose(net.norm.running_var, variance, rtol=1e-4)
    assert not net.norm.training
    assert net.norm.momentum == 0.1
    assert_refused("Expected `net` to have BatchNorm", vd.reestimate_batchnorm, nn.Linear(2, 2), [])


# Long verbs show a progress line, and Ctrl-C leaves the model unchanged.


class Counting(nn.Module):
    """A model that is interrupted in one of its passes, which copies of it count together."""

    passes, stop = 0, None

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        self.shift = nn.Parameter(torch.ones(3))

    def forward(self, x):
        Counting.passes += 1
        if Counting.passes == Counting.stop:
            raise KeyboardInterrupt
        return self.layers(x) + self.shift


X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
VERBS = {
    "shrink": lambda net, **options: vd.shrink(net, X, **options),
    "choose_threshold": lambda net, **options: vd.choose_threshold(
        net, (X, Y), accuracy, sparsity=0.0, points=3, **options
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_ctrl_c_leaves_the_model_unchanged(verb, monkeypatch):
    net = vd.convert(Counting(), vd.sparse_vd()).train()
    monkeypatch.setattr(Counting, "passes", 0)
    VERBS[verb](net)
    total = Counting.passes
    for stop in {1, 2, total // 4, total // 2, total - 1, total}:
        monkeypatch.setattr(Counting, "passes", 0)
        monkeypatch.setattr(Counting, "stop", stop)
        with unchanged(net, KeyboardInterrupt):
            VERBS[verb](net)
    monkeypatch.setattr(Counting, "stop", None)
    VERBS[verb](net)


@pytest.mark.parametrize("verb", VERBS)
def test_progress_is_shown_on_request(verb, capsys):
    net = vd.convert(Counting(), vd.sparse_vd())
    VERBS[verb](net)
    VERBS[verb](net, progress=False)
    assert not capsys.readouterr().err
    VERBS[verb](net, progress=True)
    assert capsys.readouterr().err.startswith(f"\r{verb}: 1")
