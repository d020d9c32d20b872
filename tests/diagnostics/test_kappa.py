"""kappa against autograd's Hessian, and its stochastic estimator by a z-test."""

import copy

import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import vardrop as vd
from vardrop.diagnostics import kappa


def small_net() -> nn.Sequential:
    net = nn.Sequential(
        nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    vd.convert(net, vd.bayes_by_backprop(log_sigma2=-2.0), where="0")
    return vd.convert(net, vd.variational_dropout(per="layer"), where="4")


def data(sizes: tuple[int, ...] = (5, 3)) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, 1, 6).double(), torch.randint(3, (n,))) for n in sizes]


def hessian_diagonal(net: nn.Module, name: str, x: Tensor, y: Tensor) -> Tensor:
    plain = copy.deepcopy(net).eval()
    weight = dict(plain.named_parameters())[name].detach()

    def log_likelihood(flat: Tensor) -> Tensor:
        output = functional_call(plain, {name: flat.view_as(weight)}, (x,))
        return -functional.cross_entropy(output, y)

    full = torch.autograd.functional.hessian(log_likelihood, weight.flatten())
    return full.diagonal().view_as(weight)


def test_exact_matches_the_hessian_of_autograd() -> None:
    net, batches = small_net(), data()
    found = kappa(net, batches)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert set(found) == {"0", "4"}
    for name, value in found.items():
        expected = net[int(name)].variance() * hessian_diagonal(net, f"{name}.weight", x, y)
        assert (value - expected).abs().max() <= 1e-10
        assert value.abs().max() > 1e-3  # there is something to compare


def test_single_precision_is_within_1e_5() -> None:
    net, batches = small_net(), data()
    exact = kappa(net, batches)
    single = kappa(net.float(), [(x.float(), y) for x, y in batches])
    for name, value in single.items():
        assert (value - exact[name]).abs().max() <= 1e-5


def test_stochastic_estimator_is_unbiased() -> None:
    net, batches, runs = small_net(), data((4,)), 400
    exact = kappa(net, batches)
    generator = torch.Generator().manual_seed(0)
    draws = [kappa(net, batches, probes=2, generator=generator) for _ in range(runs)]
    elements = sum(v.numel() for v in exact.values())
    limit = norm.isf(1e-6 / 2 / elements)
    for name, expected in exact.items():
        sample = torch.stack([d[name] for d in draws])
        error = sample.std(0) / runs**0.5
        assert error.max() > 0
        assert ((sample.mean(0) - expected).abs() <= limit * error + 1e-12).all()


def test_variance_layer_is_probed_at_zero() -> None:
    # At zero means the output is the bias, and log p has a curvature from the softmax alone.
    net = vd.convert(nn.Linear(3, 2, bias=False).double(), vd.variance_layer())
    x = torch.tensor([[1.0, 2.0, 3.0]]).double()
    found = kappa(net, [(x, torch.tensor([0]))])[""]
    assert torch.allclose(found, -0.25 * x.square() * net.sigma.detach().square())
    assert not net.weight.requires_grad


def test_kappa_predicts_the_effect_of_small_noise() -> None:
    # E log p - log p(mean) = sum kappa / 2 + O(sigma^4) for a layer of one example.
    net = vd.convert(nn.Linear(4, 3).double(), vd.bayes_by_backprop(log_sigma2=-7.0))
    x, y, draws = torch.randn(1, 4).double(), torch.tensor([1]), 200_000
    with torch.no_grad():
        mean = -functional.cross_entropy(net.eval()(x), y)
        with vd.sampling(net):
            output = net(x.expand(draws, 4))
        log_p = -functional.cross_entropy(output, y.expand(draws), reduction="none")
        # The linear term has mean zero; taking it out leaves the curvature.
        gradient = functional.one_hot(y, 3) - net(x).softmax(-1)
        effect = log_p - mean - ((output - net(x)) * gradient).sum(1)
    expected = kappa(net, [(x, y)])[""].sum() / 2
    error = effect.std() / draws**0.5
    # The fourth-order term is about sigma^2 of the second-order one.
    assert (effect.mean() - expected).abs() < norm.isf(5e-7) * error + 1e-2 * expected.abs()


def test_tied_weights_are_reported_once_and_the_net_stays() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    vd.convert(net, vd.sparse_vd())
    assert set(kappa(net, [(torch.randn(4, 3), torch.randint(3, (4,)))])) == {"0"}
    assert net.training
    assert (net[0].sampling, net[0].weight.grad) == (None, None)


def test_errors() -> None:
    net = small_net()
    with pytest.raises(
        vd.VardropError, match="Expected `probes` to be an integer of at least 1, .* None takes"
    ):
        kappa(net, data(), probes=0)
    with pytest.raises(vd.VardropError, match="Expected `loader` to yield batches"):
        kappa(net, [])
    with pytest.raises(vd.VardropError, match="Expected `net` to have noisy weights"):
        kappa(vd.convert(nn.Linear(2, 2), vd.binary_dropout()), [])
