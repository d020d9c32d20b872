"""Expectations under normal distributions: for KLs to proper priors, and through functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)
_NODES = 64
_FAR, _WIDE = 12.0, 4.0  # standard deviations
_LEFT, _RIGHT = 16.0, 3.8  # beyond these the integrand is under 1e-7 of its scale


def normal_kl(
    mean: Tensor, prior_mean: Tensor, prior_std: Tensor, *, log_variance: Tensor
) -> Tensor:
    """KL(N(mean, exp(log_variance)) || N(prior_mean, prior_std^2)), elementwise.

    1/2 (r + (mean - prior_mean)^2 / prior_std^2 - 1 - log r),  r = exp(log_variance) / prior_std^2.

    Args:
        mean: of q.
        prior_mean: of p.
        prior_std: the standard deviation of p.
        log_variance: of q.

    Returns:
        The KLs in nats.

    >>> import torch
    >>> one, zero = torch.tensor(1.0), torch.tensor(0.0)
    >>> normal_kl(one, zero, one, log_variance=zero)
    tensor(0.5000)
    """
    log_ratio = log_variance - 2 * prior_std.log()
    return 0.5 * (log_ratio.exp() + ((mean - prior_mean) / prior_std).square() - 1 - log_ratio)


def normal_entropy(*, log_variance: Tensor) -> Tensor:
    """Entropy of a normal distribution, 1/2 log(2 pi e variance), elementwise.

    Args:
        log_variance: the log variance.

    Returns:
        The entropies in nats.

    >>> import torch
    >>> normal_entropy(log_variance=torch.tensor(0.0))
    tensor(1.4189)
    """
    return 0.5 * (log_variance + (LOG_2PI + 1))


def expected_log1p_square(mean: Tensor, variance: Tensor) -> Tensor:
    """E log(1 + w^2) for w ~ N(mean, variance), elementwise, to about 1e-7.

    From log(1 + a) = int_0^inf (1 - exp(-s a)) exp(-s) / s ds,

        E log(1 + w^2) = int (1 - phi(e^x)) exp(-e^x) dx,
        phi(s) = E exp(-s w^2) = (1 + 2 s variance)^(-1/2) exp(-s mean^2 / (1 + 2 s variance)).

    The integrand is analytic in a strip, so the trapezoidal rule converges exponentially. In the
    left tail the integrand is e^x E w^2, and the integral is added in closed form.

    Args:
        mean: of w.
        variance: of w.

    Returns:
        The expectations.

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


def relu_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """E max(x, 0) and E max(x, 0)^2 for x ~ N(mean, variance), elementwise.

    m P + s p and (m^2 + s^2) P + m s p, with P and p the normal distribution function and density
    at m / s.

    Args:
        mean: m.
        variance: s^2.

    Returns:
        The first and the second moment.

    >>> import torch
    >>> relu_moments(torch.zeros(1), torch.ones(1))
    (tensor([0.3989]), tensor([0.5000]))

    Frey & Hinton 1999, "Variational learning in nonlinear Gaussian belief networks", appendix.
    """
    std = variance.clamp(min=torch.finfo(mean.dtype).tiny).sqrt()
    z = (mean / std).clamp_(-_FAR, _FAR)  # beyond it, subnormal numbers are slow
    density = torch.exp(z.square().mul_(-0.5)).mul_(1 / math.sqrt(2 * math.pi))
    above = torch.erf(z.mul_(math.sqrt(0.5))).add_(1).mul_(0.5)
    first = torch.addcmul(density.mul_(std), mean, above)
    return first, torch.addcmul(mean * first, above, std.square())


def function_moments(
    function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    """E f(x) and Var f(x) for x ~ N(mean, variance), elementwise, with 20 Gauss-Hermite nodes.

    Args:
        function: f, elementwise.
        mean: of x.
        variance: of x.

    Returns:
        The mean and the variance.

    >>> import torch
    >>> function_moments(torch.square, torch.zeros(1), torch.ones(1))
    (tensor([1.]), tensor([2.0000]))
    """
    std = variance.sqrt()
    first, second = torch.zeros_like(std), torch.zeros_like(std)
    for node, weight in _HERMITE:
        value = function(torch.add(mean, std, alpha=node))
        first.add_(value, alpha=weight)
        second.addcmul_(value, value, value=weight)
    return first, second.sub_(first.square()).clamp_(min=0)


def max_moments(
    means: list[Tensor], variances: list[Tensor], rectified: bool = False
) -> tuple[Tensor, Tensor]:
    """E M and Var M of the maximum M of independent normal numbers, elementwise.

    The distribution function G of M is the product of the normal ones. For M >= a, E (M - a) =
    int_a^b (1 - G) dt and E (M - a)^2 = 2 int_a^b (t - a) (1 - G) dt. Eight nodes are accurate to
    about 0.5%.

    Args:
        means: of the normal numbers, one tensor for each.
        variances: of the normal numbers.
        rectified: whether 0 is among the numbers.

    Returns:
        The mean and the variance.

    >>> import torch
    >>> zero, one = torch.zeros(1), torch.ones(1)
    >>> max_moments([zero, zero], [one, one])
    (tensor([0.5614]), tensor([0.6823]))
    """
    tiny = torch.finfo(means[0].dtype).tiny
    stds = [v.clamp(min=tiny).sqrt_() for v in variances]
    low = torch.stack([m - _WIDE * s for m, s in zip(means, stds, strict=True)]).amax(0)
    high = torch.stack([m + _WIDE * s for m, s in zip(means, stds, strict=True)]).amax(0)
    if rectified:
        low, high = low.clamp_(min=0), high.clamp_(min=0)
    width = high.sub_(low)
    slopes = [s.mul_(math.sqrt(2)).reciprocal_() for s in stds]
    starts = [(low - m).mul_(k) for m, k in zip(means, slopes, strict=True)]
    slopes = [k.mul_(width) for k in slopes]
    first, second = torch.zeros_like(low), torch.zeros_like(low)
    for node, weight in _LEGENDRE:
        below = torch.full_like(low, -(0.5 ** len(means)))  # minus G, from 1 + erf
        for start, slope in zip(starts, slopes, strict=True):
            below.mul_(torch.add(start, slope, alpha=node).erf_().add_(1))
        first.add_(below.add_(1), alpha=weight)
        second.add_(below, alpha=2 * weight * node)
    excess = first.mul_(width)
    variance = second.mul_(width).mul_(width).addcmul_(excess, excess, value=-1).clamp_(min=0)
    return low.add_(excess), variance


def gauss_legendre(count: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of Gauss-Legendre quadrature on [0, 1]."""
    k = torch.arange(1, count, dtype=torch.float64, device="cpu")
    values, weights = _golub_welsch(k / (4 * k.square() - 1).sqrt())
    return (values + 1) / 2, weights


def _golub_welsch(off_diagonal: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights from the Jacobi matrix of a symmetric weight (Golub & Welsch 1969)."""
    matrix = torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1)
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors[0].square()


# Pairs of a node and its weight: for the standard normal, and on [0, 1].
_HERMITE = torch.stack(_golub_welsch(torch.arange(1.0, 20, dtype=torch.float64).sqrt())).T.tolist()
_LEGENDRE = torch.stack(gauss_legendre(8)).T.tolist()
