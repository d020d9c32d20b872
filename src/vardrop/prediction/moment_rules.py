"""Rules of moment propagation: (mean, variance) through each torch function, by its name.

A rule takes the function's own arguments, with a `Pair` where a random tensor stands, and returns
mean and variance. Elements are independent, and normal where the rule needs a shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_NODES, _SCALE = 20, 1 / math.sqrt(2 * math.pi)
_FAR = 12.0  # standard deviations
_POOL_NODES, _WIDE = 8, 4.0
_BLOCK = 2**17  # elements that stay in the cache together


class Pair(NamedTuple):
    """Mean and variance of a random tensor; None is a variance of zero."""

    mean: Tensor
    variance: Tensor | None


class UnsupportedError(Exception):
    """A torch function without a rule."""


Rule = Callable[..., tuple[Tensor, Tensor | None]]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _standardise(x: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """P(x > 0), the std times the normal density at mean / std, and the std."""
    assert x.variance is not None
    std = x.variance.clamp(min=torch.finfo(x.mean.dtype).tiny).sqrt()
    z = (x.mean / std).clamp_(-_FAR, _FAR)  # beyond, the density is slow to compute and nothing
    density = torch.exp(z.square().mul_(-0.5)).mul_(_SCALE)
    return torch.erf(z.mul_(math.sqrt(0.5))).add_(1).mul_(0.5), density.mul_(std), std


def _rectified(x: Pair) -> tuple[Tensor, Tensor]:
    """E max(x, 0) = m P + s p and E max(x, 0)^2 = (m^2 + s^2) P + m s p."""
    above, tail, std = _standardise(x)
    mean = torch.addcmul(tail, x.mean, above)
    second = torch.addcmul(x.mean * mean, above, std.square())
    return mean, second


@_rule("relu")
def _relu(x: Pair) -> tuple[Tensor, Tensor | None]:
    if x.variance is None:
        return x.mean.relu(), None
    mean, second = _rectified(x)
    return mean, torch.addcmul(second, mean, mean, value=-1).clamp_(min=0)


@_rule("leaky_relu", "leaky_relu_")
def _leaky_relu(
    x: Pair, negative_slope: float = 0.01, inplace: bool = False
) -> tuple[Tensor, Tensor | None]:
    if x.variance is None:
        return functional.leaky_relu(x.mean, negative_slope), None
    mean, second = _rectified(x)
    rest = 1 - negative_slope
    leaky = negative_slope * x.mean + rest * mean
    whole = x.mean.square() + x.variance
    square = (1 - negative_slope**2) * second + negative_slope**2 * whole
    return leaky, (square - leaky.square()).clamp(min=0)


@cache
def _hermite() -> tuple[tuple[float, float], ...]:
    """Nodes and weights of Gauss-Hermite quadrature for the standard normal (Golub & Welsch)."""
    off = torch.arange(1, _NODES, dtype=torch.float64).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return tuple(zip(values.tolist(), vectors[0].square().tolist(), strict=True))


def _by_quadrature(function: Callable[..., Tensor]) -> Rule:
    def rule(x: Pair, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if x.variance is None:
            return function(x.mean, *args, **kwargs), None
        std = x.variance.sqrt()
        mean, second = torch.zeros_like(std), torch.zeros_like(std)
        for node, weight in _hermite():
            value = function(torch.add(x.mean, std, alpha=node), *args, **kwargs)
            mean.add_(value, alpha=weight)
            second.addcmul_(value, value, value=weight)
        return mean, second.sub_(mean.square()).clamp_(min=0)

    return rule


for _function in (
    torch.tanh, torch.sigmoid, functional.gelu, functional.silu, functional.softplus,
    functional.elu, functional.hardtanh,
):  # fmt: skip
    RULES[_function.__name__] = _by_quadrature(_function)


def _affine(function: Callable[..., Tensor]) -> Rule:
    """y = op(x, w) + b for a certain w: the variance passes through w^2 and takes no bias."""

    def rule(
        x: Pair, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        mean = function(x.mean, weight, bias, *args, **kwargs)
        if x.variance is None:
            return mean, None
        return mean, function(x.variance, weight.square(), None, *args, **kwargs)

    return rule


for _function in (
    functional.linear, torch.conv1d, torch.conv2d, torch.conv3d,
    torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
):  # fmt: skip
    RULES[_function.__name__] = _affine(_function)


@_rule("batch_norm")
def _batch_norm(
    x: Pair,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> tuple[Tensor, Tensor | None]:
    shape = (-1, *(1,) * (x.mean.dim() - 2))
    scale = torch.rsqrt(running_var + eps) * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - running_mean * scale
    mean = x.mean * scale.view(shape) + shift.view(shape)
    return mean, None if x.variance is None else x.variance * scale.square().view(shape)


def _averaging(function: Callable[..., Tensor]) -> Rule:
    """A mean of n independent elements has the mean of their variances divided by n."""

    def rule(x: Pair, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        mean = function(x.mean, *args, **kwargs)
        if x.variance is None:
            return mean, None
        pooled = function(x.variance, *args, **kwargs)
        # The window has as many elements as a sum over it has of ones, where it does not overlap.
        return mean, pooled * (mean.numel() / x.mean.numel())

    return rule


for _function in (functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, torch.mean):
    RULES[_function.__name__] = _averaging(_function)


@_rule("avg_pool1d", "avg_pool2d")
def _avg_pool(x: Pair, kernel_size: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    pool = functional.avg_pool2d if x.mean.dim() == 4 else functional.avg_pool1d
    mean = pool(x.mean, kernel_size, *args, **kwargs)
    if x.variance is None:
        return mean, None
    sizes = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
    window = math.prod(sizes) if len(sizes) > 1 else sizes[0] ** (x.mean.dim() - 2)
    return mean, pool(x.variance, kernel_size, *args, **kwargs) / window


@_rule("max_pool2d")
def _max_pool2d(
    x: Pair,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    rectified: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The largest of a window, and with `rectified` the largest of it and zero."""
    if x.variance is None:
        mean = x.mean.relu() if rectified else x.mean
        pooled = functional.max_pool2d(mean, kernel_size, stride, padding, dilation, ceil_mode)
        return pooled, None
    height, width = (kernel_size,) * 2 if isinstance(kernel_size, int) else kernel_size
    if padding not in (0, (0, 0)) or dilation not in (1, (1, 1)) or ceil_mode or (
        stride is not None and stride not in (kernel_size, (height, width))
    ):  # fmt: skip
        raise UnsupportedError("max_pool2d with overlap, padding or dilation")
    rows = max(1, _BLOCK * len(x.mean) // x.mean.numel())
    parts = [
        _largest(_windows(m, height, width), _windows(v, height, width), rectified)
        for m, v in zip(x.mean.split(rows), x.variance.split(rows), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _windows(t: Tensor, height: int, width: int) -> list[Tensor]:
    rows, columns = t.shape[-2] // height * height, t.shape[-1] // width * width
    t = t[..., :rows, :columns]
    return [t[..., i::height, j::width] for i in range(height) for j in range(width)]


def _largest(
    means: list[Tensor], variances: list[Tensor], rectified: bool
) -> tuple[Tensor, Tensor]:
    """E M and Var M of the maximum M of independent normals, on its distribution function G.

    For M >= a: E (M - a) = int_a^b (1 - G), E (M - a)^2 = 2 int_a^b (t - a) (1 - G) dt, where
    G(t) is the product of the normal distribution functions.
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
    for node, weight in _legendre():
        below = torch.full_like(low, -(0.5 ** len(means)))  # minus G, from 1 + erf
        for start, slope in zip(starts, slopes, strict=True):
            below.mul_(torch.add(start, slope, alpha=node).erf_().add_(1))
        first.add_(below.add_(1), alpha=weight)
        second.add_(below, alpha=2 * weight * node)
    excess = first.mul_(width)
    variance = second.mul_(width).mul_(width).addcmul_(excess, excess, value=-1).clamp_(min=0)
    return low.add_(excess), variance


@cache
def _legendre() -> tuple[tuple[float, float], ...]:
    """Nodes and weights of Gauss-Legendre quadrature on [0, 1] (Golub & Welsch)."""
    k = torch.arange(1, _POOL_NODES, dtype=torch.float64)
    off = k / (4 * k.square() - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    nodes, weights = (values + 1) / 2, vectors[0].square()
    return tuple(zip(nodes.tolist(), weights.tolist(), strict=True))


def _reshaping(function: Callable[..., Tensor]) -> Rule:
    def rule(x: Pair, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        moved = function(x.mean, *args, **kwargs)
        return moved, None if x.variance is None else function(x.variance, *args, **kwargs)

    return rule


for _function in (
    torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.transpose, torch.permute,
    Tensor.view, Tensor.contiguous,
):  # fmt: skip
    RULES[_function.__name__] = _reshaping(_function)


def _pair(value: Any) -> Pair:
    return value if isinstance(value, Pair) else Pair(torch.as_tensor(value), None)


@_rule("add", "add_")
def _add(a: Any, b: Any, *, alpha: float = 1) -> tuple[Tensor, Tensor | None]:
    a, b = _pair(a), _pair(b)
    mean = a.mean + alpha * b.mean
    if a.variance is None and b.variance is None:
        return mean, None
    parts = [v for v in (a.variance, b.variance) if v is not None]
    if b.variance is not None:
        parts[-1] = alpha**2 * parts[-1]
    return mean, torch.broadcast_to(
        parts[0] if len(parts) == 1 else parts[0] + parts[1], mean.shape
    )


@_rule("mul")
def _mul(a: Any, b: Any) -> tuple[Tensor, Tensor | None]:
    a, b = _pair(a), _pair(b)
    if a.variance is None and b.variance is None:
        return a.mean * b.mean, None
    va, vb = (torch.zeros_like(v.mean) if v.variance is None else v.variance for v in (a, b))
    return a.mean * b.mean, va * b.mean.square() + vb * a.mean.square() + va * vb


@_rule("dropout", "dropout1d", "dropout2d", "dropout3d", "identity")
def _silent(x: Pair, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    # Dropout that is noise is handled as a module; here it is switched off.
    return x.mean, x.variance
