"""How noise meets a signal: the local-reparameterisation output, squares and bounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vardrop.functional.blocks import blocks, can_block, in_forward_mode, like_layout, scratch


def wide(x: Tensor) -> Tensor:
    """x in at least single precision: itself, unless its type is narrower.

    Noise is described and KLs are summed so: steps of 1e-3 round to nothing in bfloat16.

    >>> import torch
    >>> wide(torch.zeros(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def log_square(x: Tensor) -> Tensor:
    """log x^2, finite at x = 0 and right where x^2 would underflow.

    Zero counts as the smallest normal number, with a gradient of zero.

    >>> import torch
    >>> log_square(torch.tensor([1e-30, 0.0]))
    tensor([-138.1551, -174.6731])
    """
    x = wide(x)
    return 2 * torch.log(x.abs() + torch.finfo(x.dtype).tiny)


class _GaussianOutput(torch.autograd.Function):
    """Saves noise / sd and the variance, where autograd would save more and pass more often."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, variance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        if (
            can_block(mean, variance, noise)
            and mean.stride() == variance.stride() == noise.stride()
        ):
            return _blocked_output(mean, variance, noise)
        scaled = noise * torch.rsqrt(variance)
        return torch.addcmul(mean, variance, scaled), scaled

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        scaled, variance = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative noise / sd is a function of variance
            scaled = scaled * (variance.detach() / variance).sqrt()
        return grad, torch.addcmul(grad.new_zeros(()), grad, scaled, value=0.5), None


def _blocked_output(mean: Tensor, variance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    variance = like_layout(variance, variance)
    output, scaled, room = (*(torch.empty_like(variance) for _ in "ab"), scratch(variance, 1)[0])
    for m, v, e, out, ratio in blocks(mean, variance, noise, output, scaled):
        torch.div(e, torch.sqrt(v, out=room[: len(v)]), out=ratio)
        torch.addcmul(m, v, ratio, out=out)
    return output, scaled


def gaussian_output(mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """mean + sqrt(variance) noise, with the gradient to mean and variance written by hand.

    `variance` must be positive; noise gets no gradient.

    >>> import torch
    >>> gaussian_output(torch.zeros(2), torch.full((2,), 4.0), torch.tensor([1.0, -1.0]))
    tensor([ 2., -2.])

    Kingma, Salimans & Welling 2015, eq. 6.
    """
    if in_forward_mode() or not torch.is_grad_enabled():
        return torch.addcmul(mean, variance.sqrt(), noise)
    return _GaussianOutput.apply(mean, variance, noise)[0]


class _Square(torch.autograd.Function):
    """One pass backwards, where autograd takes three."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.addcmul(grad.new_zeros(()), grad, x, value=2.0)


def square(x: Tensor) -> Tensor:
    """x^2.

    >>> import torch
    >>> square(torch.tensor([-3.0]))
    tensor([9.])
    """
    return x * x if in_forward_mode() else _Square.apply(x)
