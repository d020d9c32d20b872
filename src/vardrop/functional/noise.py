"""Gaussian noise on a signal, and the products before it: local reparameterization."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from vardrop._core.sharding import is_sharded
from vardrop._core.torch_private import FunctionContext, in_forward_mode, in_transform
from vardrop.functional.fast import switch


class GaussianOutput(torch.autograd.Function):
    """Saves noise / (2 std), so that the backward pass is one product. Autograd would take three.

    Under autocast it keeps the precision of its inputs, because it is elementwise.
    """

    @staticmethod
    def forward(ctx: FunctionContext, mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
        std = variance.sqrt()
        y = torch.addcmul(mean, std, noise)
        ctx.save_for_backward(torch.div(noise, std.mul_(2), out=std), variance)  # in its memory
        return y

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        slope, variance = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative the slope depends on the variance
            slope = slope * (variance.detach() / variance).sqrt()
        return grad, grad * slope, None


def plain_gaussian_output(mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """`gaussian_output` with the gradient of autograd."""
    return torch.addcmul(mean, variance.sqrt(), noise)


def gaussian_output(mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """Return mean + sqrt(variance) noise, with the gradients of mean and variance written by hand.

    Args:
        mean: E y.
        variance: Var y, positive.
        noise: standard normal numbers. They get no gradient.

    Returns:
        y, in the shape of the mean.

    >>> import torch
    >>> gaussian_output(torch.zeros(2), torch.full((2,), 4.0), torch.tensor([1.0, -1.0]))
    tensor([ 2., -2.])

    Kingma, Salimans & Welling 2015, eq. 6.
    """
    # It has no forward-mode derivative, and under vmap its rule costs more than it saves.
    if in_transform() or in_forward_mode() or not (switch.enabled and torch.is_grad_enabled()):
        return plain_gaussian_output(mean, variance, noise)
    return GaussianOutput.apply(mean, variance, noise)


class _Linear(torch.autograd.Function):
    """`functional.linear` that goes back in the precision of its forward pass."""

    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(
        ctx: FunctionContext, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = (saved.to(grad.dtype) for saved in ctx.saved_tensors)
        to_x, to_weight, to_bias = ctx.needs_input_grad
        rows, columns = (t.reshape(-1, t.shape[-1]) for t in (grad, x))
        kind = grad.device.type
        available = torch.amp.is_autocast_available(kind)
        with torch.autocast(kind, enabled=False) if available else nullcontext():
            return (
                grad @ weight if to_x else None,
                rows.T @ columns if to_weight else None,
                rows.sum(0) if to_bias else None,
            )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`functional.linear` whose gradients do not depend on autocast around `backward`.

    torch multiplies in half precision there, in which products of variances vanish.

    Args:
        x: (..., inputs).
        weight: (outputs, inputs).
        bias: (outputs,) or None.

    Returns:
        x weight^T + bias.

    >>> import torch
    >>> linear(torch.ones(1, 2), torch.ones(3, 2), None)
    tensor([[2., 2., 2.]])
    """
    traced = torch.compiler.is_compiling() or in_transform() or in_forward_mode()
    if traced or not torch.is_grad_enabled() or is_sharded(weight):
        return functional.linear(x, weight, bias)
    if x.dim() > 2 and x.is_contiguous():
        # torch would return a view from inside the function, which cannot be changed in place.
        rows = _Linear.apply(x.flatten(0, -2), weight, bias)
        return rows.view(*x.shape[:-1], len(weight))
    return _Linear.apply(x, weight, bias)
