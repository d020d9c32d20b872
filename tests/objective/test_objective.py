import math

import pytest
import torch
from torch import nn

import vardrop as vd

X, Y = torch.randn(8, 4), torch.randint(3, (8,))


def noisy():
    return vd.convert(nn.Linear(4, 3), vd.sparse_vd(log_sigma2=-3.0))


def test_parts_add_up():
    elbo = vd.ELBO(noisy(), vd.Categorical(), num_data=50, beta=0.3)
    out = elbo(X, Y)
    torch.testing.assert_close(out.loss, out.nll + 0.3 * out.kl / 50)
    torch.testing.assert_close(out.kl, vd.kl(elbo.net))
    assert float(out.beta) == pytest.approx(0.3)


def test_samples_average_the_nll_with_the_gradient_of_the_same_noise():
    net = noisy()
    elbo = vd.ELBO(net, vd.Categorical(), num_data=50, samples=10)
    with torch.random.fork_rng():
        out = elbo(X, Y)
        mine = torch.autograd.grad(out.loss, net.log_sigma2)[0]
    with torch.random.fork_rng():
        draws = [vd.Categorical()(net(X), Y) for _ in range(10)]
    loss = sum(draws) / 10 + vd.kl(net) / 50
    torch.testing.assert_close(out.loss, loss)
    other = torch.autograd.grad(loss, net.log_sigma2)[0]
    assert float((mine - other).norm() / other.norm()) <= 1e-6


def test_any_callable_is_a_likelihood():
    elbo = vd.ELBO(noisy(), lambda out, y: out.square().mean(), num_data=5)
    assert torch.isfinite(elbo(X, None).loss)


def test_a_plain_net_trains_by_likelihood_alone():
    elbo = vd.ELBO(nn.Linear(4, 3), vd.Categorical(), num_data=5, beta=0.0)
    out = elbo(X, Y)
    torch.testing.assert_close(out.loss, out.nll)
    assert float(out.kl) == 0.0


@pytest.mark.parametrize(
    "likelihood, output, target, expected",
    [
        (vd.Bernoulli(), [[2.0, -1.0]], [[1.0, 0.0]], math.log1p(math.exp(-2)) + math.log1p(math.exp(-1))),
        (vd.Gaussian(2.0), [[1.0], [3.0]], [[0.0], [0.0]],
         0.5 * math.log(2 * math.pi) + math.log(2) + (1 + 9) / 16),
        (vd.Gaussian(0.5, learned=True), [0.0], [0.0], 0.5 * math.log(2 * math.pi) + math.log(0.5)),
        (vd.HeteroscedasticGaussian(), [[1.0, math.log(4)]], [[0.0]],
         0.5 * (math.log(2 * math.pi) + math.log(4) + 0.25)),
    ],
)  # fmt: skip
def test_likelihoods(likelihood, output, target, expected):
    nll = likelihood(torch.tensor(output), torch.tensor(target))
    assert float(nll.detach()) == pytest.approx(expected, rel=1e-6)


def test_learned_noise_is_a_parameter():
    assert [n for n, _ in vd.Gaussian(learned=True).named_parameters()] == ["log_std"]
    assert not list(vd.Gaussian().parameters())


def test_schedules():
    warm = vd.linear_warmup(5, 20)
    assert [warm(e) for e in (0, 5, 20, 100)] == [0.0, 0.0, 1.0, 1.0]
    assert vd.cyclical(10, rise=1.0)(25) == pytest.approx(0.5)
    assert vd.constant(0.2)(7) == 0.2


def test_parameter_groups_keep_decay_off_the_noise():
    net = nn.Sequential(noisy(), nn.BatchNorm1d(3))
    elbo = vd.ELBO(net, vd.Gaussian(learned=True), num_data=5)
    weights, noise = vd.parameter_groups(elbo, lr=1e-3, noise_lr=1e-2, weight_decay=1e-4)
    assert noise["params"] == [net[0].log_sigma2]
    assert (noise["weight_decay"], noise["lr"]) == (0.0, 1e-2)
    assert (weights["weight_decay"], weights["lr"]) == (1e-4, 1e-3)
    assert len(weights["params"]) == 5
    torch.optim.AdamW([weights, noise])


def test_weight_decay_leaves_sigma_alone():
    net = noisy()
    optimizer = torch.optim.SGD(vd.parameter_groups(net, lr=0.1, weight_decay=0.5))
    before = net.log_sigma2.clone()
    net.weight.grad, net.log_sigma2.grad = torch.zeros_like(net.weight), torch.zeros_like(before)
    optimizer.step()
    assert torch.equal(net.log_sigma2, before)


BAD = [
    (lambda: vd.ELBO(noisy(), vd.Categorical(), num_data=0), "`num_data` to be an integer of at least 1, but got 0"),
    (lambda: vd.ELBO(noisy(), vd.Categorical(), num_data=6e4), "`num_data` to be an integer of at least 1"),
    (lambda: vd.ELBO(noisy(), "x", num_data=5), "`likelihood` to be callable"),
    (lambda: vd.ELBO(noisy(), vd.Categorical(), 5, samples=0), "`samples` to be an integer of at least 1"),
    (lambda: vd.ELBO(noisy(), vd.Categorical(), 5, beta=-1.0), "`beta` to be a finite number and at least 0"),
    (lambda: vd.ELBO(nn.Linear(2, 2), vd.Categorical(), 5), "to have noisy modules.*beta=0"),
    (lambda: vd.Gaussian(std=0.0), "`std` to be positive"),
    (lambda: vd.Gaussian()(torch.zeros(3, 1), torch.zeros(3)), "broadcasting would mix examples"),
    (lambda: vd.HeteroscedasticGaussian()(torch.zeros(3, 3), torch.zeros(3, 1)), "even last axis"),
    (lambda: vd.linear_warmup(5, 5), "`start` < `end`"),
    (lambda: vd.cyclical(0), "`period` to be a finite number and above 0"),
]  # fmt: skip


@pytest.mark.parametrize("call, match", BAD)
def test_bad_input(call, match):
    with pytest.raises(vd.VardropError, match=match):
        call()
