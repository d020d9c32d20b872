"""kappa against autograd's Hessian, and its stochastic estimator by a z-test."""

import copy

import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import vardrop as vd
from experiments.selective import select, unlabelled_kappa
from vardrop.functional.random import GeneratorNoise, draw_from
from vardrop.prediction.kappa import kappa


def small_net() -> nn.Sequential:
    net = nn.Sequential(
        nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    vd.convert(net, vd.bayes_by_backprop(log_sigma2=-2.0), include="0")
    return vd.convert(net, vd.variational_dropout(per="layer"), include="4")


def drawn_weight(layer: vd.Linear) -> Tensor:
    weight = layer.noisy_tensors()["weight"]
    return weight.sample(weight.draw()).detach()


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


def test_at_the_means_it_matches_the_hessian_of_autograd() -> None:
    net, batches = small_net(), data()
    found = kappa(net, batches, samples=0)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert set(found) == {"0", "4"}
    for name, value in found.items():
        expected = net[int(name)].variance() * hessian_diagonal(net, f"{name}.weight", x, y)
        assert (value - expected).abs().max() <= 1e-10
        assert value.abs().max() > 1e-3  # there is something to compare


def test_single_precision_is_within_1e_5() -> None:
    net, batches = small_net(), data()
    exact = kappa(net, batches, samples=0)
    single = kappa(net.float(), [(x.float(), y) for x, y in batches], samples=0)
    for name, value in single.items():
        assert (value - exact[name]).abs().max() <= 1e-5


def test_stochastic_estimator_is_unbiased() -> None:
    net, batches, runs = small_net(), data((4,)), 400
    exact = kappa(net, batches, samples=0)
    generator = torch.Generator().manual_seed(0)
    draws = [kappa(net, batches, probes=2, generator=generator, samples=0) for _ in range(runs)]
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
    found = kappa(net, [(x, torch.tensor([0]))], samples=0)[""]
    assert torch.allclose(found, -0.25 * x.square() * net.sigma.detach().square())
    assert not net.weight.requires_grad


def test_tied_weights_are_reported_once_and_the_net_stays() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    vd.convert(net, vd.sparse_vd())
    assert set(kappa(net, [(torch.randn(4, 3), torch.randint(3, (4,)))])) == {"0"}
    assert net.training
    assert (net[0].sampling, net[0].weight.grad) == (None, None)


def test_it_averages_the_hessian_over_draws_of_the_weights() -> None:
    net, batches = small_net(), data((4, 2))
    found = kappa(net, batches, generator=torch.Generator().manual_seed(5), samples=3)
    again = kappa(net, batches, generator=torch.Generator().manual_seed(5), samples=3)
    seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(5)))
    totals = {name: torch.zeros_like(net[int(name)].weight) for name in found}
    with draw_from(GeneratorNoise(seed)):
        for x, y in batches:
            for _ in range(3):
                drawn = copy.deepcopy(net)
                with torch.no_grad():
                    for layer in (drawn[0], drawn[4]):
                        layer.weight.copy_(drawn_weight(layer))
                for name in totals:
                    totals[name] += hessian_diagonal(drawn, f"{name}.weight", x, y) * len(y) / 3
    for name, total in totals.items():
        assert torch.equal(found[name], again[name])
        expected = net[int(name)].variance() * total / 6
        assert (found[name] - expected).abs().max() <= 1e-10


def test_it_is_the_derivative_of_the_likelihood_by_the_variance() -> None:
    """Price: Var w E d^2 f / dw^2 = E (w - E w) df / dw, which needs first derivatives only."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    vd.convert(net, vd.bayes_by_backprop(log_sigma2=0.0), include="0")
    x, y, runs = torch.randn(1, 3).double(), torch.tensor([1]), 20_000
    layer = net[0]
    weights = torch.stack([drawn_weight(layer) for _ in range(runs)])

    def log_p(weight: Tensor) -> Tensor:
        return -functional.cross_entropy(functional_call(net.eval(), {"0.weight": weight}, (x,)), y)

    slopes = (weights - layer.weight) * torch.vmap(torch.func.grad(log_p))(weights)
    parts = torch.stack([kappa(net, [(x, y)], samples=20)["0"] for _ in range(50)])
    error = (slopes.var(0) / runs + parts.var(0) / 50).sqrt()
    limit = norm.isf(1e-6 / 2 / error.numel())
    assert ((slopes.mean(0) - parts.mean(0)).abs() <= limit * error).all()
    assert (slopes.mean(0).abs() > limit * error).any()  # there is something to compare


def test_a_variance_layer_before_a_relu_is_seen() -> None:
    """At the means every unit is shut; prediction, which draws too, measures the same kappa."""
    net = nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 1))
    vd.convert(net, vd.variance_layer(), include="0")
    x, runs = torch.randn(6, 3), 60
    batch = [(x, torch.zeros(6, 1))]
    half_square = lambda output, y: 0.5 * (output - y).square().sum(1).mean()
    assert not kappa(net, batch, half_square, samples=0)["0"].any()
    # Behind straight pieces the Hessian of a squared error is the Fisher matrix, whatever y is.
    ours = torch.stack([kappa(net, batch, half_square)["0"] for _ in range(runs)])
    theirs = torch.stack([unlabelled_kappa(net, x, vd.Gaussian(1.0))["0"] for _ in range(runs)])
    error = (ours.var(0) / runs + theirs.var(0) / runs).sqrt()
    limit = norm.isf(1e-6 / 2 / error.numel())
    assert ((ours.mean(0) - theirs.mean(0)).abs() <= limit * error).all()
    assert (ours.mean(0) < -limit * error).any()


def test_prediction_takes_it_for_tied_weights() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    vd.convert(net, vd.sparse_vd(log_sigma2=-2.0))
    x = torch.randn(4, 3)
    found = kappa(net, [(x, torch.randint(3, (4,)))])
    assert select(net, found, threshold=0.0).fraction > 0
    assert set(unlabelled_kappa(net, x)) == {"0"}


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
