"""Noise behind a non-linearity against quadrature and against samples."""

import math

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torch import nn

import vardrop as vd
from experiments.diagnostics import activation_alpha, noise_level

FUNCTIONS = {"relu": lambda y: max(y, 0.0), "abs": abs, "identity": lambda y: y}


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize(("mean", "std"), [(0.3, 1.0), (-2.0, 1.5), (4.0, 0.5), (-0.1, 0.02)])
def test_alpha_matches_quadrature(activation: str, mean: float, std: float) -> None:
    def moment(power: int) -> float:
        ends = (mean - 40 * std, mean + 40 * std)
        points, f = sorted({mean, min(max(0.0, ends[0]), ends[1])}), FUNCTIONS[activation]
        density = norm(mean, std).pdf
        weighed = lambda y: f(y) ** power * density(y)
        return float(quad(weighed, *ends, points=points, limit=500, epsabs=0)[0])

    first, second = moment(1), moment(2)
    args = (torch.tensor(v, dtype=torch.float64) for v in (mean, std))
    found = activation_alpha(*args, activation)
    assert found.item() == pytest.approx((second - first**2) / first**2, rel=1e-6)


def test_zero_mean_constants() -> None:
    zero, std = torch.zeros(3).double(), torch.tensor([1e-3, 1.0, 1e3]).double()
    assert activation_alpha(zero, std, "abs").tolist() == pytest.approx([math.pi / 2 - 1] * 3)
    assert activation_alpha(zero, std, "relu").tolist() == pytest.approx([math.pi - 1] * 3)
    assert bool(activation_alpha(zero, std, "identity").isinf().all())


def test_a_dead_unit_has_infinite_alpha() -> None:
    assert activation_alpha(torch.tensor(-50.0), torch.tensor(1.0), "relu").item() == math.inf


@pytest.mark.parametrize("kind", ["linear", "conv", "transposed"])
@pytest.mark.parametrize("activation", ["relu", "abs"])
def test_layer_matches_its_samples(kind: str, activation: str) -> None:
    layer, x = {
        "linear": (nn.Linear(6, 3, bias=False), torch.randn(1, 6)),
        "conv": (nn.Conv1d(2, 3, 2, bias=False), torch.randn(1, 2, 4)),
        "transposed": (nn.ConvTranspose1d(2, 3, 2, bias=False), torch.randn(1, 2, 2)),
    }[kind]
    layer, x, draws = layer.double(), x.double(), 40_000
    vd.convert(layer, vd.variational_dropout(per="layer", drop_rate=0.9, max_alpha=None))
    alpha = noise_level(layer, x, activation)[""]
    with torch.no_grad(), vd.sampling(layer):
        y = layer(x.expand(draws, *x.shape[1:]))
    y = y.relu() if activation == "relu" else y.abs()
    # Delta method: the variance of s^2 / m^2 from its influence function.
    m, v = y.mean(0), y.var(0)
    error = (((y - m).square() - v) / m**2 - 2 * v * (y - m) / m**3).std(0) / draws**0.5
    limit = norm.isf(1e-6 / 2 / 60)  # fewer than sixty outputs in all cases together
    assert ((v / m**2 - alpha[0]).abs() / error).max() < limit


def test_a_net_of_variance_layers_and_its_state() -> None:
    net = nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    vd.convert(net, vd.variance_layer("sign"), include="0")
    vd.convert(net, vd.sparse_vd(), include="3")
    found = noise_level(net, torch.randn(3, 4))
    assert {k: tuple(v.shape) for k, v in found.items()} == {"0": (3, 5), "3": (3, 2)}
    assert torch.allclose(found["0"], torch.tensor(math.pi - 1), atol=1e-4)
    assert net.training
    assert net[0].estimator == vd.flipout
    assert (net[0].sampling, len(net[0]._forward_pre_hooks)) == (None, 0)
    assert net[1].num_batches_tracked == 0
