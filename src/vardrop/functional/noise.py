"""Noise and how it meets a signal: normal numbers, signs, the local-reparameterisation output."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vardrop.functional.blocks import blocks, can_block, like_layout, scratch


class _GaussianOutput(torch.autograd.Function):
    """Saves noise / sd and the variance, where autograd would save more and pass more often."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, variance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        if can_block(variance) and mean.stride() == variance.stride() == noise.stride():
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
    return _Square.apply(x)


class _ClampMax(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bound: float) -> Tensor:
        return x.clamp(max=bound)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.bound = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.where((x >= ctx.bound) & (grad < 0), 0.0, grad), None


def clamp_max(x: Tensor, bound: float) -> Tensor:
    """min(x, bound) whose gradient stops only where a descent step would leave the bound.

    A plain clamp has no gradient beyond the bound, so a parameter that started there, or stepped
    over it, could never come back.

    >>> import torch
    >>> x = torch.tensor([0.5], requires_grad=True)
    >>> (clamp_max(x, 0.0) * 3.0).sum().backward()
    >>> x.grad
    tensor([3.])
    """
    return _ClampMax.apply(x, bound)


def _quantiles(count: int) -> Tensor:
    """The means of a standard normal in `count` equally likely bins, scaled to variance 1."""
    edges = torch.special.ndtri(torch.linspace(0, 1, count + 1, dtype=torch.float64, device="cpu"))
    density = torch.exp(-0.5 * edges.square()) * (count / math.sqrt(2 * math.pi))
    values = density[:-1] - density[1:]
    return (values / values.square().mean().sqrt()).float()


_NORMALS = _quantiles(1 << 16)
_MANY = 4096  # numbers from which on looking them up is faster


def standard_normal(shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
    """Independent standard normal numbers, in the dtype and device of `like`.

    Many float32 numbers on a CPU are looked up, 16 random bits each, in half the time of
    `torch.randn`: 2^16 equally likely values of mean 0 and variance 1 up to 4.4, whose
    distribution function is within 2^-16 of the normal one and whose fourth moment is 2.9998.

    >>> import torch
    >>> standard_normal((2, 3), torch.zeros(())).shape
    torch.Size([2, 3])
    """
    count = math.prod(shape)
    if like.dtype != torch.float32 or like.device.type != "cpu" or count < _MANY or _exact():
        return torch.randn(shape, dtype=like.dtype, device=like.device)
    found = _traced_look_up(count) if torch.compiler.is_compiling() else _look_up(count)
    return found.view(shape)


def _look_up(count: int) -> Tensor:
    bits = torch.randint(-(2**63), 2**63 - 1, (-(-count // 4),), dtype=torch.int64, device="cpu")
    return _NORMALS.index_select(0, bits.view(torch.uint16).to(torch.int32)[:count])


# A compiler that saw the look-up would put it into loops over weights, which it then runs one
# element at a time; as an operator of its own it stays apart, and its numbers are the same.
_traced_look_up = torch.library.custom_op(
    "vardrop::look_up_normals", _look_up, mutates_args=(), tags=torch.Tag.nondeterministic_seeded
)
_traced_look_up.register_fake(lambda count: torch.empty(count, dtype=torch.float32, device="cpu"))


def _exact() -> bool:
    """Where looking numbers up does not work: in an exported graph, and under vmap."""
    return torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active()


def normal_like(x: Tensor) -> Tensor:
    """Standard normal noise in the shape, dtype, device and memory layout of x.

    For channels-last tensors `torch.randn_like` fills element by element, nine times slower than
    flat noise viewed in that layout.

    >>> import torch
    >>> x = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    >>> normal_like(x).stride() == x.stride()
    True
    """
    channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    if channels_last and not x.is_contiguous():
        n, c, h, w = x.shape
        return standard_normal((n, h, w, c), x).permute(0, 3, 1, 2)
    return standard_normal(x.shape, x)


def random_signs(shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
    """Independent +1 and -1, each with probability one half, in the dtype and device of `like`."""
    bits = torch.randint(0, 2, shape, device=like.device, dtype=torch.int8)
    return bits.mul_(2).sub_(1).to(like.dtype)
