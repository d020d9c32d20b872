"""Expectations under a normal distribution that the KLs to proper priors need."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_NODES = 64
_LEFT, _RIGHT = 16.0, 3.8  # beyond these the integrand is under 1e-7 of its scale


def normal_kl(
    mean: Tensor, prior_mean: Tensor, prior_std: Tensor, *, log_variance: Tensor
) -> Tensor:
    """KL(N(mean, exp(log_variance)) || N(prior_mean, prior_std^2)), elementwise.

    1/2 (r + (mean - prior_mean)^2 / prior_std^2 - 1 - log r),  r = exp(log_variance) / prior_std^2.

    >>> import torch
    >>> one, zero = torch.tensor(1.0), torch.tensor(0.0)
    >>> normal_kl(one, zero, one, log_variance=zero)
    tensor(0.5000)
    """
    log_ratio = log_variance - 2 * prior_std.log()
    shift = ((mean - prior_mean) / prior_std).square()
    return 0.5 * (log_ratio.exp() + shift - 1 - log_ratio)


def normal_entropy(*, log_variance: Tensor) -> Tensor:
    """Entropy of a normal distribution, 1/2 log(2 pi e variance), elementwise.

    >>> import torch
    >>> normal_entropy(log_variance=torch.tensor(0.0))
    tensor(1.4189)
    """
    return 0.5 * (log_variance + math.log(2 * math.pi * math.e))


def expected_log1p_square(mean: Tensor, variance: Tensor) -> Tensor:
    """E log(1 + w^2) for w ~ N(mean, variance), elementwise, to about 1e-7.

    From log(1 + a) = int_0^inf (1 - exp(-s a)) exp(-s) / s ds,

        E log(1 + w^2) = int (1 - phi(e^x)) exp(-e^x) dx,
        phi(s) = E exp(-s w^2) = (1 + 2 s variance)^(-1/2) exp(-s mean^2 / (1 + 2 s variance)),

    whose integrand is analytic in a strip, so the trapezoidal rule converges exponentially. The
    left tail, where the integrand is e^x E w^2, is added in closed form.

    >>> import torch
    >>> expected_log1p_square(torch.tensor(0.0).double(), torch.tensor(1.0).double())
    tensor(0.5335, dtype=torch.float64)
    """
    second = mean.square() + variance
    start = -torch.log1p(second.detach()) - _LEFT
    step = (_RIGHT - start) / (_NODES - 1)
    total = torch.zeros_like(second)
    for k in range(_NODES):
        s = torch.exp(start + k * step)
        spread = 1 + 2 * s * variance
        log_phi = -s * mean.square() / spread - 0.5 * spread.log()
        end = 0.5 if k in (0, _NODES - 1) else 1.0
        total = total - end * torch.expm1(log_phi) * torch.exp(-s)
    return total * step + torch.exp(start) * second
