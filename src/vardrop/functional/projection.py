"""Bounds on a parameter that it can come back from."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from vardrop.functional.blocks import in_forward_mode

# x and its range, as tensors: a compiler with dynamic shapes makes variables of floats, which an
# autograd function cannot take.
_Bounds = tuple[Tensor, Tensor, Tensor]


def _stopped(x: Tensor, grad: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """The gradient to x, without the part by which a descent step would leave the range."""
    leaves = ((x >= high) & (grad < 0)) | ((x <= low) & (grad > 0))
    return grad.masked_fill(leaves, 0.0)


class _Project(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return x.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: _Bounds, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, low, high = ctx.saved_tensors
        return _stopped(x, grad, low, high), None, None


class _Straight(_Project):
    """The whole gradient goes on, to where the sum of all is stopped."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Stop:
    """A hook of a parameter: stops the sum of all its gradients where it would leave the range."""

    def __init__(self, x: Tensor, low: float, high: float) -> None:
        self.x, self.low, self.high = weakref.ref(x), low, high

    def __call__(self, grad: Tensor) -> Tensor:
        x = self.x()
        return grad if x is None else _stopped(x.detach(), grad, self.low, self.high)


class _ForwardProject(_Project):
    """In forward mode the derivative is that of the value: none outside of the range."""

    @staticmethod
    def setup_context(ctx: Any, inputs: _Bounds, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        x, low, high = ctx.saved_tensors
        return tangent.masked_fill((x < low) | (x > high), 0.0)


def project(x: Tensor, low: float, high: float) -> Tensor:
    """x within [low, high]; the gradient stops only where a descent step would leave the range.

    A plain clamp has no gradient outside, so a parameter that stepped over a bound would stay.

    A parameter may be used more than once, by the data term and by the KL: what counts is the sum
    of its gradients, so that is what is stopped, by a hook that the parameter gets at its first
    use. Where there is no parameter to hook (inside a compiled graph or a transform) every use
    stops for itself, and at a bound the terms are judged one by one.

    >>> import torch
    >>> x = torch.tensor([-20.0, 20.0], requires_grad=True)
    >>> project(x, -10.0, 10.0).sum().backward()
    >>> x.grad
    tensor([0., 1.])
    """
    function = (
        _ForwardProject if in_forward_mode() else _Straight if _hooked(x, low, high) else _Project
    )
    return function.apply(x, x.new_full((), low), x.new_full((), high))


def _hooked(x: Tensor, low: float, high: float) -> bool:
    """Whether the gradient of x is stopped as a whole, if need be from now on."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if not (x.is_leaf and x.requires_grad):
        return False
    hooks = x._backward_hooks or {}
    known = (h for h in hooks.values() if isinstance(h, _Stop))
    if not any((h.low, h.high) == (low, high) and h.x() is x for h in known):
        x.register_hook(_Stop(x, low, high))
    return True
