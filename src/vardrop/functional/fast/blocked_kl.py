"""KL of float32 weights with additive Gaussian noise on a CPU: few passes, in cache.

Memory bandwidth limits these operations. Tensors are therefore processed in flat blocks that stay
in the cache during many operations, and a training step computes everything it needs from the
weights at once. The exact KL to the log-uniform prior uses short fits in a variable that is cheap
to compute, without a log or exp other than sigma^2. With

    w = theta^2 / sigma^2,  d = sigma^2 + theta^2 / 7,  s = sigma^2 / d  in (0, 1],

    KL = 1/2 log1p(w R(s)),  dKL/dtheta = theta S(s) / d,  dKL/dlog sigma^2 = -theta/2 dKL/dtheta,

and R and S are quotients of polynomials. The largest relative error in float32 is 1.6e-5 for the
value and 1.5e-5 for the gradient. `compiled_kl` is the same as one expression, which a compiler can
fuse.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vardrop._core.torch_private import FunctionContext
from vardrop.functional.elementwise import log_square

_BLOCK = 1 << 16  # numbers that stay in the cache


def keep_layout(x: Tensor, like: Tensor) -> Tensor:
    """Return x, which was computed from `like`, in the memory layout of `like`.

    With one channel two layouts have the same strides, and torch may pick the other one. A
    convolution follows the layout of its arguments, and sums of two layouts are slow.

    Args:
        x: a tensor with the shape of `like`.
        like: the tensor with the memory layout.

    Returns:
        x, or a view of it.
    """
    if x.dim() == 4 and x.shape[1] == 1 and like.stride(1) == 1 != x.stride(1):
        return x.squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2)
    return x


def like_layout(x: Tensor, like: Tensor) -> Tensor:
    """Return x in the memory order of `like`, without a copy if it already has that order."""
    last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
    channels_last = last and not like.is_contiguous()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return x.contiguous(memory_format=layout)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat blocks of tensors of one shape, in the memory order of the first.

    A tensor is written through its blocks only if `like_layout` leaves it unchanged.
    """
    if all(x.is_contiguous() for x in tensors):
        if tensors[0].numel() <= _BLOCK:  # a split would take longer than an operation
            return iter([tuple(x.view(-1) for x in tensors)])
        return zip(*(x.view(-1).split(_BLOCK) for x in tensors), strict=True)
    ordered = [like_layout(x, tensors[0]) for x in tensors]
    flat = ((x if x.is_contiguous() else x.permute(0, 2, 3, 1)).view(-1) for x in ordered)
    return zip(*(x.split(_BLOCK) for x in flat), strict=True)


class _Quotient(NamedTuple):
    """factor P / Q. Coefficients go from the lowest power up, without the highest, which is 1."""

    factor: float
    numerator: tuple[float, ...]
    denominator: tuple[float, ...]


def _divide(quotient: _Quotient, s: Tensor) -> Tensor:
    """The quotient at s as one expression. The compiler of torch 2.9 cannot trace a method."""
    p, q = (
        functools.reduce(lambda total, c: total * s + c, coefficients[-2::-1], s + coefficients[-1])
        for coefficients in (quotient.numerator, quotient.denominator)
    )
    return p * quotient.factor / q


# Numbers are inside functions, because a compiler with dynamic shapes makes variables of globals.
def _r() -> _Quotient:
    return _Quotient(
        1.4454921986806746,
        (0.9538582997, -2.505154835, 4.292858356, -3.241262445),
        (0.3871324007, -0.9498811111, 1.706463754, -1.420547327),
    )


def _s() -> _Quotient:
    return _Quotient(
        0.573743565708943,
        (0.05169306891, -0.1409734211, 0.2814082948, -0.01561548416, -0.1953875884),
        (0.2076121169, -0.8040137513, 1.789775485, -1.630468041),
    )


_R, _S = _r(), _s()  # for blocks, which no compiler traces


@functools.cache
def _constant(c: float) -> Tensor:
    return torch.tensor(c, dtype=torch.float32, device="cpu")


def _polynomial(coefficients: tuple[float, ...], s: Tensor, out: Tensor) -> Tensor:
    torch.add(s, _constant(coefficients[-1]), out=out)  # a number would be converted each time
    for c in coefficients[-2::-1]:
        torch.addcmul(_constant(c), out, s, out=out)
    return out


_OfBlock = Callable[[Tensor, Tensor, Tensor], Tensor]  # weight, variance, three blocks of scratch


@dataclass(frozen=True, eq=False)
class RatioKL:
    """KL = 1/2 log1p(ratio). The ratio depends on theta^2 / sigma^2 alone.

    So dKL/dlog sigma^2 = -theta/2 dKL/dtheta. The slope of a block is dKL/dtheta / factor.
    """

    ratio: _OfBlock
    slope: _OfBlock
    expression: Callable[..., Tensor]
    factor: float = 1.0
    hyper: tuple[Tensor, ...] = ()

    def value(self, weight: Tensor, variance: Tensor, log_sigma2: Tensor) -> Tensor:
        total = weight.new_zeros(())
        scratch = weight.new_empty(3, min(_BLOCK, weight.numel()))
        for w, v in _blocks(weight, variance):
            ratio = self.ratio(w, v, scratch[:, : w.numel()])
            while ratio.numel() % 2 == 0 and 4 * ratio.numel() > w.numel():
                # log1p is expensive: log1p(a) + log1p(b) = log1p(a + b + a b), as precise.
                a, b = ratio.view(2, -1)
                ratio = torch.addcmul(a, b, torch.add(a, 1, out=scratch[1, : a.numel()]), out=a)
            total += ratio.log1p_().sum()
        # The product of four ratios leaves float32 if all are beyond 1e9, and one beyond 1e38.
        if not math.isfinite(float(total)):
            return self.expression(weight, log_sigma2)
        return total.mul_(0.5)

    def add_gradients(
        self, weight: Tensor, variance: Tensor, scale: float, to_weight: Tensor, to_variance: Tensor
    ) -> tuple[Tensor, ...]:
        scratch = weight.new_empty(3, min(_BLOCK, weight.numel()))
        scale *= self.factor
        for w, v, grad_w, grad_s in _blocks(weight, variance, to_weight, to_variance):
            slope = self.slope(w, v, scratch[:, : w.numel()])
            grad_w.add_(slope, alpha=scale)
            grad_s.mul_(v).addcmul_(slope, w, value=-0.5 * scale)
        return ()


def _log_uniform_ratio(w: Tensor, v: Tensor, scratch: Tensor) -> Tensor:
    ratio, s, below = scratch
    torch.addcmul(v, w, w, value=1 / 7, out=below)
    torch.div(v, below, out=s)
    _polynomial(_R.denominator, s, below).mul_(v)
    _polynomial(_R.numerator, s, ratio).mul_(w).mul_(w)
    return torch.addcdiv(_constant(0.0), ratio, below, value=_R.factor, out=ratio)


def _log_uniform_slope(w: Tensor, v: Tensor, scratch: Tensor) -> Tensor:
    slope, s, below = scratch
    torch.addcmul(v, w, w, value=1 / 7, out=slope)
    torch.div(v, slope, out=s)
    _polynomial(_S.denominator, s, below).mul_(slope)
    return _polynomial(_S.numerator, s, slope).div_(below).mul_(w)


def _ard_ratio(w: Tensor, v: Tensor, scratch: Tensor) -> Tensor:
    return torch.mul(w, w, out=scratch[0]).div_(v)


def _ard_slope(w: Tensor, v: Tensor, scratch: Tensor) -> Tensor:
    return torch.addcdiv(w, v, w, out=scratch[0]).reciprocal_()  # w^2 might overflow


def ratio_parts(weight: Tensor, log_sigma2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """w^2 / sigma^2 up to exp(25) and zero beyond, its logarithm beyond, and a mask of the latter.

    The first part has every derivative at w = 0, which the logarithm does not have.
    """
    log_ratio = log_square(weight) - log_sigma2
    beyond = log_ratio > 25.0
    least = -1.8 * math.log(torch.finfo(weight.dtype).max)  # the root of 1 / sigma^2 is finite
    root = torch.where(beyond, 0.0, weight) * torch.exp(-0.5 * log_sigma2.clamp(min=least))
    return root * root, torch.where(beyond, log_ratio, 0.0), beyond


def _ard_expression(weight: Tensor, log_sigma2: Tensor) -> Tensor:
    ratio, log_beyond, _ = ratio_parts(weight, log_sigma2)
    return 0.5 * (torch.log1p(ratio) + log_beyond).sum()


class _CompiledKL(torch.autograd.Function):
    """Elementwise on float32 tensors, which autocast leaves unchanged on any device."""

    @staticmethod
    def forward(weight: Tensor, log_sigma2: Tensor, value: bool) -> Tensor:
        if not value:
            return weight.new_zeros(())
        # Literals, because a compiler with dynamic shapes makes variables of global floats.
        variance = log_sigma2.clamp(-80.0, 80.0).exp()
        s = variance / (variance + weight * weight * (1 / 7))
        # The logarithm of theta^2 / sigma^2, which itself may overflow.
        log_ratio = _divide(_r(), s).log() + log_square(weight) - log_sigma2
        return 0.5 * functional.softplus(log_ratio).sum()

    @staticmethod
    def setup_context(
        ctx: FunctionContext, inputs: tuple[Tensor, Tensor, bool], output: Tensor
    ) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, log_sigma2 = ctx.saved_tensors
        variance = log_sigma2.clamp(-80.0, 80.0).exp()
        below = variance + weight * weight * (1 / 7)
        slope = _divide(_s(), variance / below) * (weight * grad) / below
        return slope, -0.5 * slope * weight, None


def compiled_kl(weight: Tensor, log_sigma2: Tensor, value: bool = True) -> Tensor:
    """The KL of float32 weights, summed, without blocks. With `value=False` it is zero."""
    return _CompiledKL.apply(weight, log_sigma2, value)


LOG_UNIFORM_KL = RatioKL(_log_uniform_ratio, _log_uniform_slope, compiled_kl, _S.factor)
ARD_KL = RatioKL(_ard_ratio, _ard_slope, _ard_expression)


class NormalKL:
    """The KL to N(location, scale^2).

        1/2 sum (sigma^2 + (theta - location)^2) / scale^2 - log sigma^2 - 1 + 2 log scale

    Args:
        location: in the shape of the weight, or with one number.
        scale: with one number.
    """

    def __init__(self, location: Tensor, scale: Tensor) -> None:
        self.location = location.view(1) if location.numel() == 1 else location
        self.scale, self.hyper = scale, (scale,)

    def _shifts(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Blocks of tensors, each preceded by the distances of the first from the location."""
        located = self.location.numel() > 1
        for block in _blocks(*tensors, *([self.location] if located else [])):
            yield block[0] - (block[-1] if located else self.location), *block[: len(tensors)]

    def value(self, weight: Tensor, variance: Tensor, log_sigma2: Tensor) -> Tensor:
        scale = self.scale.detach()
        squares, logs = torch.zeros_like(scale), torch.zeros_like(scale)
        for shift, _, v, log_v in self._shifts(weight, variance, log_sigma2):
            squares, logs = squares + v.sum() + torch.dot(shift, shift), logs + log_v.sum()
        constant = weight.numel() * (scale.log() - 0.5)
        return (0.5 * (squares / scale.square() - logs) + constant).sum()

    def add_gradients(
        self, weight: Tensor, variance: Tensor, scale: float, to_weight: Tensor, to_variance: Tensor
    ) -> tuple[Tensor, ...]:
        std, squares = self.scale, 0.0
        by_square = scale / float(std) ** 2
        blocks = self._shifts(weight, variance, to_weight, to_variance)
        for shift, _, v, grad_w, grad_s in blocks:
            grad_w.add_(shift, alpha=by_square)
            grad_s.add_(0.5 * by_square).mul_(v).sub_(0.5 * scale)
            if std.requires_grad:
                squares = squares + float(v.sum() + torch.dot(shift, shift))
        to_std = (scale * weight.numel() - by_square * squares) / float(std)
        return (torch.full_like(std, to_std),)

    def expression(self, weight: Tensor, log_sigma2: Tensor, scale: Tensor) -> Tensor:
        # `normal_kl` with the sums taken term by term: fewer passes over the weights.
        squares = log_sigma2.exp().sum() + (weight - self.location).square().sum()
        constant = weight.numel() * (scale.log() - 0.5)
        return (0.5 * (squares / scale.square() - log_sigma2.sum()) + constant).sum()


# The KL of N(weight, exp(log_sigma2)) to a prior, summed. Both classes have the same parts:
#
# - `hyper`: the tensors of the prior that may be learned.
# - `expression(weight, log_sigma2, *hyper)`: the KL for autograd, which is used for second
#   derivatives and for tensors that have no blocks.
# - `value(weight, variance, log_sigma2)`: the KL in blocks, without a gradient.
# - `add_gradients(weight, variance, scale, to_weight, to_variance)`: adds scale dKL/dweight to
#   `to_weight` and makes `to_variance` that of log sigma^2, both in place. Without axes they are
#   zeros, which get the shape of the weight. Returns the gradients of `hyper`.
BlockedKL = RatioKL | NormalKL
