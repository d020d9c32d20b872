"""The truncated log-normal against 30-digit quadrature, and its samples against moments."""

from itertools import product

import mpmath as mp
import pytest
import torch

from vardrop import functional as F
from vardrop.functional.truncated_log_normal import kl, log_sample

LOW, HIGH = -20.0, 0.0
SETTINGS = list(product((-20, -12, -3, -0.1, 0, 0.5, 5), (-5, -2, 0, 2, 5)))
Z = 5.6  # two-sided 2e-8, so 35 settings stay below a family-wise 1e-6


def reference(mu: float, log_sigma: float) -> tuple[float, float]:
    """E theta and SNR by integration over log theta."""
    with mp.workdps(30):
        sigma = mp.e ** mp.mpf(log_sigma)
        peak = min(max(mp.mpf(mu), mp.mpf(LOW)), mp.mpf(HIGH))
        top = -((peak - mu) ** 2) / (2 * sigma**2)
        width = sigma if LOW <= mu <= HIGH else min(sigma, sigma**2 / abs(peak - mu))
        points = [LOW, *(peak + k * width for k in (-40, -10, -3, 0, 3, 10, 40)), HIGH]
        points = sorted({min(max(p, mp.mpf(LOW)), mp.mpf(HIGH)) for p in points})

        def density(x):
            return mp.exp(-((x - mu) ** 2) / (2 * sigma**2) - top)

        mass = mp.quad(density, points)
        first = mp.quad(lambda x: density(x) * mp.exp(x), points) / mass
        spread = mp.quad(lambda x: density(x) * (mp.exp(x) - first) ** 2, points) / mass
        return float(first), float(first / mp.sqrt(spread))


@pytest.mark.parametrize(("mu", "log_sigma"), SETTINGS)
def test_closed_forms_match_quadrature(mu: float, log_sigma: float) -> None:
    mean, snr = reference(mu, log_sigma)
    args = (*torch.tensor([mu, log_sigma], dtype=torch.float64), LOW, HIGH)
    moment = F.truncated_log_normal.log_moment(*args, order=1).exp().item()
    assert moment == pytest.approx(mean, rel=1e-8)
    # E theta^2 / (E theta)^2 - 1 = 1 / SNR^2 is a difference of numbers rounded to 2e-16.
    rel = max(1e-6, 1e-15 * snr**2)
    assert F.truncated_log_normal.snr(*args).item() == pytest.approx(snr, rel=rel)


@pytest.mark.parametrize(("mu", "log_sigma"), SETTINGS)
def test_samples_have_the_mean(mu: float, log_sigma: float) -> None:
    noise = torch.rand(100_000, generator=torch.Generator().manual_seed(1)).double()
    args = (*torch.tensor([mu, log_sigma], dtype=torch.float64), LOW, HIGH)
    theta = log_sample(*args, noise).exp()
    mean = F.truncated_log_normal.log_moment(*args, order=1).exp()
    error = theta.std() / noise.numel() ** 0.5
    assert abs(theta.mean() - mean) < Z * error


@pytest.mark.parametrize(("mu", "log_sigma"), SETTINGS)
def test_sample_gradients_match_finite_differences(mu: float, log_sigma: float) -> None:
    noise = torch.linspace(0.05, 0.95, 7).double()
    args = torch.tensor([mu, log_sigma], dtype=torch.float64)

    def sample(p: torch.Tensor) -> torch.Tensor:
        return log_sample(p[0], p[1], LOW, HIGH, noise)

    step, found = 1e-5, torch.autograd.functional.jacobian(sample, args)
    for i in range(2):
        shift = step * torch.eye(2).double()[i]
        slope = (sample(args + shift) - sample(args - shift)) / (2 * step)
        torch.testing.assert_close(found[:, i], slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_at_the_extremes(dtype: torch.dtype) -> None:
    grid = torch.cartesian_prod(torch.tensor([-20.0, 0.0, 5.0]), torch.tensor([-10.0, 0.0, 5.0]))
    mu, log_sigma = grid.to(dtype).clone().requires_grad_().unbind(1)
    noise = torch.full((9,), 1e-6, dtype=dtype)
    total = kl(mu, log_sigma, LOW, HIGH).sum()
    total = total + log_sample(mu, log_sigma, LOW, HIGH, noise).exp().sum()
    gradients = torch.autograd.grad(total, [mu, log_sigma])
    assert all(torch.isfinite(g).all() for g in gradients)


def test_second_derivatives_of_a_sample() -> None:
    mu = torch.tensor([0.0, -3.0, 2.0, -18.0, -25.0, -10.0, 4.9]).double().requires_grad_()
    log_sigma = torch.tensor([-5.0, 0.0, -1.0, 1.0, 0.5, 2.0, -2.0]).double().requires_grad_()
    noise = torch.linspace(0.05, 0.95, 7, dtype=torch.float64)

    def sample(mu, log_sigma):
        return log_sample(mu, log_sigma, LOW, HIGH, noise)

    assert torch.autograd.gradcheck(sample, (mu, log_sigma))
    assert torch.autograd.gradgradcheck(sample, (mu, log_sigma), atol=1e-4)


def exact_kl(mu, log_sigma, low, high):
    mu, sigma = mp.mpf(mu), mp.exp(mp.mpf(log_sigma))
    a, b = (low - mu) / sigma, (high - mu) / sigma
    if a > 0:
        a, b = -b, -a
    mass = (mp.erfc(-b / mp.sqrt(2)) - mp.erfc(-a / mp.sqrt(2))) / 2
    ends = (a * mp.npdf(a) - b * mp.npdf(b)) / (2 * mass)
    return mp.log(high - low) - log_sigma - mp.log(2 * mp.pi * mp.e) / 2 - mp.log(mass) - ends


@pytest.mark.parametrize("low", [-20.0, -1.0, -0.01])
@pytest.mark.parametrize("mu", [-25.0, -20.0, -0.5, 0.0, 1e-3, 0.2, 2.0, 5.0])
def test_kl_over_the_whole_range_of_the_gate(mu: float, low: float) -> None:
    for log_sigma in (-10.0, -8.0, -5.0, -2.0, 0.0, 5.0):
        args = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (mu, log_sigma)]
        value = kl(*args, low, 0.0)
        slopes = torch.autograd.grad(value, args)
        with mp.workdps(150):
            exact, step = exact_kl(mu, log_sigma, low, 0.0), mp.mpf(10) ** -30
            near = [
                exact_kl(mu + step, log_sigma, low, 0.0),
                exact_kl(mu, log_sigma + step, low, 0.0),
            ]
            differences = [(value - exact) / step for value in near]
        assert value.item() == pytest.approx(float(exact), rel=1e-9, abs=1e-9)
        for slope, difference in zip(slopes, differences, strict=True):
            assert slope.item() == pytest.approx(float(difference), rel=1e-7, abs=1e-7)
