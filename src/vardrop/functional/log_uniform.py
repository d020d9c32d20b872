"""KL(N(theta, sigma^2) || log-uniform): exact value, exact gradient and the papers' approximations.

With u = theta^2 / (2 sigma^2) = 1 / (2 alpha) and the constant chosen so that KL -> 0 as
alpha -> infinity,

    KL(u) = u 2F2(1, 1; 3/2, 2; -u),     dKL/du = D(sqrt u) / sqrt u,

where D is Dawson's function. Both are smooth in u >= 0, so neither needs log|theta|, and both are
finite at theta = 0. They are evaluated without branches from rational functions of
t = (u - 4) / (u + 4) in [-1, 1):

    KL(u) = 1/2 log1p(u R(t)),     dKL/du = 4 / (u + 4) S(t).

R runs from 2 (u = 0) to 4 exp(gamma) (u -> infinity), S from 1 to 1/8. The largest relative error
against 40-digit arithmetic is 4e-10 (R) and 2e-10 (S) in float64. Float32 and narrower types use
shorter fits with 6e-6 (R) and 1.5e-5 (S). Sums over float32 weights have the fits of `additive`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vardrop._core.torch_private import FunctionContext, in_forward_mode, in_transform
from vardrop.functional.elementwise import to_float32_or_wider
from vardrop.functional.fast import switch
from vardrop.functional.fast.additive import additive_weights
from vardrop.functional.fast.blocked_kl import ARD_KL, compiled_kl, ratio_parts

_ASYMPTOTE = 0.5 * (0.5772156649015329 + math.log(2.0))  # KL -> -1/2 log alpha + this
_SIGMOID = (0.63576, 1.87320, 1.48695)
_CUBIC = (1.16145124, -1.50204118, 0.58629921)

# (numerator, denominator), lowest power first.
_Rational = tuple[tuple[float, ...], tuple[float, ...]]


# Numbers are inside functions, because a compiler with dynamic shapes makes variables of globals.
def _r(double: bool) -> _Rational:
    if double:
        return (
            (5.790304701740114, -13.723666826052701, 20.398560680736395, -11.052986757999424,
             4.724502518488598, 5.37519224447421, 3.425967696434598, 2.7677129566578746,
             4.663005884182553, 2.8523783353991514, 0.5570340000900049),
            (1.0, -2.8849189247134044, 5.462844477224577, -6.009393842394227,
             5.844987190973465, -3.194900141447489, 2.2764203155070764, 0.11465166965662288,
             0.5047705175502762, 0.4485380656202307, 0.055327078236557796),
        )  # fmt: skip
    return (
        (5.790338038, 2.198702215, 7.825094295, 7.53301853, 4.121017788, 0.7349983329),
        (1.0, -0.1350613098, 1.876265195, 0.2969966275, 0.9205577939),
    )


def _s(double: bool) -> _Rational:
    if double:
        return (
            (0.3013403889280994, -1.9966136819034515, 6.683852772171086, -14.450082718556162,
             22.090070926477605, -24.593223022500993, 19.978373709328825, -11.546638040458976,
             4.517342432207513, -1.065499066353095, 0.11610303469341002),
            (1.0, -5.262787964082669, 13.736839662019376, -22.395146655157948,
             25.270623824156264, -20.409500949898526, 12.118678854458276, -5.1601151235258005,
             1.629845772010519, -0.3019122570531872, 0.05368870940170003),
        )  # fmt: skip
    return (
        (0.3013383973, -0.5911181835, 1.133042277, -0.9028514014, 0.540374829, -0.1180558375),
        (1.0, -0.5984663458, 1.672921088, 0.1880352264, 0.571382189, 0.06800680879),
    )


def _horner(coefficients: tuple[float, ...], t: Tensor) -> Tensor:
    total = t.new_full((), coefficients[-1])
    for c in coefficients[-2::-1]:
        total = torch.addcmul(t.new_full((), c), total, t)
    return total


def _slope(u: Tensor) -> Tensor:
    numerator, denominator = _s(u.dtype == torch.float64)
    s = 4 * (u + 4).reciprocal()
    t = 1 - 2 * s
    return s * (_horner(numerator, t) / _horner(denominator, t))


class _LogUniformKL(torch.autograd.Function):
    """Elementwise, in at least single precision, also under autocast."""

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        numerator, denominator = _r(u.dtype == torch.float64)
        t = 1 - 8 * (u + 4).reciprocal()
        return 0.5 * torch.log1p(u * (_horner(numerator, t) / _horner(denominator, t)))

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return grad * _slope(u)


class _ForwardLogUniformKL(_LogUniformKL):
    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Tensor], output: Tensor) -> None:
        _LogUniformKL.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: FunctionContext, tangent: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return tangent * _slope(u)


def log_uniform_kl(u: Tensor) -> Tensor:
    """Exact KL to the log-uniform prior, elementwise, as a function of u = 1 / (2 alpha) >= 0.

    KL(u) = u 2F2(1, 1; 3/2, 2; -u). Its gradient is D(sqrt u) / sqrt u.

    Args:
        u: 1 / (2 alpha).

    Returns:
        The KLs in nats.

    >>> import torch
    >>> log_uniform_kl(torch.tensor([0.0, 0.5], dtype=torch.float64))
    tensor([0.0000, 0.4267], dtype=torch.float64)

    Hron, Matthews & Ghahramani 2018, "Variational Bayesian dropout: pitfalls and fixes", sec. 4.
    """
    function = _ForwardLogUniformKL if in_forward_mode() else _LogUniformKL
    return function.apply(to_float32_or_wider(u))


def log_uniform_kl_of_log(log_alpha: Tensor) -> Tensor:
    """Exact KL to the log-uniform prior as a function of log alpha, elementwise.

    `log_uniform_kl` at u = 1 / (2 alpha). From u = exp(25) on it grows by log(u) / 2, to 1e-11,
    even if u itself would overflow.

    Args:
        log_alpha: log alpha.

    Returns:
        The KLs in nats.

    >>> import torch
    >>> log_uniform_kl_of_log(torch.tensor([0.0, -200.0]))
    tensor([  0.4267, 100.6352])
    """
    log_u = -to_float32_or_wider(log_alpha) - math.log(2)
    near, beyond = log_u.clamp(max=25.0).exp(), torch.relu(log_u - 25.0)
    return torch.add(log_uniform_kl(near), beyond, alpha=0.5)


def log_uniform_kl_additive(weight: Tensor, log_sigma2: Tensor, value: bool = True) -> Tensor:
    """Exact KL of N(weight, exp(log_sigma2)) to the log-uniform prior, summed over all weights.

    dKL/dweight = sqrt(2)/sigma D(x), dKL/dlog_sigma2 = -x D(x) with x = weight / (sqrt(2) sigma).

    Args:
        weight: the means.
        log_sigma2: the log variances, broadcastable to the weight.
        value: with False the result may be zero instead of the sum, with the same gradient.

    Returns:
        A tensor without axes.

    >>> import torch
    >>> log_uniform_kl_additive(torch.zeros(3), torch.full((3,), -10.0))
    tensor(0.)
    """
    weight, log_sigma2 = to_float32_or_wider(weight), to_float32_or_wider(log_sigma2)
    if (weights := additive_weights(weight, log_sigma2)) is not None:
        return weights.kl(value)
    # Without fast paths the same fits are used, so that both agree to 1e-5.
    one_expression = torch.compiler.is_compiling() or not switch.enabled
    transformed = in_transform() or in_forward_mode()
    if one_expression and weight.dtype == torch.float32 and not transformed:
        return compiled_kl(weight, log_sigma2, value)
    ratio, log_beyond, beyond = ratio_parts(weight, log_sigma2)
    far = torch.where(beyond, 0.5 * log_beyond + _ASYMPTOTE, 0.0)
    return (log_uniform_kl(0.5 * ratio) + far).sum()


def ard_kl_additive(weight: Tensor, log_sigma2: Tensor) -> Tensor:
    """KL of N(weight, exp(log_sigma2)) to the best normal prior of every weight, summed.

    1/2 log(1 + w^2 / sigma^2) per weight.

    Args:
        weight: the means.
        log_sigma2: the log variances, broadcastable to the weight.

    Returns:
        A tensor without axes.

    >>> import torch
    >>> ard_kl_additive(torch.ones(2), torch.zeros(2))
    tensor(0.6931)

    Kharitonov, Molchanov & Vetrov 2018, "Variational dropout via empirical Bayes", eq. 12.
    """
    weight, log_sigma2 = to_float32_or_wider(weight), to_float32_or_wider(log_sigma2)
    weights = additive_weights(weight, log_sigma2, ARD_KL)
    return ARD_KL.expression(weight, log_sigma2) if weights is None else weights.kl()


def dawson(x: Tensor) -> Tensor:
    """Dawson's function D(x) = exp(-x^2) int_0^x exp(t^2) dt, elementwise.

    Args:
        x: any tensor.

    Returns:
        D(x), in at least single precision.

    >>> import torch
    >>> dawson(torch.tensor(1.0, dtype=torch.float64))
    tensor(0.5381, dtype=torch.float64)
    """
    x = to_float32_or_wider(x)
    return x * _slope(x * x)


def log_uniform_kl_sigmoid(log_alpha: Tensor) -> Tensor:
    """Sigmoid fit: k1 sigmoid(-(k2 + k3 log_alpha)) + 1/2 softplus(-log_alpha).

    At most 0.0094 away from the exact KL.

    Args:
        log_alpha: log alpha.

    Returns:
        The KLs in nats.

    >>> import torch
    >>> log_uniform_kl_sigmoid(torch.tensor(0.0))
    tensor(0.4312)

    Molchanov, Ashukha & Vetrov 2017, "Variational dropout sparsifies deep neural networks", eq. 14.
    """
    k1, k2, k3 = _SIGMOID
    return k1 * torch.sigmoid(-(k2 + k3 * log_alpha)) + 0.5 * torch.nn.functional.softplus(
        -log_alpha
    )


def log_uniform_kl_cubic(log_alpha: Tensor) -> Tensor:
    """Cubic fit -(1/2 log_alpha + c1 alpha + c2 alpha^2 + c3 alpha^3) + const, for alpha <= 1 only.

    At most 0.041 away from the exact KL for alpha <= 1, and not usable above.

    Args:
        log_alpha: log alpha.

    Returns:
        The KLs in nats.

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

    Args:
        log_alpha: log alpha.

    Returns:
        The KLs in nats.

    >>> import torch
    >>> log_uniform_kl_bound(torch.tensor(0.0))
    tensor(0.6352)

    Kingma, Salimans & Welling 2015, appendix C.
    """
    return _ASYMPTOTE - 0.5 * log_alpha
