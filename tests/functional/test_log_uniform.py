import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate, special

from vardrop import functional as F
from vardrop.functional.fast import additive

LOG_ALPHA = np.linspace(-12, 12, 97)
GAMMA = 0.5772156649015329


def expected_log_abs(log_alpha):
    """E log|e| for e ~ N(1, alpha); tanh-sinh quadrature bears the singularity at e = 0."""
    std = math.exp(0.5 * log_alpha)
    f = lambda z: mpmath.log(abs(1 + std * z)) * mpmath.npdf(z)
    return float(mpmath.quad(f, [-12, *([-1 / std] if std > 1 / 12 else []), 12]))


def exact(log_alpha):
    constant = 0.5 * (GAMMA + math.log(2))
    return expected_log_abs(log_alpha) - 0.5 * log_alpha + constant


EXACT = np.array([exact(la) for la in LOG_ALPHA])
SLOPE = np.array([special.dawsn(math.exp(-la / 2) / 2**0.5) * math.exp(la / 2) * 2**0.5 for la in LOG_ALPHA])  # fmt: skip


def u_of(log_alpha, dtype=torch.float64):
    return torch.tensor(0.5 * np.exp(-log_alpha), dtype=dtype)


def test_exact_value_against_quadrature():
    assert np.abs(F.log_uniform_kl(u_of(LOG_ALPHA)).numpy() - EXACT).max() <= 1e-6


def test_exact_gradient_against_dawson():
    u = u_of(LOG_ALPHA).requires_grad_()
    F.log_uniform_kl(u).sum().backward()
    assert np.abs(u.grad.numpy() - SLOPE).max() <= 1e-8
    assert np.abs(u.grad.numpy() / SLOPE - 1).max() <= 1e-8


def test_float32_is_relative():
    u = u_of(LOG_ALPHA, torch.float32).requires_grad_()
    value = F.log_uniform_kl(u)
    value.sum().backward()
    assert np.abs(value.detach().numpy() / EXACT - 1).max() <= 2e-5
    assert np.abs(u.grad.numpy() / SLOPE - 1).max() <= 2e-5


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


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_at_mean_zero(dtype, autocast):
    log_sigma2 = torch.linspace(-30, 10, 81).to(dtype).requires_grad_()
    for mean in (0.0, 1e-30, 1e-8, 1.0):
        weight = torch.full((81,), mean, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = F.log_uniform_kl_additive(weight, log_sigma2)
        grads = torch.autograd.grad(value, (weight, log_sigma2))
        assert torch.isfinite(value)
        assert all(torch.isfinite(g).all() for g in grads)


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


def test_cubic_is_useless_above_one():
    assert float((F.log_uniform_kl_cubic(GRID) - REFERENCE).abs()[GRID >= 2].min()) > 100


def test_the_expression_for_compilers_is_the_sum_over_blocks():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 50, generator=generator) * 10 ** torch.linspace(-12, 6, 50)
    log_sigma2, found = torch.empty(40, 50).uniform_(-20, 4, generator=generator), []
    for form in (F.log_uniform_kl_additive, additive.compiled_kl):
        tensors = [t.clone().requires_grad_() for t in (weight, log_sigma2)]
        value = form(*tensors)
        found.append((value, *torch.autograd.grad(value, tensors)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0)


def test_bound_holds_up_to_its_limit():
    above = F.log_uniform_kl_bound(GRID) - REFERENCE
    assert (above[GRID < 0.884] > 0).all()
    assert (above[GRID > 0.885] < 0).all()


def test_gaussian_output_gradients():
    mean, noise = torch.randn(7).double().requires_grad_(), torch.randn(7).double()
    variance = torch.rand(7).double().add(0.1).requires_grad_()
    assert torch.autograd.gradcheck(F.gaussian_output, (mean, variance, noise))
    wave = lambda *a: F.gaussian_output(*a).sin()
    assert torch.autograd.gradgradcheck(wave, (mean, variance, noise))


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
