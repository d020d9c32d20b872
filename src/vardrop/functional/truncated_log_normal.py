"""The log-normal distribution truncated to [low, high] in log space, and its KL to log-uniform.

With A = (low - mu) / sigma, B = (high - mu) / sigma and Z = Phi(B) - Phi(A). Everything is
computed in double precision and from logarithms: at sigma = exp(-5) the variance of theta is
1e-5 of its squared mean, which single precision would lose.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vardrop.functional.elementwise import log1mexp
from vardrop.functional.normal import LOG_2PI, gauss_legendre

_SQRT_2 = math.sqrt(2)
_NEWTON_STEPS = 4
_FAR = 5.0  # deviations outside the range from which on the KL is integrated from its nearer end
_NEGLIGIBLE = 45.0  # exp(-45) is below the precision of double


_LEGENDRE = gauss_legendre(48)


def _log_density(z: Tensor) -> Tensor:
    return -0.5 * z.square() - 0.5 * LOG_2PI


def _log_cdf(z: Tensor) -> Tensor:
    """log Phi(z); torch's own log_ndtr has no batching rule, which vmap over draws needs."""
    near = z > -1
    body = torch.log1p(-0.5 * torch.erfc(torch.where(near, z, 0.0) / _SQRT_2))
    far = torch.where(near, -1.0, z)
    tail = torch.log(0.5 * torch.special.erfcx(-far / _SQRT_2)) - 0.5 * far.square()
    return torch.where(near, body, tail)


def log_interval_mass(low: Tensor, high: Tensor) -> Tensor:
    """log(Phi(high) - Phi(low)), elementwise, also where both lie far in one tail.

    >>> import torch
    >>> log_interval_mass(torch.tensor(-1.0).double(), torch.tensor(1.0).double()).exp()
    tensor(0.6827, dtype=torch.float64)
    """
    flip = low > 0  # Phi is accurate in its left tail only
    left, right = torch.where(flip, -high, low), torch.where(flip, -low, high)
    log_left, log_right = _log_cdf(left), _log_cdf(right)
    return log_right + log1mexp(log_left - log_right)


def kl(mu: Tensor, log_sigma: Tensor, low: float, high: float) -> Tensor:
    """KL to the log-uniform distribution on [exp(low), exp(high)], elementwise.

    log(high - low) - log sigma - 1/2 log(2 pi e) - log Z - (A phi(A) - B phi(B)) / (2 Z).

    Where mu lies far outside, the last two terms are huge and cancel: see `_kl_from_outside`.

    >>> import torch
    >>> kl(torch.tensor(0.0), torch.tensor(-5.0), -20.0, 0.0)
    tensor(7.2699)

    Neklyudov et al. 2017, "Structured Bayesian pruning via log-normal multiplicative noise",
    eq. 14.
    """
    a, b, sigma = _bounds(mu, log_sigma, low, high)
    outside = torch.maximum(a, -b)  # how far mu lies beyond the nearer end, in units of sigma
    far = outside > _FAR
    a, b = torch.where(far, -1.0, a), torch.where(far, 1.0, b)
    log_mass = log_interval_mass(a, b)
    ends = a * torch.exp(_log_density(a) - log_mass) - b * torch.exp(_log_density(b) - log_mass)
    near = -0.5 * LOG_2PI - 0.5 - log_mass - 0.5 * ends
    beyond = _kl_from_outside(torch.where(far, outside, _FAR), (high - low) / sigma)
    return (math.log(high - low) - log_sigma.double() + torch.where(far, beyond, near)).to(mu.dtype)


def _kl_from_outside(outside: Tensor, width: Tensor) -> Tensor:
    """-log J - E[o y + y^2 / 2] for y, the distance from the nearer end, o = `outside`.

    The density of y in [0, width] is exp(-o y - y^2 / 2) / J: the square o^2 / 2 of the density is
    gone, and every term is of the size of the result. With v = o y both are integrals of
    exp(-v - v^2 / (2 o^2)), taken by Gauss-Legendre quadrature where they are not negligible.
    """
    nodes, weights = (torch.as_tensor(t, device=outside.device) for t in _LEGENDRE)
    end = (outside * width).clamp(max=_NEGLIGIBLE).unsqueeze(-1)
    o, v = outside.unsqueeze(-1), end * nodes
    energy = v + 0.5 * (v / o).square()
    density = end * weights * torch.exp(-energy)
    mass = density.sum(-1)
    return outside.log() - mass.log() - (density * energy).sum(-1) / mass


def log_moment(mu: Tensor, log_sigma: Tensor, low: float, high: float, order: int) -> Tensor:
    """log E theta^k = k mu + k^2 sigma^2 / 2 + log[Phi(B - k sigma) - Phi(A - k sigma)] - log Z.

    In double precision.

    >>> import torch
    >>> args = torch.tensor(-20.0), torch.tensor(-3.0), -20.0, 0.0
    >>> log_moment(*args, order=0)
    tensor(0., dtype=torch.float64)

    Neklyudov et al. 2017, eq. 17.
    """
    a, b, sigma = _bounds(mu, log_sigma, low, high)
    shift = order * sigma
    inside = log_interval_mass(a - shift, b - shift) - log_interval_mass(a, b)
    body = order * mu.double() + 0.5 * shift.square() + inside
    # Where mu lies above `high`, the squares of B and B - k sigma cancel to k high: scaled tails.
    end = b.clamp(max=0.0)
    start = torch.where(b < 0, a, end - 1)
    shifted, plain = (
        torch.special.erfcx(-upper / _SQRT_2).log() + log1mexp(_log_cdf(lower) - _log_cdf(upper))
        for lower, upper in ((start - shift, end - shift), (start, end))
    )
    return torch.where(b < 0, order * high + shifted - plain, body)


def snr(mu: Tensor, log_sigma: Tensor, low: float, high: float) -> Tensor:
    """E theta / sqrt(Var theta), elementwise.

    >>> import torch
    >>> snr(torch.tensor(-10.0), torch.tensor(-5.0), -20.0, 0.0)
    tensor(148.4115)

    Neklyudov et al. 2017, eq. 18.
    """
    first, second = (log_moment(mu, log_sigma, low, high, order=k) for k in (1, 2))
    return torch.expm1(second - 2 * first).rsqrt().to(mu.dtype)


def log_sample(mu: Tensor, log_sigma: Tensor, low: float, high: float, noise: Tensor) -> Tensor:
    """log theta = mu + sigma Phi^-1(Phi(A) + u (Phi(B) - Phi(A))) for uniform u, in [low, high].

    The quantile is found in log space by Newton steps on log Phi, so it is exact in the tail where
    Phi(B) underflows; the last two carry derivatives up to the third (implicit differentiation:
    each step doubles the order that is right).

    >>> import torch
    >>> log_sample(
    ...     torch.tensor(-10.0), torch.tensor(0.0), -20.0, 0.0, torch.tensor(0.5))
    tensor(-10.)

    Neklyudov et al. 2017, eq. 16.
    """
    a, b, sigma = _bounds(mu, log_sigma, low, high)
    flip = a > 0  # log Phi is accurate in its left tail only: use the mirrored half
    left, right = torch.where(flip, -b, a), torch.where(flip, -a, b)
    u = torch.where(flip, 1 - noise.double(), noise.double())
    log_left, log_right = _log_cdf(left), _log_cdf(right)
    target = log_right + torch.log(u + (1 - u) * torch.exp(log_left - log_right))
    # A start without gradient, also where the exponential underflows.
    start = target.detach()
    body = start > -10.0
    in_body = torch.special.ndtri(torch.where(body, start, -10.0).exp().clamp(max=1 - 1e-16))
    tail = torch.where(body, -10.0, start)
    in_tail = -torch.sqrt(-2 * tail - torch.log(-4 * math.pi * tail))
    for _ in range(_NEWTON_STEPS):
        in_tail = _newton(tail, in_tail)
    z = _newton(target, _newton(target, torch.where(body, in_body, in_tail)))
    return (mu.double() + sigma * torch.where(flip, -z, z)).clamp(low, high).to(mu.dtype)


def _newton(target: Tensor, z: Tensor) -> Tensor:
    log_cdf = _log_cdf(z)
    return z - (log_cdf - target) * torch.exp(log_cdf - _log_density(z))


def _bounds(
    mu: Tensor, log_sigma: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, sigma = mu.double(), log_sigma.double().exp()
    return (low - mean) / sigma, (high - mean) / sigma, sigma
