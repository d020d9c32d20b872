import math
from functools import cache
from itertools import product

import mpmath as mp
import numpy as np
import pytest
import torch
from scipy import integrate, special

from tests.z_scores import assert_mean
from vardrop import functional as F
from vardrop.functional.fast import blocked_kl
from vardrop.functional.truncated_log_normal import kl, log_sample

LOG_ALPHA = np.linspace(-12, 12, 97)


def expected_log_abs(log_alpha):
    """E log|e| for e ~ N(1, alpha); tanh-sinh quadrature bears the singularity at e = 0."""
    std = math.exp(0.5 * log_alpha)
    f = lambda z: mp.log(abs(1 + std * z)) * mp.npdf(z)
    return float(mp.quad(f, [-12, *([-1 / std] if std > 1 / 12 else []), 12]))


@cache
def exact():
    """The KL at every log alpha, and its slope, from the Dawson function."""
    constant, root = 0.5 * (np.euler_gamma + math.log(2)), np.exp(-LOG_ALPHA / 2) / 2**0.5
    value = [expected_log_abs(la) - 0.5 * la + constant for la in LOG_ALPHA]
    return np.array(value), special.dawsn(root) / root


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_against_quadrature_and_gradient_against_dawson(dtype):
    u = torch.tensor(0.5 * np.exp(-LOG_ALPHA), dtype=dtype).requires_grad_()
    value = F.log_uniform_kl(u)
    value.sum().backward()
    (value, slope), (exact_value, exact_slope) = (value.detach().numpy(), u.grad.numpy()), exact()
    double = dtype == torch.float64
    assert np.abs(value - exact_value).max() <= 1e-6 or not double
    assert np.abs(slope - exact_slope).max() <= 1e-8 or not double
    assert np.abs(value / exact_value - 1).max() <= 2e-5
    assert np.abs(slope / exact_slope - 1).max() <= (1e-8 if double else 2e-5)


def test_additive_gradients():
    weight = torch.linspace(-3, 3, 61, dtype=torch.float64).requires_grad_()
    log_sigma2 = torch.linspace(-4, 4, 61, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(F.log_uniform_kl_additive, (weight, log_sigma2), atol=1e-6)
    assert torch.autograd.gradgradcheck(F.log_uniform_kl_additive, (weight, log_sigma2), atol=1e-5)
    value = F.log_uniform_kl_additive(weight, log_sigma2)
    grad_w, grad_s = torch.autograd.grad(value, (weight, log_sigma2))
    sigma = log_sigma2.exp().sqrt().detach()
    x = weight.detach() / (2**0.5 * sigma)
    dawson = torch.from_numpy(special.dawsn(x.numpy()))
    torch.testing.assert_close(grad_w, 2**0.5 / sigma * dawson, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(grad_s, -x * dawson, atol=1e-8, rtol=1e-8)


def test_dawson():
    x = torch.linspace(-50, 50, 2001, dtype=torch.float64)
    exact = torch.from_numpy(special.dawsn(x.numpy()))
    torch.testing.assert_close(F.dawson(x), exact, atol=1e-9, rtol=1e-9)


# The errors that the papers' approximations have, over 2401 points (methods table).
GRID = torch.linspace(-12, 12, 2401, dtype=torch.float64)
REFERENCE = F.log_uniform_kl(0.5 * torch.exp(-GRID))


@pytest.mark.parametrize("formula, part, error, where", [
    (F.log_uniform_kl_sigmoid, GRID <= 12, 0.00938, -3.51),
    (F.log_uniform_kl_cubic, GRID <= 0, 0.0403, -2.10),
])  # fmt: skip
def test_approximation_errors(formula, part, error, where):
    gap = (formula(GRID) - REFERENCE).abs()[part]
    assert float(gap.max()) == pytest.approx(error, rel=2e-3)
    assert float(GRID[part][gap.argmax()]) == pytest.approx(where, abs=0.02)


def test_the_cubic_is_useless_above_one_and_the_bound_holds_up_to_its_limit():
    assert float((F.log_uniform_kl_cubic(GRID) - REFERENCE).abs()[GRID >= 2].min()) > 100
    above = F.log_uniform_kl_bound(GRID) - REFERENCE
    assert (above[GRID < 0.884] > 0).all()
    assert (above[GRID > 0.885] < 0).all()


def test_the_expression_for_compilers_is_the_sum_over_blocks():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 50, generator=generator) * 10 ** torch.linspace(-12, 6, 50)
    log_sigma2, found = torch.empty(40, 50).uniform_(-20, 4, generator=generator), []
    for form in (F.log_uniform_kl_additive, blocked_kl.compiled_kl):
        tensors = [t.clone().requires_grad_() for t in (weight, log_sigma2)]
        value = form(*tensors)
        found.append((value, *torch.autograd.grad(value, tensors)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


@pytest.mark.parametrize("mean", [0.0, 0.3, 5.0, 300.0])
@pytest.mark.parametrize("std", [1e-3, 0.5, 3.0, 1e3])
def test_expected_log1p_square(mean, std):
    density = lambda z: math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    f = lambda z: math.log1p((mean + std * z) ** 2) * density(z)
    kink, width = min(max(-mean / std, -11.9), 11.9), min(1 / std, 0.05)
    points = sorted({-12.0, *(kink + k * width for k in (-20, -4, -1, 0, 1, 4, 20)), 12.0})
    points = [p for p in points if -12 <= p <= 12]
    parts = zip(points[:-1], points[1:], strict=True)
    value = sum(integrate.quad(f, a, b, limit=400)[0] for a, b in parts)
    ours = F.expected_log1p_square(torch.tensor(mean).double(), torch.tensor(std**2).double())
    assert float(ours) == pytest.approx(value, rel=2e-6, abs=1e-9)


def test_expected_log1p_square_gradient():
    mean = torch.tensor([0.0, 0.3, -2.0]).double().requires_grad_()
    variance = torch.tensor([0.5, 0.01, 4.0]).double().requires_grad_()
    assert torch.autograd.gradcheck(F.expected_log1p_square, (mean, variance), atol=1e-5)


# Kumaraswamy and concrete noise against quadrature, moments and finite differences.


SETTINGS = [(a, b) for a in (1e-4, 0.05, 0.313, 2.127, 30.0) for b in (0.01, 1.0, 50.0)]


def reference(a, b, alpha):
    """KL and mean by integration over t = -log u, with pi = (1 - u^(1/b))^(1/a)."""
    with mp.workdps(20):
        a, b = mp.mpf(a), mp.mpf(b)
        log_pi = lambda t: mp.log(-mp.expm1(-t / b)) / a
        # At that point 1 - pi^a = u^(1/b).
        log_q = lambda t: mp.log(a * b) + (a - 1) * log_pi(t) - (b - 1) / b * t
        log_p = lambda t: mp.log(alpha) + (alpha - 1) * log_pi(t)
        points = sorted({0, b / 100, b, 30 * b, 1, 10, 100} if b < 1 else {0, 0.01, 1, 10, 100})
        kl = mp.quad(lambda t: (log_q(t) - log_p(t)) * mp.exp(-t), points)
        mean = mp.quad(lambda t: mp.exp(log_pi(t) - t), points)
        return float(kl), float(mean)


@pytest.mark.parametrize(("a", "b"), SETTINGS)
@pytest.mark.parametrize("alpha", [1e-4, 0.7])
def test_kl_and_mean_match_quadrature(a, b, alpha):
    kl, mean = reference(a, b, alpha)
    args = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    assert F.kumaraswamy_beta_kl(*args, alpha).item() == pytest.approx(kl, rel=1e-6, abs=1e-9)
    if a >= 0.05:  # below, the integrand is a spike; the closed form is checked there in 40 digits
        assert F.kumaraswamy_log_mean(*args).exp().item() == pytest.approx(mean, rel=1e-6)
    with mp.workdps(40):
        exact = float(mp.log(b) + mp.log(mp.beta(1 + 1 / mp.mpf(a), b)))
    assert F.kumaraswamy_log_mean(*args).item() == pytest.approx(exact, rel=1e-9, abs=1e-10)


@pytest.mark.parametrize(("a", "b"), [s for s in SETTINGS if s[0] >= 0.05])
def test_samples_have_the_mean(a, b):
    noise = torch.rand(200_000, generator=torch.Generator().manual_seed(1)).double()
    args = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    pi = F.kumaraswamy_log_sample(*args, noise.clamp(1e-12, 1 - 1e-12)).exp()
    assert_mean(pi, F.kumaraswamy_log_mean(*args).exp())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_at_the_extremes(dtype):
    values = [1e-4, 4.5e-5, 30.0], [4.5e-5, 1.0, 50.0], [1e-6, 0.5, 1 - 1e-6]
    a, b, noise = torch.cartesian_prod(*map(torch.tensor, values)).to(dtype).unbind(1)
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    logit = F.logit_from_log(F.kumaraswamy_log_sample(a, b, noise))
    total = F.concrete(logit, noise.flip(0), 0.1).sum() + F.kumaraswamy_beta_kl(a, b, 1e-4).sum()
    total = total + F.kumaraswamy_log_mean(a, b).exp().sum()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(total, [a, b]))


def test_small_a_does_not_underflow_in_log_space():
    noise = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    log_pi = F.kumaraswamy_log_sample(torch.tensor(0.01), torch.tensor(1.0), noise)
    assert (log_pi.exp() == 0).float().mean() > 0.3  # the plain formula loses a third of the draws
    assert torch.isfinite(log_pi).all()


@pytest.mark.parametrize("x", [-1e-12, -1e-3, -0.69, -0.7, -5.0, -300.0])
def test_log1mexp(x):
    with mp.workdps(40):
        exact = float(mp.log(1 - mp.exp(x)))
    found = F.log1mexp(torch.tensor(x, dtype=torch.float64))
    assert found.item() == pytest.approx(exact, rel=1e-12)


def test_concrete_exceeds_one_half_with_its_probability():
    logit = torch.tensor([-2.0, 0.0, 3.0])
    draws = F.concrete(logit, F.uniform((200_000, 3), logit), 0.1)
    assert_mean((draws > 0.5).float(), torch.sigmoid(logit))


def test_concrete_draws_are_zero_before_they_are_denormal():
    logit = torch.linspace(-12, 12, 1000)
    draws = F.concrete(logit, torch.full_like(logit, 0.5), 0.1)
    assert (draws == 0).any()
    assert draws[draws > 0].min() > 1e-13


def test_bernoulli_kl_and_entropy_match_torch():
    q, p = torch.randn(2, 50, dtype=torch.float64) * 3
    bernoulli = torch.distributions.Bernoulli
    expected = torch.distributions.kl_divergence(bernoulli(logits=q), bernoulli(logits=p))
    torch.testing.assert_close(F.bernoulli_kl(q, p), expected)
    torch.testing.assert_close(F.bernoulli_entropy(q), bernoulli(logits=q).entropy())


def test_bernoulli_kl_is_finite_for_huge_logits():
    q = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
    p = torch.tensor([1e4, -1e4, -1e4, 1e4], requires_grad=True)
    total = F.bernoulli_kl(q, p).sum() + F.bernoulli_entropy(q).sum()
    assert total.item() == pytest.approx(2e4)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(total, [q, p]))


def test_uniform_never_touches_its_ends():
    draws = F.uniform((1_000_000,), torch.zeros(1))
    assert draws.min() > 0
    assert draws.max() < 1
    assert math.isfinite(torch.logit(draws).abs().max())


# The truncated log-normal against 30-digit quadrature, and its samples against moments.


LOW, HIGH = -20.0, 0.0
TRUNCATED_SETTINGS = list(product((-20, -12, -3, -0.1, 0, 0.5, 5), (-5, -2, 0, 2, 5)))


def reference_truncated(mu, log_sigma):
    """E theta and SNR by integration over log theta."""
    with mp.workdps(30):
        sigma = mp.e ** mp.mpf(log_sigma)
        peak = min(max(mp.mpf(mu), mp.mpf(LOW)), mp.mpf(HIGH))
        top = -((peak - mu) ** 2) / (2 * sigma**2)
        width = sigma if LOW <= mu <= HIGH else min(sigma, sigma**2 / abs(peak - mu))
        points = [LOW, *(peak + k * width for k in (-40, -10, -3, 0, 3, 10, 40)), HIGH]
        points = sorted({min(max(p, mp.mpf(LOW)), mp.mpf(HIGH)) for p in points})

        density = lambda x: mp.exp(-((x - mu) ** 2) / (2 * sigma**2) - top)
        mass = mp.quad(density, points)
        first = mp.quad(lambda x: density(x) * mp.exp(x), points) / mass
        spread = mp.quad(lambda x: density(x) * (mp.exp(x) - first) ** 2, points) / mass
        return float(first), float(first / mp.sqrt(spread))


@pytest.mark.parametrize(("mu", "log_sigma"), TRUNCATED_SETTINGS)
def test_closed_forms_match_quadrature(mu, log_sigma):
    mean, snr = reference_truncated(mu, log_sigma)
    args = (*torch.tensor([mu, log_sigma], dtype=torch.float64), LOW, HIGH)
    moment = F.truncated_log_normal.log_moment(*args, order=1).exp().item()
    assert moment == pytest.approx(mean, rel=1e-8)
    # E theta^2 / (E theta)^2 - 1 = 1 / SNR^2 is a difference of numbers rounded to 2e-16.
    rel = max(1e-6, 1e-15 * snr**2)
    assert F.truncated_log_normal.snr(*args).item() == pytest.approx(snr, rel=rel)


@pytest.mark.parametrize(("mu", "log_sigma"), TRUNCATED_SETTINGS)
def test_samples_have_the_mean_and_gradients_of_finite_differences(mu, log_sigma):
    noise = torch.rand(100_000, generator=torch.Generator().manual_seed(1)).double()
    args = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (mu, log_sigma)]
    mean = F.truncated_log_normal.log_moment(*args, LOW, HIGH, order=1).exp()
    assert_mean(log_sample(*args, LOW, HIGH, noise).exp().detach(), mean.detach())
    few = torch.linspace(0.05, 0.95, 7).double()
    sample = lambda mu, log_sigma: log_sample(mu, log_sigma, LOW, HIGH, few)
    assert torch.autograd.gradcheck(sample, args, eps=1e-5, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_at_the_extremes_truncated(dtype):
    grid = torch.cartesian_prod(torch.tensor([-20.0, 0.0, 5.0]), torch.tensor([-10.0, 0.0, 5.0]))
    mu, log_sigma = grid.to(dtype).clone().requires_grad_().unbind(1)
    noise = torch.full((9,), 1e-6, dtype=dtype)
    total = kl(mu, log_sigma, LOW, HIGH).sum()
    total = total + log_sample(mu, log_sigma, LOW, HIGH, noise).exp().sum()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(total, [mu, log_sigma]))


def test_second_derivatives_of_a_sample():
    mu = torch.tensor([0.0, -3.0, 2.0, -18.0, -25.0, -10.0, 4.9]).double().requires_grad_()
    log_sigma = torch.tensor([-5.0, 0.0, -1.0, 1.0, 0.5, 2.0, -2.0]).double().requires_grad_()
    noise = torch.linspace(0.05, 0.95, 7, dtype=torch.float64)

    sample = lambda mu, log_sigma: log_sample(mu, log_sigma, LOW, HIGH, noise)
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
def test_kl_over_the_whole_range_of_the_gate(mu, low):
    for log_sigma in (-10.0, -8.0, -5.0, -2.0, 0.0, 5.0):
        args = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (mu, log_sigma)]
        value = kl(*args, low, 0.0)
        slopes = torch.autograd.grad(value, args)
        with mp.workdps(150):
            exact, step = exact_kl(mu, log_sigma, low, 0.0), mp.mpf(10) ** -30
            near = (mu + step, log_sigma), (mu, log_sigma + step)
            differences = [(exact_kl(*point, low, 0.0) - exact) / step for point in near]
        assert value.item() == pytest.approx(float(exact), rel=1e-9, abs=1e-9)
        for slope, difference in zip(slopes, differences, strict=True):
            assert slope.item() == pytest.approx(float(difference), rel=1e-7, abs=1e-7)
