"""Bounds on a parameter that it can come back from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vardrop.functional.blocks import in_forward_mode

# x and its range, as tensors: a compiler with dynamic shapes makes variables of floats, which an
# autograd function cannot take.
_Bounds = tuple[Tensor, Tensor, Tensor]


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
        leaves = ((x >= high) & (grad < 0)) | ((x <= low) & (grad > 0))
        return grad.masked_fill(leaves, 0.0), None, None


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

    >>> import torch
    >>> x = torch.tensor([-20.0, 20.0], requires_grad=True)
    >>> project(x, -10.0, 10.0).sum().backward()
    >>> x.grad
    tensor([0., 1.])
    """
    function = _ForwardProject if in_forward_mode() else _Project
    return function.apply(x, x.new_full((), low), x.new_full((), high))
