"""Functions of single numbers, with care for precision, range and gradients."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from vardrop._core.torch_private import (
    FunctionContext,
    backward_hooks,
    in_forward_mode,
    in_transform,
)

_LOG_HALF = -0.6931471805599453

# x and its range, as tensors: a compiler with dynamic shapes makes variables of floats, which an
# autograd function cannot take.
_Bounds = tuple[Tensor, Tensor, Tensor]


def to_float32_or_wider(x: Tensor) -> Tensor:
    """x in at least single precision.

    Noise tensors and KLs have this precision, because steps of 1e-3 are rounded away in bfloat16.

    Args:
        x: a tensor of floating-point numbers.

    Returns:
        x itself, or x in single precision if its type is narrower.

    >>> import torch
    >>> to_float32_or_wider(torch.zeros(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def log_square(x: Tensor) -> Tensor:
    """log x^2, finite at x = 0 and accurate if x^2 would underflow.

    Zero counts as the smallest normal number, with a gradient of zero.

    Args:
        x: any tensor.

    Returns:
        The logarithms, in at least single precision.

    >>> import torch
    >>> log_square(torch.tensor([1e-30, 0.0]))
    tensor([-138.1551, -174.6731])
    """
    x = to_float32_or_wider(x)
    return 2 * torch.log(x.abs() + torch.finfo(x.dtype).tiny)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, accurate near 0 and far from it.

    Args:
        x: negative numbers.

    Returns:
        The logarithms, in the shape of x.

    >>> import torch
    >>> log1mexp(torch.tensor([-1e-6, -1.0, -10.0]))
    tensor([-1.3816e+01, -4.5868e-01, -4.5401e-05])

    Maechler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    near = x > _LOG_HALF
    # Each branch gets only arguments for which it and its gradient are finite.
    by_expm1 = torch.log(-torch.expm1(torch.where(near, x, _LOG_HALF)))
    by_log1p = torch.log1p(-torch.exp(torch.where(near, _LOG_HALF, x)))
    return torch.where(near, by_expm1, by_log1p)


def logit_from_log(log_probability: Tensor) -> Tensor:
    """logit(p) from log p, for probabilities that would underflow.

    log p is kept one rounding step below 0, so that p = 1 has a finite logit.

    Args:
        log_probability: log p, at most 0.

    Returns:
        The logits, in the same shape.

    >>> import torch
    >>> logit_from_log(torch.tensor([0.0, -1e5]))
    tensor([ 1.5942e+01, -1.0000e+05])
    """
    below = log_probability.clamp(max=-torch.finfo(log_probability.dtype).eps)
    return below - log1mexp(below)


def _stopped(x: Tensor, grad: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """The gradient of x, zero for elements that a descent step would move out of the range."""
    return grad.masked_fill(((x >= high) & (grad < 0)) | ((x <= low) & (grad > 0)), 0.0)


class _Project(torch.autograd.Function):
    """Clamp. It is elementwise, so autocast keeps the precision of its input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return x.clamp(low, high)

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: _Bounds, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor, None, None]:
        x, low, high = ctx.saved_tensors
        return _stopped(x, grad, low, high), None, None


class _Straight(_Project):
    """Clamp with the full gradient, for a parameter whose hook stops the sum of its gradients."""

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Stop:
    """A hook that stops the sum of the gradients of a parameter at the ends of its range."""

    def __init__(self, x: Tensor, low: float, high: float) -> None:
        self.x, self.low, self.high = weakref.ref(x), low, high

    def __call__(self, grad: Tensor) -> Tensor:
        x = self.x()
        return grad if x is None else _stopped(x.detach(), grad, self.low, self.high)


def clamp_with_gradient(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp x, and stop its gradient only if a descent step would leave the range.

    A plain clamp has no gradient outside, so a parameter beyond a bound would never return.

    A parameter may be used more than once, by the data term and by the KL. The gradient is stopped
    for the sum of these terms, by a hook that the parameter gets at its first use. Without a
    parameter to hook (inside a compiled graph or a transform), each use stops its own gradient.
    In forward mode it is a plain clamp.

    Args:
        x: a parameter, or any other tensor.
        low: the lower bound.
        high: the upper bound.

    Returns:
        The clamped tensor.

    >>> import torch
    >>> x = torch.tensor([-20.0, 20.0], requires_grad=True)
    >>> clamp_with_gradient(x, -10.0, 10.0).sum().backward()
    >>> x.grad
    tensor([0., 1.])
    """
    if in_forward_mode():
        return x.clamp(low, high)
    bounds = x.new_full((), low), x.new_full((), high)
    if torch.compiler.is_compiling() or in_transform() or not (x.is_leaf and x.requires_grad):
        return _Project.apply(x, *bounds)
    stops = (h for h in backward_hooks(x) if isinstance(h, _Stop))
    if not any((h.low, h.high) == (low, high) and h.x() is x for h in stops):
        x.register_hook(_Stop(x, low, high))
    return _Straight.apply(x, *bounds)
