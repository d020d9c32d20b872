"""Train, choose, shrink, pack: on the small digits that come with scikit-learn."""

import math

import torch
from torch import nn

import vardrop as vd
from tests.compression.nets import accuracy
from vardrop.compression import choose_threshold, pack, shrink, unpack, zero_pruned_weights


def digits():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = torch.from_numpy(x).float() / 16, torch.from_numpy(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order], y[order]


def test_sparse_net_of_digits_gets_small_and_stays_good(tmp_path):
    x, y = digits()
    train, validation, test = ((x[a:b], y[a:b]) for a, b in ((0, 1200), (1200, 1500), (1500, None)))

    def fresh():
        return nn.Sequential(nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 10))

    net = vd.convert(fresh(), vd.sparse_vd())
    elbo = vd.ELBO(net, vd.Categorical(), num_data=1200)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=3e-3, noise_lr=1e-2))
    beta = vd.linear_warmup(10, 60)
    for epoch in range(120):
        elbo.train()
        elbo.set_beta(beta(epoch))
        for group in optimizer.param_groups:
            group["lr"] *= 0.97 if epoch > 60 else 1.0
        for batch in torch.randperm(1200).split(100):
            optimizer.zero_grad()
            elbo(train[0][batch], train[1][batch]).loss.backward()
            optimizer.step()
    net.eval()
    chosen = choose_threshold(net, validation, accuracy, max_drop=0.01)
    small, plan = shrink(net, x[:1], chosen, drop_inputs=True)
    assert plan.compression > 10
    assert torch.allclose(small(x), zero_pruned_weights(net, chosen)[0](x), atol=1e-5)
    report = pack(
        vd.Shrunk(small, plan), tmp_path / "net.vdp", validation=validation, metric=accuracy
    )
    assert report.ratio > 25
    decoded = unpack(tmp_path / "net.vdp", into=fresh())
    full = accuracy(zero_pruned_weights(net, math.inf)[0](test[0]), test[1])
    assert full > 0.93
    assert accuracy(decoded(test[0]), test[1]) > full - 0.04
