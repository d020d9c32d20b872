"""Bounds on a parameter that it can come back from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Project(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.low, ctx.high = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        leaves = ((x >= ctx.high) & (grad < 0)) | ((x <= ctx.low) & (grad > 0))
        return grad.masked_fill(leaves, 0.0), None, None


def project(x: Tensor, low: float, high: float) -> Tensor:
    """x within [low, high]; the gradient stops only where a descent step would leave the range.

    A plain clamp has no gradient outside, so a parameter that stepped over a bound would stay.

    >>> import torch
    >>> x = torch.tensor([-20.0, 20.0], requires_grad=True)
    >>> project(x, -10.0, 10.0).sum().backward()
    >>> x.grad
    tensor([0., 1.])
    """
    return _Project.apply(x, low, high)  # type: ignore[no-any-return, no-untyped-call]
