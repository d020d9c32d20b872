"""kappa against autograd's Hessian, and its stochastic estimator by a z-test."""

from __future__ import annotations

import copy

import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import vardrop as vd
from experiments.diagnostics import accuracies, gradient_variance, likelihood_covariance
from experiments.selective import unlabelled_kappa
from vardrop.functional.curvature import diagonal_fisher, diagonal_hessian, hutchinson_diagonal
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
    draws = [kappa(net, batches, probes=2, seed=seed, samples=0) for seed in range(runs)]
    limit = norm.isf(1e-6 / 2 / sum(v.numel() for v in exact.values()))
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
    found = kappa(net, batches, seed=5, samples=3)
    again = kappa(net, batches, seed=5, samples=3)
    totals = {name: torch.zeros_like(net[int(name)].weight) for name in found}
    with draw_from(GeneratorNoise(5)):
        for x, y in batches:
            for _ in range(3):
                drawn = copy.deepcopy(net)
                for layer in (drawn[0], drawn[4]):
                    layer.weight.data.copy_(drawn_weight(layer))
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


def test_errors() -> None:
    net = small_net()
    with pytest.raises(
        vd.VardropError, match="Expected `probes` to be an integer of at least 1, .* None takes"
    ):
        kappa(net, data(), probes=0)
    with pytest.raises(vd.VardropError, match="Expected `data` to have examples"):
        kappa(net, [])
    with pytest.raises(vd.VardropError, match="Expected `net` to have noisy weights"):
        kappa(vd.convert(nn.Linear(2, 2), vd.binary_dropout()), [])


# Diagonals of the Hessian and of the Fisher matrix against autograd's full matrices.


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((12, 6), (3, 12))
    )
    x = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    return first, second, x, torch.randint(0, 3, (20,), generator=generator)


def loss(first: Tensor, second: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(torch.tanh(x @ first.T) @ second.T, y)


def exact(first: Tensor, second: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    full = torch.autograd.functional.hessian(lambda a, b: loss(a, b, x, y), (first, second))
    return [
        full[i][i].reshape(t.numel(), t.numel()).diagonal().view_as(t)
        for i, t in enumerate((first, second))
    ]


def test_the_exact_diagonal() -> None:
    first, second, x, y = problem()
    found = diagonal_hessian(loss(first, second, x, y), [first, second])
    for a, b in zip(found, exact(first, second, x, y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_probes_are_unbiased() -> None:
    first, second, x, y = problem()
    value, generator = loss(first, second, x, y), torch.Generator().manual_seed(1)
    runs = [
        hutchinson_diagonal(value, [first, second], probes=1, generator=generator)
        for _ in range(2000)
    ]
    for index, reference in enumerate(exact(first, second, x, y)):
        found = torch.stack([run[index] for run in runs])
        z = (found.mean(0) - reference).abs() / (found.std(0) / len(runs) ** 0.5)
        assert z.max() < 6.0  # 108 comparisons, below 1e-6 together


def test_linear_values_have_no_curvature() -> None:
    w = torch.ones(3, requires_grad=True)
    other = torch.ones(2, requires_grad=True)
    assert diagonal_hessian(2 * w.sum(), [w])[0].tolist() == [0.0] * 3
    assert hutchinson_diagonal(2 * w.sum(), [w])[0].tolist() == [0.0] * 3
    assert diagonal_hessian(w.pow(3).sum(), [w, other])[1].tolist() == [0.0] * 2


def test_the_fisher_diagonal_is_minus_the_expected_hessian() -> None:
    first, second, x, _ = problem()
    output = torch.relu(x @ first.T) @ second.T
    probs = output.detach().softmax(1)
    generator = torch.Generator().manual_seed(1)

    def score() -> Tensor:
        drawn = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        return functional.one_hot(drawn, 3) - probs

    runs = [diagonal_fisher(output, [first, second], score, probes=1) for _ in range(2000)]
    # The Hessian of log p, which is the same for every y in a net piecewise linear in its weights.
    value = -output.log_softmax(1)[:, 0].sum()
    for index, reference in enumerate(diagonal_hessian(value, [first, second])):
        found = torch.stack([run[index] for run in runs])
        error = (found.std(0) / len(runs) ** 0.5).clamp(min=1e-12)
        assert ((found.mean(0) - reference).abs() / error).max() < 6.0


# What all diagnostics keep to: losses per example, and batches that stay as they are.


IMAGES = [(torch.randn(4, 1, 2, 3), torch.randint(2, (4, 2, 3))) for _ in range(6)]


def pixels():
    return vd.convert(nn.Conv2d(1, 2, 1), vd.bayes_by_backprop(log_sigma2=-3.0))


def per_example(output, y):
    return nn.functional.cross_entropy(output, y, reduction="none").flatten(1).sum(1)


def mean(output, y):
    return per_example(output, y).mean()


def same(first, second):
    """The results of two calls from one seed."""
    found = []
    for call in (first, second):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            found.append(call())
    return found


def test_kappa_is_per_example():
    net = pixels()
    mine, expected = same(lambda: kappa(net, IMAGES), lambda: kappa(net, IMAGES, mean))
    torch.testing.assert_close(mine, expected)


def test_gradients_and_likelihoods_are_per_example():
    net = pixels()
    mine, expected = same(
        lambda: gradient_variance(net, IMAGES), lambda: gradient_variance(net, IMAGES, mean)
    )
    assert mine["weight"].value == pytest.approx(expected["weight"].value)
    mine, expected = same(
        lambda: likelihood_covariance(net, IMAGES),
        lambda: likelihood_covariance(net, IMAGES, per_example),
    )
    assert mine.variance.value == pytest.approx(expected.variance.value)


@pytest.mark.parametrize("diagnose", [accuracies, gradient_variance, kappa, likelihood_covariance])
def test_a_net_that_begins_in_place_leaves_the_batches_alone(diagnose):
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))
    vd.convert(net, vd.bayes_by_backprop(log_sigma2=-3.0))
    batches = [(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0])) for _ in range(4)]
    before = [x.clone() for x, _ in batches]
    diagnose(net, batches)
    assert all(torch.equal(x, b) for (x, _), b in zip(batches, before, strict=True))
