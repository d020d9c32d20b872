"""KL(N(theta, sigma^2) || log-uniform): exact value, exact gradient and the papers' approximations.

With u = theta^2 / (2 sigma^2) = 1 / (2 alpha) and the constant chosen so that KL -> 0 as
alpha -> infinity,

    KL(u) = u 2F2(1, 1; 3/2, 2; -u),     dKL/du = D(sqrt u) / sqrt u,

where D is Dawson's function. Both are smooth in u >= 0, so neither needs log|theta|, and both are
finite at theta = 0. They are evaluated without branches from rational functions of
t = (u - 4) / (u + 4), which lies in [-1, 1):

    KL(u) = 1/2 log1p(u R(t)),     dKL/du = 4 / (u + 4) S(t).

R runs from 2 (u = 0) to 4 exp(gamma) (u -> infinity), S from 1 to 1/8. Largest relative error of
the fits against 40-digit arithmetic: float64 4e-10 (R) and 2e-10 (S); for float32 and narrower
types the shorter fits 3e-6 (R) and 2e-6 (S), which is where float32 rounding stands.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_SCALE = 4.0
# (numerator, denominator), lowest power first.
_Rational = tuple[tuple[float, ...], tuple[float, ...]]
_R_DOUBLE: _Rational = (
    (5.790304701740114, -13.723666826052701, 20.398560680736395, -11.052986757999424,
     4.724502518488598, 5.37519224447421, 3.425967696434598, 2.7677129566578746,
     4.663005884182553, 2.8523783353991514, 0.5570340000900049),
    (1.0, -2.8849189247134044, 5.462844477224577, -6.009393842394227,
     5.844987190973465, -3.194900141447489, 2.2764203155070764, 0.11465166965662288,
     0.5047705175502762, 0.4485380656202307, 0.055327078236557796),
)  # fmt: skip
_S_DOUBLE: _Rational = (
    (0.3013403889280994, -1.9966136819034515, 6.683852772171086, -14.450082718556162,
     22.090070926477605, -24.593223022500993, 19.978373709328825, -11.546638040458976,
     4.517342432207513, -1.065499066353095, 0.11610303469341002),
    (1.0, -5.262787964082669, 13.736839662019376, -22.395146655157948,
     25.270623824156264, -20.409500949898526, 12.118678854458276, -5.1601151235258005,
     1.629845772010519, -0.3019122570531872, 0.05368870940170003),
)  # fmt: skip
_R_SINGLE: _Rational = (
    (5.790322606, 1.033002261, 6.984443276, 6.487286337, 3.423381329, 0.5083194653),
    (1.0, -0.3363998011, 1.834506309, 0.04673055609, 0.9081722393, -0.05243453811),
)
_S_SINGLE: _Rational = (
    (0.301340781, -0.8731390195, 1.757120245, -1.957495053, 1.552727919, -0.638970837,
     0.1233349853),
    (1.0, -1.534514372, 2.469162596, -1.03351986, 1.098900687, 0.02563887677, 0.09368090681),
)  # fmt: skip
_ASYMPTOTE = 0.5 * (0.5772156649015329 + math.log(2.0))  # KL -> -1/2 log alpha + this
_SIGMOID = (0.63576, 1.87320, 1.48695)
_CUBIC = (1.16145124, -1.50204118, 0.58629921)


def _horner(coefficients: tuple[float, ...], t: Tensor) -> Tensor:
    value = t * coefficients[-1] + coefficients[-2]
    if torch.is_grad_enabled():
        for c in coefficients[-3::-1]:
            value = value * t + c
    else:  # no graph to protect: half the memory traffic
        for c in coefficients[-3::-1]:
            value.mul_(t).add_(c)
    return value


def _ratio(fit: _Rational, t: Tensor) -> Tensor:
    return _horner(fit[0], t) / _horner(fit[1], t)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _value(u: Tensor) -> Tensor:
    fit = _R_DOUBLE if u.dtype == torch.float64 else _R_SINGLE
    t = 1 - 2 * _SCALE / (u + _SCALE)
    return 0.5 * torch.log1p(u * _ratio(fit, t))


def _slope(u: Tensor) -> Tensor:
    fit = _S_DOUBLE if u.dtype == torch.float64 else _S_SINGLE
    s = _SCALE / (u + _SCALE)
    return s * _ratio(fit, 1 - 2 * s)


class _LogUniformKL(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        return _value(u)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return grad * _slope(u)


class _AdditiveLogUniformKL(torch.autograd.Function):
    """The sum over all weights, with both gradients from one evaluation of the slope."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, log_sigma2: Tensor) -> Tensor:
        return _value(0.5 * weight.square() * torch.exp(-log_sigma2)).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        weight, log_sigma2 = ctx.saved_tensors
        scaled = weight * torch.exp(-log_sigma2)
        u = 0.5 * weight * scaled
        slope = grad * _slope(u)
        return slope * scaled, -slope * u


def log_uniform_kl(u: Tensor) -> Tensor:
    """Exact KL to the log-uniform prior, elementwise, as a function of u = 1 / (2 alpha) >= 0.

    KL(u) = u 2F2(1, 1; 3/2, 2; -u); its gradient is D(sqrt u) / sqrt u.

    >>> import torch
    >>> log_uniform_kl(torch.tensor([0.0, 0.5], dtype=torch.float64))
    tensor([0.0000, 0.4267], dtype=torch.float64)

    Hron, Matthews & Ghahramani 2018, "Variational Bayesian dropout: pitfalls and fixes", sec. 4.
    """
    return _LogUniformKL.apply(_wide(u))  # type: ignore[no-any-return, no-untyped-call]


def log_uniform_kl_additive(weight: Tensor, log_sigma2: Tensor) -> Tensor:
    """Exact KL of N(weight, exp(log_sigma2)) to the log-uniform prior, summed over all weights.

    dKL/dweight = sqrt(2)/sigma D(x), dKL/dlog_sigma2 = -x D(x) with x = weight / (sqrt(2) sigma).

    >>> import torch
    >>> log_uniform_kl_additive(torch.zeros(3), torch.full((3,), -10.0))
    tensor(0.)
    """
    return _AdditiveLogUniformKL.apply(_wide(weight), _wide(log_sigma2))  # type: ignore[no-any-return, no-untyped-call]


def dawson(x: Tensor) -> Tensor:
    """Dawson's function D(x) = exp(-x^2) int_0^x exp(t^2) dt, elementwise.

    >>> import torch
    >>> dawson(torch.tensor(1.0, dtype=torch.float64))
    tensor(0.5381, dtype=torch.float64)
    """
    x = _wide(x)
    return x * _slope(x * x)


def log_uniform_kl_sigmoid(log_alpha: Tensor) -> Tensor:
    """Sigmoid fit: k1 sigmoid(-(k2 + k3 log_alpha)) + 1/2 softplus(-log_alpha).

    At most 0.0094 away from the exact KL.

    >>> import torch
    >>> log_uniform_kl_sigmoid(torch.tensor(0.0))
    tensor(0.4313)

    Molchanov, Ashukha & Vetrov 2017, "Variational dropout sparsifies deep neural networks", eq. 14.
    """
    k1, k2, k3 = _SIGMOID
    return k1 * torch.sigmoid(-(k2 + k3 * log_alpha)) + 0.5 * torch.nn.functional.softplus(
        -log_alpha
    )


def log_uniform_kl_cubic(log_alpha: Tensor) -> Tensor:
    """Cubic fit -(1/2 log_alpha + c1 alpha + c2 alpha^2 + c3 alpha^3) + const, for alpha <= 1 only.

    At most 0.041 away from the exact KL for alpha <= 1; useless above.

    >>> import torch
    >>> log_uniform_kl_cubic(torch.tensor(0.0))
    tensor(0.3895)

    Kingma, Salimans & Welling 2015, "Variational dropout and the local reparameterization trick",
    eq. 14.
    """
    c1, c2, c3 = _CUBIC
    alpha = log_alpha.exp()
    return _ASYMPTOTE - 0.5 * log_alpha - alpha * (c1 + alpha * (c2 + alpha * c3))


def log_uniform_kl_bound(log_alpha: Tensor) -> Tensor:
    """The bound -1/2 log_alpha + (gamma + log 2) / 2, above the exact KL for alpha <= 2.42.

    >>> import torch
    >>> log_uniform_kl_bound(torch.tensor(0.0))
    tensor(0.6352)

    Kingma, Salimans & Welling 2015, appendix C.
    """
    return _ASYMPTOTE - 0.5 * log_alpha
