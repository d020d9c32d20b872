"""Kernels for float32 weights with additive Gaussian noise on a CPU: few passes, in cache.

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
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.torch_private import (
    FunctionContext,
    in_checkpoint,
    in_forward_mode,
    in_transform,
)
from vardrop.functional.elementwise import log_square
from vardrop.functional.fast import switch

_BLOCK = 1 << 16  # numbers that stay in the cache
_PLAIN = (Tensor, nn.Parameter)
_LIMIT = 80.0  # of |log sigma^2|, beyond which quotients leave single precision


def can_block(*tensors: Tensor) -> bool:
    """Whether tensors can be processed in blocks: plain float32 tensors on a CPU, without tracing.

    A trace needs one expression, transforms cannot write into scratch memory, float64 needs more
    precision, and values written into a view of a tensor subclass (a sharded one) may be lost.
    """
    if torch.compiler.is_compiling() or in_transform() or not switch.enabled:
        return False
    for x in tensors:  # a generator expression would be slower
        if type(x) not in _PLAIN or x.dtype != torch.float32 or not x.is_cpu:
            return False
    return not in_forward_mode()


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


def _like_layout(x: Tensor, like: Tensor) -> Tensor:
    """Return x in the memory order of `like`, without a copy if it already has that order."""
    last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
    channels_last = last and not like.is_contiguous()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return x.contiguous(memory_format=layout)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat blocks of tensors of one shape, in the memory order of the first.

    A tensor is written through its blocks only if `_like_layout` leaves it unchanged.
    """
    if all(x.is_contiguous() for x in tensors):
        return zip(*(x.view(-1).split(_BLOCK) for x in tensors), strict=True)
    ordered = [_like_layout(x, tensors[0]) for x in tensors]
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
    torch.add(s, coefficients[-1], out=out)
    for c in coefficients[-2::-1]:
        torch.addcmul(_constant(c), out, s, out=out)
    return out


def _variance(log_sigma2: Tensor) -> Tensor:
    # Literals, because a compiler with dynamic shapes makes variables of global floats.
    return log_sigma2.clamp(-80.0, 80.0).exp()


def _kl_from_logs(weight: Tensor, variance: Tensor, log_variance: Tensor) -> Tensor:
    """The KL of each weight, from the logarithm of theta^2 / sigma^2, which itself may overflow."""
    s = variance / (variance + weight * weight * (1 / 7))
    log_ratio = _divide(_r(), s).log() + log_square(weight) - log_variance
    return 0.5 * functional.softplus(log_ratio)


def _add_kl_gradients(
    weight: Tensor, variance: Tensor, scale: float, to_weight: Tensor, to_variance: Tensor
) -> None:
    """Add scale dKL/dweight to `to_weight`, and make `to_variance` the gradient of log sigma^2.

    Both are changed in place and have the memory layout of `weight`.
    """
    scratch = weight.new_empty(3, min(_BLOCK, weight.numel()))
    scale *= _S.factor
    for w, v, grad_w, grad_s in _blocks(weight, variance, to_weight, to_variance):
        slope, s, below = scratch[:, : len(w)]
        torch.addcmul(v, w, w, value=1 / 7, out=slope)
        torch.div(v, slope, out=s)
        _polynomial(_S.denominator, s, below).mul_(slope)
        _polynomial(_S.numerator, s, slope).div_(below).mul_(w)
        grad_w.add_(slope, alpha=scale)
        grad_s.mul_(v).addcmul_(slope, w, value=-0.5 * scale)


def _kl_gradients(weight: Tensor, variance: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """scale times dKL/dweight and dKL/dlog sigma^2, as expressions for a compiler or autograd."""
    below = variance + weight * weight * (1 / 7)
    slope = _divide(_s(), variance / below) * (weight * scale) / below
    return slope, -0.5 * slope * weight


class _CompiledKL(torch.autograd.Function):
    """Elementwise on float32 tensors, which autocast leaves unchanged on any device."""

    @staticmethod
    def forward(weight: Tensor, log_sigma2: Tensor, value: bool) -> Tensor:
        if not value:
            return weight.new_zeros(())
        return _kl_from_logs(weight, _variance(log_sigma2), log_sigma2).sum()

    @staticmethod
    def setup_context(
        ctx: FunctionContext, inputs: tuple[Tensor, Tensor, bool], output: Tensor
    ) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, log_sigma2 = ctx.saved_tensors
        return *_kl_gradients(weight, _variance(log_sigma2), grad), None


def compiled_kl(weight: Tensor, log_sigma2: Tensor, value: bool = True) -> Tensor:
    """The KL of float32 weights, summed, without blocks. With `value=False` it is zero."""
    return _CompiledKL.apply(weight, log_sigma2, value)


class AdditiveWeights(NamedTuple):
    """The mean and the variance of weights, and a zero with the gradient of their KL.

    Use the tensors in products only, because the backward pass writes into their gradients.

    Args:
        mean: of the weights.
        variance: of the weights.
        kl_gradient: a zero with the gradient of the KL.
    """

    mean: Tensor
    variance: Tensor
    kl_gradient: Tensor

    def kl(self, value: bool = True) -> Tensor:
        """The exact KL to the log-uniform prior, summed.

        Args:
            value: with False the result is zero, and only its gradient is exact.

        Returns:
            A tensor without axes.
        """
        if not value:
            return self.kl_gradient
        weight, variance = self.mean.detach(), self.variance.detach()
        total = weight.new_zeros(())
        scratch = weight.new_empty(3, min(_BLOCK, weight.numel()))
        for w, v in _blocks(weight, variance):
            ratio, s, below = scratch[:, : len(w)]
            torch.addcmul(v, w, w, value=1 / 7, out=below)
            torch.div(v, below, out=s)
            _polynomial(_R.denominator, s, below).mul_(v)
            _polynomial(_R.numerator, s, ratio).mul_(w).mul_(w).div_(below).mul_(_R.factor)
            if len(w) % 2 == 0:
                # log1p is expensive: log1p(a) + log1p(b) = log1p(a + b + a b), as precise.
                a, b = ratio.chunk(2)
                ratio = torch.addcmul(a, b, torch.add(a, 1, out=s[: len(a)]), out=a)
            total += ratio.log1p_().sum()
        # The product of two ratios leaves float32 if both are beyond 1e19, and one beyond 1e38.
        if not total.isfinite():
            return self.kl_gradient + _kl_from_logs(weight, variance, variance.log()).sum()
        return self.kl_gradient + 0.5 * total


class _AdditiveWeights(torch.autograd.Function):
    """Collects the gradients of all draws and of the KL, with one pass over the weights.

    It is elementwise on float32 tensors, which autocast leaves unchanged.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext, weight: Tensor, log_sigma2: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        variance = log_sigma2.exp()
        ctx.save_for_backward(weight, variance)
        ctx.set_materialize_grads(False)
        return weight.detach(), variance, weight.new_zeros(())

    @staticmethod
    def backward(
        ctx: FunctionContext,
        to_mean: Tensor | None,
        to_variance: Tensor | None,
        to_kl: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        weight, variance = ctx.saved_tensors
        if to_kl is None:
            return to_mean, None if to_variance is None else to_variance * variance
        if torch.is_grad_enabled():  # a second derivative needs expressions without in-place writes
            to_weight, to_log_sigma2 = _kl_gradients(weight, variance, to_kl)
            return (
                to_weight if to_mean is None else to_mean + to_weight,
                to_log_sigma2 if to_variance is None else to_variance * variance + to_log_sigma2,
            )
        to_mean, to_variance = (
            _like_layout(torch.zeros_like(weight) if grad is None else grad, weight)
            for grad in (to_mean, to_variance)
        )
        _add_kl_gradients(weight, variance, float(to_kl), to_mean, to_variance)
        return to_mean, to_variance


def additive_weights(weight: Tensor, log_sigma2: Tensor) -> AdditiveWeights | None:
    """Compute what draws and the KL of N(weight, exp(log_sigma2)) have in common.

    Returns:
        None if the tensors cannot be processed in blocks, or if sigma^2 or its quotients are not
        normal numbers of single precision.
    """
    if not can_block(weight, log_sigma2):
        return None
    low, high = torch.aminmax(log_sigma2.detach())
    if not (low > -_LIMIT and high < _LIMIT):
        return None
    return AdditiveWeights(*_AdditiveWeights.apply(weight, log_sigma2))


class _Step(threading.local):
    """Tensors that the training step of this thread has computed. None outside of a step."""

    computed: dict[tuple[int, int], tuple[Tensor, Tensor, AdditiveWeights]] | None = None


_step = _Step()


@contextmanager
def share_in_step() -> Iterator[None]:
    """Compute what the draws and the KL of one training step have in common only once.

    Weights must not change inside.
    """
    before, _step.computed = _step.computed, {}
    try:
        yield
    finally:
        _step.computed = before


def shared_weights(weight: Tensor, log_sigma2: Tensor) -> AdditiveWeights | None:
    """Return `additive_weights`, once per step inside `share_in_step`, or None outside of it.

    A pass without gradients uses stored tensors but stores none, because a later pass with
    gradients would use them. Activation checkpointing runs the layer again after the step.

    Args:
        weight: the means.
        log_sigma2: the log variances.

    Returns:
        The shared tensors, or None.
    """
    if _step.computed is None or in_checkpoint():
        return None
    key = id(weight), id(log_sigma2)
    if key not in _step.computed:
        weights = additive_weights(weight, log_sigma2) if torch.is_grad_enabled() else None
        if weights is None:
            return None
        _step.computed[key] = weight, log_sigma2, weights  # the tensors keep their ids
    return _step.computed[key][2]
