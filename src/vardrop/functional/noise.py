"""Gaussian noise on a signal: the output of local reparameterization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vardrop._core.torch_private import in_forward_mode, in_transform
from vardrop.functional.fast import switch


class GaussianOutput(torch.autograd.Function):
    """Saves noise / (2 std), so that the backward pass is one product. Autograd would take three.

    Under autocast it stays in the precision of its inputs, because it is elementwise.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
        std = variance.sqrt()
        output = torch.addcmul(mean, std, noise)
        ctx.save_for_backward(torch.div(noise, std.mul_(2), out=std), variance)  # in its memory
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        slope, variance = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative the slope depends on the variance
            slope = slope * (variance.detach() / variance).sqrt()
        return grad, grad * slope, None


def plain_gaussian_output(mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """`gaussian_output` with the gradient of autograd."""
    return torch.addcmul(mean, variance.sqrt(), noise)


def gaussian_output(mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """mean + sqrt(variance) noise, with the gradient to mean and variance written by hand.

    `variance` must be positive; noise gets no gradient.

    >>> import torch
    >>> gaussian_output(torch.zeros(2), torch.full((2,), 4.0), torch.tensor([1.0, -1.0]))
    tensor([ 2., -2.])

    Kingma, Salimans & Welling 2015, eq. 6.
    """
    # It has no forward-mode derivative, and under vmap its rule costs more than it saves.
    if in_transform() or in_forward_mode() or not (switch.enabled and torch.is_grad_enabled()):
        return plain_gaussian_output(mean, variance, noise)
    return GaussianOutput.apply(mean, variance, noise)
