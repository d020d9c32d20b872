"""Rules of moment propagation: (mean, variance) through each torch function, by its name.

A rule takes the function's own arguments, with a `Pair` where a random tensor stands, and returns
mean and variance. Elements are independent, and normal where the rule needs a shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vardrop.prediction.quadrature import hermite

_SCALE = 1 / math.sqrt(2 * math.pi)
_FAR = 12.0  # standard deviations


class Pair(NamedTuple):
    """Mean and variance of a random tensor; None is a variance of zero."""

    mean: Tensor
    variance: Tensor | None


class UnsupportedError(Exception):
    """A torch function without a rule."""


Rule = Callable[..., tuple[Tensor, Tensor | None]]
BASIC: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        BASIC.update(dict.fromkeys(names, rule))
        return rule

    return register


def _register(make: Callable[[Any], Rule], functions: list[Any]) -> None:
    BASIC.update({function.__name__: make(function) for function in functions})


def _standardise(x: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """P(x > 0), the std times the normal density at mean / std, and the std."""
    assert x.variance is not None
    std = x.variance.clamp(min=torch.finfo(x.mean.dtype).tiny).sqrt()
    z = (x.mean / std).clamp_(-_FAR, _FAR)  # beyond it, subnormal numbers are slow
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


def _by_quadrature(function: Callable[..., Tensor]) -> Rule:
    def rule(x: Pair, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if x.variance is None:
            return function(x.mean, *args, **kwargs), None
        std = x.variance.sqrt()
        mean, second = torch.zeros_like(std), torch.zeros_like(std)
        for node, weight in hermite():
            value = function(torch.add(x.mean, std, alpha=node), *args, **kwargs)
            mean.add_(value, alpha=weight)
            second.addcmul_(value, value, value=weight)
        return mean, second.sub_(mean.square()).clamp_(min=0)

    return rule


_register(
    _by_quadrature,
    [
        torch.tanh,
        torch.sigmoid,
        functional.gelu,
        functional.silu,
        functional.softplus,
        functional.elu,
        functional.hardtanh,
    ],
)


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


_register(
    _affine,
    [
        functional.linear,
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose1d,
        torch.conv_transpose2d,
        torch.conv_transpose3d,
    ],
)


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


def _reshaping(function: Callable[..., Tensor]) -> Rule:
    def rule(x: Pair, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        moved = function(x.mean, *args, **kwargs)
        return moved, None if x.variance is None else function(x.variance, *args, **kwargs)

    return rule


_register(
    _reshaping,
    [
        torch.flatten,
        torch.reshape,
        torch.squeeze,
        torch.unsqueeze,
        torch.transpose,
        torch.permute,
        Tensor.view,
        Tensor.contiguous,
    ],
)


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
