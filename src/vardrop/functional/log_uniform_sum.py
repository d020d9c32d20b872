"""The exact KL to the log-uniform prior summed over float32 weights: few passes, in cache.

A pass over all weights is what time goes to, so the fits are shorter than those of `log_uniform`,
the variable is one that the weights give cheaply, and no log or exp is taken beyond sigma^2. With

    w = theta^2 / sigma^2,  d = sigma^2 + theta^2 / 7,  s = sigma^2 / d  in (0, 1],

    KL = 1/2 log1p(w R(s)),  dKL/dtheta = theta S(s) / d,  dKL/dlog sigma^2 = -theta/2 dKL/dtheta,

where R and S are quotients of polynomials. Largest relative error in float32: 1.6e-5 of the value
and 1.5e-5 of the gradient. `traced_kl` is the same as one expression, for a compiler to fuse.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vardrop.functional.blocks import blocks, scratch
from vardrop.functional.noise import log_square


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


def summed_kl(weight: Tensor, variance: Tensor) -> Tensor:
    """The sum of the KL over all weights."""
    total = _paired_kl(weight, variance)
    # The product of two ratios leaves float32 where both are beyond 1e19, and one beyond 1e38.
    return total if total.isfinite() else _logged_kl(weight, variance, variance.log()).sum()


def _logged_kl(weight: Tensor, variance: Tensor, log_variance: Tensor) -> Tensor:
    """The KL of every weight, from the logarithm of theta^2 / sigma^2, which may overflow."""
    s = variance / (variance + weight * weight * (1 / 7))
    one = torch.ones_like(s)
    log_ratio = _r().traced(s, one, one).log() + log_square(weight) - log_variance
    return 0.5 * functional.softplus(log_ratio)


def _paired_kl(weight: Tensor, variance: Tensor) -> Tensor:
    total, room, r = weight.new_zeros(()), scratch(weight, 3), _r()
    for w, v in blocks(weight, variance):
        ratio, s, below = (row[: len(w)] for row in room)
        torch.addcmul(v, w, w, value=1 / 7, out=below)
        torch.div(v, below, out=s)
        _polynomial(r.denominator, s, below).mul_(v)
        _polynomial(r.numerator, s, ratio).mul_(w).mul_(w).div_(below).mul_(r.factor)
        if len(w) % 2 == 0:
            # log1p is dear: log1p(a) + log1p(b) = log1p(a + b + a b), as precise.
            a, b = ratio.chunk(2)
            ratio = torch.addcmul(a, b, torch.add(a, 1, out=s[: len(a)]), out=a)
        total += ratio.log1p_().sum()
    return 0.5 * total


def add_kl_gradients(
    weight: Tensor, variance: Tensor, scale: float, to_weight: Tensor, to_variance: Tensor
) -> None:
    """Add scale dKL/dweight to `to_weight`; turn `to_variance` into that of log sigma^2, with KL.

    Both are written in place and lie in memory as `weight` does.
    """
    room, quotient = scratch(weight, 3), _s()
    scale *= quotient.factor
    for w, v, grad_w, grad_s in blocks(weight, variance, to_weight, to_variance):
        slope, s, below = (row[: len(w)] for row in room)
        torch.addcmul(v, w, w, value=1 / 7, out=slope)
        torch.div(v, slope, out=s)
        _polynomial(quotient.denominator, s, below).mul_(slope)
        _polynomial(quotient.numerator, s, slope).div_(below).mul_(w)
        grad_w.add_(slope, alpha=scale)
        grad_s.mul_(v).addcmul_(slope, w, value=-0.5 * scale)


def kl_gradients(weight: Tensor, variance: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """scale times dKL/dweight and dKL/dlog sigma^2, to be traced or differentiated."""
    below = variance + weight * weight * (1 / 7)
    slope = _s().traced(variance / below, weight * scale, below)
    return slope, -0.5 * slope * weight


class _TracedKL(torch.autograd.Function):
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
