"""Gaussian noise on a signal, and the products before it: local reparameterization."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from vardrop._core.sharding import is_sharded
from vardrop._core.torch_private import FunctionContext, in_forward_mode, in_transform
from vardrop.functional.fast import switch
from vardrop.functional.fast.blocked_kl import keep_layout
from vardrop.functional.random import normal_like

Map = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def gaussian_output(mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """Return mean + sqrt(variance) noise.

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
    return torch.addcmul(mean, variance.sqrt(), noise)


_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)


@dataclass(slots=True)
class Convolution:
    """A convolution with zero padding, as a function of (input, weight, bias)."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolve = _CONVOLUTIONS[len(self.stride) - 1]
        return convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


def _gradients(
    op: Map, grad: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the input and of the weight of a product, if they are needed."""
    if isinstance(op, Convolution):
        none = [0] * len(op.stride)
        to_x, to_weight, _ = torch.ops.aten.convolution_backward(
            grad, x, weight, None, op.stride, op.padding, op.dilation, False, none, op.groups,
            [*needed, False],
        )  # fmt: skip
        return to_x, to_weight
    return grad @ weight if needed[0] else None, grad.T @ x if needed[1] else None


def in_autocast(kind: str) -> bool:
    """Whether autocast is on for a kind of device.

    Args:
        kind: of the device, such as "cpu". Some, such as "meta", have no autocast.

    Returns:
        True or False.
    """
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def without_autocast(kind: str) -> AbstractContextManager[None]:
    """A context without autocast for a kind of device. It costs nothing if there is none."""
    return torch.autocast(kind, enabled=False) if in_autocast(kind) else nullcontext()


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
        with without_autocast(grad.device.type):
            gradients = _gradients(linear, grad, x, weight, (to_x, to_weight))
            return *gradients, grad.sum(0) if to_bias else None


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
    if traced or not torch.is_grad_enabled() or is_sharded(weight) or x.dim() == 1:
        return functional.linear(x, weight, bias)
    if x.dim() == 2:
        return _Linear.apply(x, weight, bias)
    # torch would return a view from inside the function, which cannot be changed in place.
    return _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))


class _LocalContext(FunctionContext, Protocol):
    op: Map


class _LocalOutput(torch.autograd.Function):
    """Two products, a draw and their gradients. Autograd would keep twice as many tensors."""

    @staticmethod
    def forward(
        ctx: _LocalContext,
        op: Map,
        noise: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        variance: Tensor,
        bias_variance: Tensor,
    ) -> Tensor:
        product = functional.linear if op is linear else op
        y, squares = product(x, weight, bias), x * x
        squares = squares if op is linear else keep_layout(squares, x)
        std = product(squares, variance, bias_variance).sqrt_()
        noise = normal_like(std) if noise is None else noise
        y.addcmul_(std, noise)
        slope = torch.div(noise, std.mul_(2), out=std)  # of the variance of y, in its memory
        ctx.op = op
        ctx.save_for_backward(x, squares, weight, variance, bias_variance, slope)
        return y

    @staticmethod
    def backward(ctx: _LocalContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, squares, weight, variance, bias_variance, slope = ctx.saved_tensors
        _, _, to_x, to_weight, to_bias, to_variance, to_bias_variance = ctx.needs_input_grad
        op = ctx.op
        with without_autocast(grad.device.type):
            if torch.is_grad_enabled():  # for a second derivative the slope is a function
                squares = x * x
                total = op(squares, variance, bias_variance)
                slope = slope * (total.detach() / total).sqrt()
            to_total = grad * slope
            gradient, by_weight = _gradients(op, grad, x, weight, (to_x, to_weight))
            by_square, by_variance = _gradients(
                op, to_total, squares, variance, (to_x, to_variance)
            )
            if gradient is not None and by_square is not None:
                gradient = gradient.addcmul_(x, by_square, value=2)
            others = [i for i in range(grad.dim()) if i != 1]
            return (
                None,
                None,
                gradient,
                by_weight,
                grad.sum(others) if to_bias else None,
                by_variance,
                to_total.sum(others) if to_bias_variance else None,
            )


def local_output(
    op: Map,
    x: Tensor,
    weights: tuple[Tensor, Tensor | None],
    variances: tuple[Tensor, Tensor],
    noise: Tensor | None = None,
) -> Tensor | None:
    """Draw y ~ N(op(x, weight, bias), op(x^2, *variances)) with gradients written by hand.

    Args:
        op: `linear` or a `Convolution`.
        x: the input.
        weights: the means of weight and bias, or None instead of the bias.
        variances: of weight and bias.
        noise: standard normal numbers in the shape of y. None draws them.

    Returns:
        y, or None if autograd has to do it: in a graph, in a transform, under autocast, for
        tensors of several types, and without gradients.

    Kingma, Salimans & Welling 2015, eq. 6.
    """
    traced = torch.compiler.is_compiling() or in_transform() or in_forward_mode()
    if traced or not (switch.enabled and torch.is_grad_enabled()):
        return None
    kinds = {(t.dtype, t.device) for t in (x, *weights, *variances, noise) if t is not None}
    if len(kinds) > 1 or x.dtype == torch.float16 or in_autocast(x.device.type):
        return None
    if is_sharded(weights[0]) or (op is not linear and not isinstance(op, Convolution)):
        return None
    if isinstance(op, Convolution) or x.dim() == 2:
        return _LocalOutput.apply(op, noise, x, *weights, *variances)
    rows = None if noise is None else noise.reshape(-1, noise.shape[-1])
    y = _LocalOutput.apply(op, rows, x.reshape(-1, x.shape[-1]), *weights, *variances)
    return y.view(*x.shape[:-1], y.shape[-1])
