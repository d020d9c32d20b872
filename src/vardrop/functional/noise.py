"""How noise meets a signal: the output of local reparameterisation, in parts and as a whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vardrop.functional.cpu import blocks, can_block, keep_layout, like_layout, scratch
from vardrop.functional.drawing import normal_like
from vardrop.functional.elementwise import stands_back

_Gradients = tuple[Tensor | None, ...]
_Mask = list[bool]  # which gradients are asked for


class _GaussianOutput(torch.autograd.Function):
    """Saves noise / sd and the variance, where autograd would save more and pass more often.

    Autocast, on any device: elementwise, so in the precision of what the products gave, or a wider
    one.
    """

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
    if stands_back() or not torch.is_grad_enabled():
        return torch.addcmul(mean, variance.sqrt(), noise)
    return _GaussianOutput.apply(mean, variance, noise)[0]


class Product(ABC):
    """A map that is linear in its input and in its weight, and its gradients."""

    @abstractmethod
    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product plus the bias."""

    @abstractmethod
    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, mask: _Mask) -> _Gradients:
        """Those to x, weight and bias; None where the mask does not ask for one."""

    @abstractmethod
    def takes(self, x: Tensor) -> bool:
        """Whether x has the axes of a batch."""


class Dense(Product):
    """x weight^T, for x with any number of axes before the last."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, mask: _Mask) -> _Gradients:
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        return (
            grad @ weight if mask[0] else None,
            rows.t() @ inputs if mask[1] else None,
            rows.sum(0) if mask[2] else None,
        )

    def takes(self, x: Tensor) -> bool:
        return x.dim() >= 2


@dataclass(frozen=True)
class Convolution(Product):
    """A convolution with zero padding."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def _arguments(self) -> tuple[Any, ...]:
        none = (0,) * len(self.stride)
        return self.stride, self.padding, self.dilation, False, none, self.groups

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *self._arguments())

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, mask: _Mask) -> _Gradients:
        return torch.ops.aten.convolution_backward(
            grad, x, weight, [weight.shape[0]], *self._arguments(), mask
        )

    def takes(self, x: Tensor) -> bool:
        return x.dim() == 2 + len(self.stride)


class _FusedOutput(torch.autograd.Function):
    """Two products forwards and up to four backwards, with few passes and little room between.

    Autocast: for CPUs only, and not under it; its gradients are float32 also where a caller has
    autocast on around `backward`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        product: Product,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        variance: Tensor,
        variance_bias: Tensor,
        noise: Tensor | None,
    ) -> Tensor:
        squares = keep_layout(x * x, x)
        deviation = product.output(squares, variance, variance_bias).sqrt_()
        if noise is None:
            noise = scaled = normal_like(deviation)
        else:
            scaled = torch.empty_like(deviation)
        output = product.output(x, weight, bias).addcmul_(deviation, noise)
        torch.div(noise, deviation, out=scaled)
        ctx.product = product
        ctx.save_for_backward(x, squares, weight, variance, variance_bias, scaled)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> _Gradients:
        if not torch.is_autocast_enabled("cpu"):
            return _fused_gradients(ctx, grad)
        with torch.autocast("cpu", enabled=False):
            return _fused_gradients(ctx, grad)


def _fused_gradients(ctx: Any, grad: Tensor) -> _Gradients:
    x, squares, weight, variance, variance_bias, scaled = ctx.saved_tensors
    if torch.is_grad_enabled():  # for a second derivative these are functions of the inputs
        squares = x * x
        spread = ctx.product.output(squares, variance, variance_bias)
        scaled = scaled * (spread.detach() / spread).sqrt()
    needed = list(ctx.needs_input_grad[1:6])
    to_spread = grad * scaled  # twice the gradient; the half comes later, to small tensors
    to_x, to_weight, to_bias = ctx.product.gradients(grad, x, weight, needed[:3])
    to_squares, *to_variances = ctx.product.gradients(
        to_spread, squares, variance, [needed[0], *needed[3:]]
    )
    return (
        None,
        to_x.addcmul_(to_squares, x) if needed[0] else None,
        to_weight,
        to_bias,
        *(None if g is None else g * 0.5 for g in to_variances),
        None,
    )


def can_fuse(product: Product | None, x: Tensor, weight: Tensor, noise: Tensor | None) -> bool:
    """Whether `fused_output` may take the place of its parts: plain float32, nothing traced."""
    if product is None or not product.takes(x) or torch.is_autocast_enabled("cpu"):
        return False
    if noise is None:
        return can_block(x, weight)
    return noise.dim() == x.dim() and can_block(x, weight, noise)


def fused_output(
    product: Product,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    variance: Tensor,
    variance_bias: Tensor,
    noise: Tensor | None = None,
) -> Tensor:
    """m + sqrt(v) noise with m = product(x, weight) + bias, v = product(x^2, variance) + its bias.

    v must be positive; noise gets no gradient, and is drawn where it is None.

    >>> import torch
    >>> x, one = torch.tensor([[2.0]]), torch.ones(1, 1)
    >>> fused_output(Dense(), x, one, None, one, torch.zeros(1), one)
    tensor([[4.]])

    Kingma, Salimans & Welling 2015, eq. 6.
    """
    if x.dim() > 2 and isinstance(product, Dense):
        # Products of more than two axes are views inside torch, and a view that a function of two
        # outputs returns cannot be changed in place: the axes are restored outside.
        rows = x.flatten(0, -2)
        noise = None if noise is None else noise.flatten(0, -2)
        flat = _FusedOutput.apply(product, rows, weight, bias, variance, variance_bias, noise)
        return flat.unflatten(0, x.shape[:-1])
    return _FusedOutput.apply(product, x, weight, bias, variance, variance_bias, noise)
