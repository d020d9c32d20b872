"""Kernels for float32 weights with additive Gaussian noise on a CPU: few passes, in cache.

A pass over all weights is what time goes to, so tensors are taken in flat blocks that stay in the
cache while many operations pass over them, and a training step derives all that it needs from the
weights at once. The exact KL to the log-uniform prior has shorter fits than those of `log_uniform`,
in a variable that the weights give cheaply, and no log or exp is taken beyond sigma^2. With

    w = theta^2 / sigma^2,  d = sigma^2 + theta^2 / 7,  s = sigma^2 / d  in (0, 1],

    KL = 1/2 log1p(w R(s)),  dKL/dtheta = theta S(s) / d,  dKL/dlog sigma^2 = -theta/2 dKL/dtheta,

where R and S are quotients of polynomials. Largest relative error in float32: 1.6e-5 of the value
and 1.5e-5 of the gradient. `traced_kl` is the same as one expression, for a compiler to fuse.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.torch_private import in_checkpoint, in_forward_mode, in_transform
from vardrop.functional.elementwise import log_square
from vardrop.functional.fast import switch

_BLOCK = 1 << 16  # numbers that stay in the cache
_PLAIN = (Tensor, nn.Parameter)


def can_block(*tensors: Tensor) -> bool:
    """Whether tensors may be worked on in blocks: plain float32 ones on a CPU, nothing traced.

    A trace wants one expression, transforms cannot write into scratch, float64 wants precision,
    and what is written into a view of a tensor subclass (a sharded one) may be lost.
    """
    if torch.compiler.is_compiling() or in_transform() or not switch.enabled:
        return False
    for x in tensors:  # a generator would cost more than what it asks
        if type(x) not in _PLAIN or x.dtype != torch.float32 or not x.is_cpu:
            return False
    return not in_forward_mode()


def keep_layout(x: Tensor, like: Tensor) -> Tensor:
    """x, derived from `like`, in the memory layout of `like`.

    With one channel two layouts have the same strides, and torch may pick the other one. A
    convolution goes by the layout of its arguments, and sums of two layouts are slow.
    """
    if x.dim() == 4 and x.shape[1] == 1 and like.stride(1) == 1 != x.stride(1):
        return x.squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2)
    return x


def _like_layout(x: Tensor, like: Tensor) -> Tensor:
    """x with its elements in memory in the order of `like`; x itself if they are so already."""
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
    """factor P / Q; the coefficients go from the lowest power up, and the highest is 1."""

    factor: float
    numerator: tuple[float, ...]
    denominator: tuple[float, ...]

    def traced(self, s: Tensor, above: Tensor, below: Tensor) -> Tensor:
        """factor P above / (Q below) as one expression with one division."""
        p, q = (
            functools.reduce(
                lambda value, c: value * s + c, coefficients[-2::-1], s + coefficients[-1]
            )
            for coefficients in (self.numerator, self.denominator)
        )
        return p * above * self.factor / (q * below)


# Numbers stand inside functions: a compiler with dynamic shapes makes variables of global floats.
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


_R, _S = _r(), _s()  # for blocks, which are not traced


@functools.cache
def _constant(c: float) -> Tensor:
    return torch.tensor(c, dtype=torch.float32, device="cpu")


def _polynomial(coefficients: tuple[float, ...], s: Tensor, out: Tensor) -> Tensor:
    torch.add(s, coefficients[-1], out=out)
    for c in coefficients[-2::-1]:
        torch.addcmul(_constant(c), out, s, out=out)
    return out


def is_in_range(log_sigma2: Tensor) -> bool:
    """Whether sigma^2 and its quotients are normal numbers of single precision."""
    low, high = torch.aminmax(log_sigma2.detach())
    return bool(low > -80.0) and bool(high < 80.0)


def _in_range(log_sigma2: Tensor) -> Tensor:
    return log_sigma2.clamp(-80.0, 80.0)


def _logged_kl(weight: Tensor, variance: Tensor, log_variance: Tensor) -> Tensor:
    """The KL of every weight, from the logarithm of theta^2 / sigma^2, which may overflow."""
    s = variance / (variance + weight * weight * (1 / 7))
    one = torch.ones_like(s)
    log_ratio = _r().traced(s, one, one).log() + log_square(weight) - log_variance
    return 0.5 * functional.softplus(log_ratio)


def summed_kl(weight: Tensor, variance: Tensor) -> Tensor:
    """The sum of the KL over all weights."""
    total = weight.new_zeros(())
    room = weight.new_empty(3, min(_BLOCK, weight.numel()))
    for w, v in _blocks(weight, variance):
        ratio, s, below = room[:, : len(w)]
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
        return _logged_kl(weight, variance, variance.log()).sum()
    return 0.5 * total


def add_kl_gradients(
    weight: Tensor, variance: Tensor, scale: float, to_weight: Tensor, to_variance: Tensor
) -> None:
    """Add scale dKL/dweight to `to_weight`; turn `to_variance` into that of log sigma^2, with KL.

    Both are written in place and lie in memory as `weight` does.
    """
    room = weight.new_empty(3, min(_BLOCK, weight.numel()))
    scale *= _S.factor
    for w, v, grad_w, grad_s in _blocks(weight, variance, to_weight, to_variance):
        slope, s, below = room[:, : len(w)]
        torch.addcmul(v, w, w, value=1 / 7, out=slope)
        torch.div(v, slope, out=s)
        _polynomial(_S.denominator, s, below).mul_(slope)
        _polynomial(_S.numerator, s, slope).div_(below).mul_(w)
        grad_w.add_(slope, alpha=scale)
        grad_s.mul_(v).addcmul_(slope, w, value=-0.5 * scale)


def kl_gradients(weight: Tensor, variance: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """scale times dKL/dweight and dKL/dlog sigma^2, to be traced or differentiated."""
    below = variance + weight * weight * (1 / 7)
    slope = _s().traced(variance / below, weight * scale, below)
    return slope, -0.5 * slope * weight


class _TracedKL(torch.autograd.Function):
    """Autocast, on any device: elementwise on float32 tensors, which it leaves as they are."""

    @staticmethod
    def forward(weight: Tensor, log_sigma2: Tensor, value: bool) -> Tensor:
        if not value:
            return weight.new_zeros(())
        return _logged_kl(weight, _in_range(log_sigma2).exp(), log_sigma2).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, log_sigma2 = ctx.saved_tensors
        return *kl_gradients(weight, _in_range(log_sigma2).exp(), grad), None


def traced_kl(weight: Tensor, log_sigma2: Tensor, value: bool = True) -> Tensor:
    """The sum of the KL of float32 weights, without blocks; zero in its place for `value=False`."""
    return _TracedKL.apply(weight, log_sigma2, value)


class AdditiveWeights(NamedTuple):
    """The mean and the variance of weights, and a zero whose gradient is that of their KL.

    The tensors are for products alone: their gradients are taken over and written into.
    """

    mean: Tensor
    variance: Tensor
    kl_gradient: Tensor

    def kl(self, value: bool = True) -> Tensor:
        """The exact KL to the log-uniform prior, summed; zero in its place for `value=False`."""
        if not value:
            return self.kl_gradient
        return self.kl_gradient + summed_kl(self.mean.detach(), self.variance.detach())


class _AdditiveWeights(torch.autograd.Function):
    """Gathers the gradients of all draws and of the KL, and passes over the weights once.

    Autocast: for CPUs only; elementwise on float32 tensors, which it leaves as they are.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, log_sigma2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        variance = log_sigma2.exp()
        ctx.save_for_backward(weight, variance)
        ctx.set_materialize_grads(False)
        return weight.detach(), variance, weight.new_zeros(())

    @staticmethod
    def backward(
        ctx: Any, to_mean: Tensor | None, to_variance: Tensor | None, to_kl: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        weight, variance = ctx.saved_tensors
        if to_kl is None:
            return to_mean, None if to_variance is None else to_variance * variance
        if torch.is_grad_enabled():  # a second derivative needs expressions, not what is written
            to_weight, to_log_sigma2 = kl_gradients(weight, variance, to_kl)
            return (
                to_weight if to_mean is None else to_mean + to_weight,
                to_log_sigma2 if to_variance is None else to_variance * variance + to_log_sigma2,
            )
        to_mean, to_variance = (
            _like_layout(torch.zeros_like(weight) if grad is None else grad, weight)
            for grad in (to_mean, to_variance)
        )
        add_kl_gradients(weight, variance, float(to_kl), to_mean, to_variance)
        return to_mean, to_variance


def can_share(weight: Tensor, log_sigma2: Tensor) -> bool:
    """Whether `additive_weights` may be used: `can_block` of both, and variances in range."""
    return can_block(weight, log_sigma2) and is_in_range(log_sigma2)


def additive_weights(weight: Tensor, log_sigma2: Tensor) -> AdditiveWeights:
    """What draws and the KL of N(weight, exp(log_sigma2)) share; needs `can_share`."""
    return AdditiveWeights(*_AdditiveWeights.apply(weight, log_sigma2))


def blocked_kl(weight: Tensor, log_sigma2: Tensor, value: bool = True) -> Tensor:
    """The KL of N(weight, exp(log_sigma2)) to the log-uniform prior; needs `can_share`."""
    return additive_weights(weight, log_sigma2).kl(value)


class _Step(threading.local):
    """What the training step of this thread has computed; None outside of a step."""

    found: dict[tuple[int, int], tuple[Tensor, Tensor, AdditiveWeights]] | None = None


_step = _Step()


@contextmanager
def share_in_step() -> Iterator[None]:
    """For the draws and the KL of one training step: what they have in common is computed once.

    Weights must not change inside.
    """
    before, _step.found = _step.found, {}
    try:
        yield
    finally:
        _step.found = before


def shared_weights(weight: Tensor, log_sigma2: Tensor) -> AdditiveWeights | None:
    """`additive_weights`, once per step inside `share_in_step`; None where nothing may be shared.

    What runs without a gradient finds what is there and leaves nothing there, or the pass that
    learns would find it. Activation checkpointing runs the layer again when the step is over.
    """
    if _step.found is None or not can_block(weight, log_sigma2) or in_checkpoint():
        return None
    key = id(weight), id(log_sigma2)
    if key not in _step.found and torch.is_grad_enabled() and is_in_range(log_sigma2):
        _step.found[key] = weight, log_sigma2, additive_weights(weight, log_sigma2)
    return _step.found[key][2] if key in _step.found else None
