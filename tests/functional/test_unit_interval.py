"""Kumaraswamy and concrete noise against quadrature, moments and finite differences."""

import math

import mpmath as mp
import pytest
import torch

from vardrop import functional as F
from vardrop.functional import kumaraswamy_beta_kl, kumaraswamy_log_mean

SETTINGS = [(a, b) for a in (1e-4, 0.05, 0.313, 2.127, 30.0) for b in (0.01, 1.0, 50.0)]
Z = 5.6  # two-sided 2e-8; 30 comparisons stay below a family-wise 1e-6


def reference(a: float, b: float, alpha: float) -> tuple[float, float]:
    """KL and mean by integration over t = -log u, with pi = (1 - u^(1/b))^(1/a)."""
    with mp.workdps(20):
        a, b = mp.mpf(a), mp.mpf(b)

        def log_pi(t):
            return mp.log(-mp.expm1(-t / b)) / a

        def log_ratio(t):
            # log q - log p at that point: 1 - pi^a = u^(1/b).
            log_q = mp.log(a * b) + (a - 1) * log_pi(t) - (b - 1) / b * t
            return log_q - mp.log(alpha) - (alpha - 1) * log_pi(t)

        points = [0, b / 100, b, 30 * b, 1, 10, 100] if b < 1 else [0, 0.01, 1, 10, 100]
        points = sorted(set(points))
        kl = mp.quad(lambda t: log_ratio(t) * mp.exp(-t), points)
        mean = mp.quad(lambda t: mp.exp(log_pi(t) - t), points)
        return float(kl), float(mean)


@pytest.mark.parametrize(("a", "b"), SETTINGS)
@pytest.mark.parametrize("alpha", [1e-4, 0.7])
def test_kl_and_mean_match_quadrature(a: float, b: float, alpha: float) -> None:
    kl, mean = reference(a, b, alpha)
    args = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    assert kumaraswamy_beta_kl(*args, alpha).item() == pytest.approx(kl, rel=1e-6, abs=1e-9)
    if a >= 0.05:  # below, the integrand is a spike; the closed form is checked there in 40 digits
        assert kumaraswamy_log_mean(*args).exp().item() == pytest.approx(mean, rel=1e-6)
    with mp.workdps(40):
        exact = float(mp.log(b) + mp.log(mp.beta(1 + 1 / mp.mpf(a), b)))
    assert kumaraswamy_log_mean(*args).item() == pytest.approx(exact, rel=1e-9, abs=1e-10)


def test_kl_at_the_published_start_is_seven_nats() -> None:
    a, b = torch.nn.functional.softplus(torch.tensor([-1.0, 0.5413]))
    assert kumaraswamy_beta_kl(a, b, 1e-4).item() == pytest.approx(7.05, abs=0.005)


@pytest.mark.parametrize(("a", "b"), [s for s in SETTINGS if s[0] >= 0.05])
def test_samples_have_the_mean(a: float, b: float) -> None:
    noise = torch.rand(200_000, generator=torch.Generator().manual_seed(1)).double()
    args = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    pi = F.kumaraswamy_log_sample(*args, noise.clamp(1e-12, 1 - 1e-12)).exp()
    error = pi.std() / noise.numel() ** 0.5
    assert abs(pi.mean() - kumaraswamy_log_mean(*args).exp()) < Z * error + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_at_the_extremes(dtype: torch.dtype) -> None:
    grid = torch.cartesian_prod(
        torch.tensor([1e-4, 4.5e-5, 30.0]),
        torch.tensor([4.5e-5, 1.0, 50.0]),
        torch.tensor([1e-6, 0.5, 1 - 1e-6]),
    )
    a, b, noise = grid.to(dtype).unbind(1)
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    logit = F.logit_from_log(F.kumaraswamy_log_sample(a, b, noise))
    total = F.concrete(logit, noise.flip(0), 0.1).sum() + kumaraswamy_beta_kl(a, b, 1e-4).sum()
    total = total + kumaraswamy_log_mean(a, b).exp().sum()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(total, [a, b]))


def test_small_a_does_not_underflow_in_log_space() -> None:
    noise = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    log_pi = F.kumaraswamy_log_sample(torch.tensor(0.01), torch.tensor(1.0), noise)
    assert (log_pi.exp() == 0).float().mean() > 0.3  # the plain formula loses a third of the draws
    assert torch.isfinite(log_pi).all()


@pytest.mark.parametrize("x", [-1e-12, -1e-3, -0.69, -0.7, -5.0, -300.0])
def test_log1mexp(x: float) -> None:
    with mp.workdps(40):
        exact = float(mp.log(1 - mp.exp(x)))
    found = F.log1mexp(torch.tensor(x, dtype=torch.float64))
    assert found.item() == pytest.approx(exact, rel=1e-12)


def test_concrete_exceeds_one_half_with_its_probability() -> None:
    logit, n = torch.tensor([-2.0, 0.0, 3.0]), 200_000
    draws, p = F.concrete(logit, F.uniform((n, 3), logit), 0.1), torch.sigmoid(logit)
    error = (p * (1 - p) / n).sqrt()
    assert ((draws > 0.5).float().mean(0) - p).abs().div(error).max() < Z


def test_concrete_draws_are_zero_before_they_are_denormal() -> None:
    logit = torch.linspace(-12, 12, 1000)
    draws = F.concrete(logit, torch.full_like(logit, 0.5), 0.1)
    assert (draws == 0).any()
    assert draws[draws > 0].min() > 1e-13


def test_bernoulli_kl_and_entropy_match_torch() -> None:
    q, p = torch.randn(2, 50, dtype=torch.float64) * 3
    bernoulli = torch.distributions.Bernoulli
    expected = torch.distributions.kl_divergence(bernoulli(logits=q), bernoulli(logits=p))
    torch.testing.assert_close(F.bernoulli_kl(q, p), expected)
    torch.testing.assert_close(F.bernoulli_entropy(q), bernoulli(logits=q).entropy())


def test_bernoulli_kl_is_finite_for_huge_logits() -> None:
    q = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
    p = torch.tensor([1e4, -1e4, -1e4, 1e4], requires_grad=True)
    total = F.bernoulli_kl(q, p).sum() + F.bernoulli_entropy(q).sum()
    assert total.item() == pytest.approx(2e4)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(total, [q, p]))


def test_uniform_never_touches_its_ends() -> None:
    draws = F.uniform((1_000_000,), torch.zeros(1))
    assert draws.min() > 0
    assert draws.max() < 1
    assert math.isfinite(torch.logit(draws).abs().max())
