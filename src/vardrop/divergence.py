"""KL(q || p) by type pair, always summed over the weights.

`register_kl` adds a pair. Registering a pair twice is an error, and so is using a pair that is not
registered. There is no implicit sampling: wrap the prior in `MonteCarlo` for a Monte-Carlo KL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from vardrop import functional as F
from vardrop._core.checks import check_type, describe_value
from vardrop._core.errors import UnregisteredKLError, VardropError, report_arguments
from vardrop.functional.fast.additive import additive_weights
from vardrop.functional.fast.blocked_kl import ARD_KL, NormalKL
from vardrop.posteriors import (
    AdditiveGaussian,
    Axes,
    Bernoulli,
    MultiplicativeGaussian,
    Posterior,
    Tensors,
    ZeroMean,
)
from vardrop.priors import ARD, LogUniform, MonteCarlo, Normal, Prior, Proper, StudentT

Q = TypeVar("Q", bound=Posterior)
P = TypeVar("P", bound=Prior)
# (q, p, weight, axes, noise tensors of q, tensors of p) -> 0-dim tensor
Formula = Callable[[Q, P, Tensor, Axes, Tensors, Tensors], Tensor]
Reason = Callable[[Q, P], str | None]  # why this pair of values has no KL, or None
# (q, p, weight, noise tensors of q, tensors of p) -> what the draws and the KL of a training step
# share, or None
Shared = Callable[[Q, P, Tensor, Tensors, Tensors], F.AdditiveWeights | None]


class _Pair(NamedTuple, Generic[Q, P]):
    """The functions of a pair of types."""

    formula: Formula[Q, P]
    unsupported_reason: Reason[Q, P]
    gradient: Formula[Q, P]
    shared: Shared[Q, P] | None


_PAIRS: dict[tuple[type, type], _Pair[Any, Any]] = {}  # by the types of q and p


def register_kl(
    q_type: type[Q],
    p_type: type[P],
    refuse: Reason[Q, P] = lambda q, p: None,
    gradient: Formula[Q, P] | None = None,
    shared: Shared[Q, P] | None = None,
) -> Callable[[Formula[Q, P]], Formula[Q, P]]:
    """Register the KL of a pair of types, as a decorator of its formula.

    Args:
        q_type: the posterior. `Posterior` itself means all types without their own pair.
        p_type: the prior.
        refuse: `refuse(q, p)` returns why two values of these types have no KL, or None.
        gradient: a cheaper formula of which only the gradient is used.
        shared: computes what the draws and the KL of one training step have in common: mean and
            variance of the weight, and the KL. It may return None.

    Returns:
        The decorator.
    """
    for name, argument, kind in (("q_type", q_type, Posterior), ("p_type", p_type, Prior)):
        if not (isinstance(argument, type) and issubclass(argument, kind)):
            raise VardropError(
                f"Expected `{name}` to be a subclass of {kind.__name__}, "
                f"but got {describe_value(argument)}."
            )

    def register(formula: Formula[Q, P]) -> Formula[Q, P]:
        if (q_type, p_type) in _PAIRS:
            raise VardropError(
                f"Expected the KL of ({q_type.__name__}, {p_type.__name__}) to be registered once, "
                "but got a second registration. Define a new type instead."
            )
        _PAIRS[q_type, p_type] = _Pair(formula, refuse, gradient or formula, shared)
        return formula

    return register


def check_kl(q: Posterior, p: Prior) -> _Pair[Any, Any]:
    """Return the registered pair, or raise an error if KL(q || p) cannot be computed.

    Args:
        q: the posterior.
        p: the prior.

    Returns:
        The registered pair.
    """
    check_type("q", q, Posterior, "a Posterior")
    check_type("p", p, Prior, "a Prior")
    pair = _PAIRS.get((type(q), type(p))) or _PAIRS.get((Posterior, type(p)))
    if pair is None:
        registered = ", ".join(sorted(f"({a.__name__}, {b.__name__})" for a, b in _PAIRS))
        advice = ", or ask for sampling with MonteCarlo(prior)"
        raise UnregisteredKLError(
            f"Expected a registered KL for ({type(q).__name__}, {type(p).__name__}), but the known "
            f"pairs are {registered}. Add one with `register_kl`"
            f"{advice if q.has_entropy and isinstance(p, Proper) else ''}."
        )
    if reason := pair.unsupported_reason(q, p):
        raise VardropError(f"Expected a KL of {q!r} to {p!r}, but {reason}.")
    return pair


def kl_divergence(
    q: Posterior,
    p: Prior,
    weight: Tensor,
    axes: Axes,
    q_tensors: Tensors,
    p_tensors: Tensors,
    value: bool = True,
) -> Tensor:
    """Compute KL(q || p), summed over the elements of `weight`, in at least single precision.

    Args:
        q: the posterior.
        p: the prior.
        weight: the posterior mean.
        axes: the axes of the weight.
        q_tensors: the noise tensors of q.
        p_tensors: the tensors of p.
        value: with False only the gradient is exact, and the value is unspecified, which may be
            faster.

    Returns:
        A tensor without axes.

    >>> import torch
    >>> q, w = AdditiveGaussian(log_sigma2=0.0), torch.ones(4)
    >>> axes = Axes((0,), (0,))
    >>> kl_divergence(q, Normal(), w, axes, q.initial(w, axes), {})
    tensor(2.)
    """
    pair = check_kl(q, p)
    names = ("weight", "axes", "q_tensors", "p_tensors", "value")
    with nullcontext() if torch.compiler.is_compiling() else report_arguments(*names):
        weight = F.to_float32_or_wider(torch.zeros_like(weight) if q.zero_mean else weight)
        q_tensors, p_tensors = (
            {name: F.to_float32_or_wider(t) for name, t in tensors.items()}
            for tensors in (q_tensors, p_tensors)
        )
        formula = pair.formula if value else pair.gradient
        return formula(q, p, weight, axes, q_tensors, p_tensors)


def shared_in_step(
    q: Posterior, p: Prior | None, weight: Tensor, q_tensors: Tensors, p_tensors: Tensors
) -> F.AdditiveWeights | None:
    """What draws and KL of the current training step have in common, or None."""
    pair = _PAIRS.get((type(q), type(p)))
    shared = None if pair is None else pair.shared
    return None if shared is None else shared(q, p, weight, q_tensors, p_tensors)


def log_uniform_from_log_alpha(prior: LogUniform, log_alpha: Tensor) -> Tensor:
    """The KL to a log-uniform prior as a function of log alpha, elementwise."""
    return _FORMS[prior.form](log_alpha)


_FORMS = {
    "exact": F.log_uniform_kl_of_log,
    "sigmoid": F.log_uniform_kl_sigmoid,
    "cubic": F.log_uniform_kl_cubic,
    "bound": F.log_uniform_kl_bound,
}


def _cubic_needs_a_bound(q: Posterior, p: LogUniform) -> str | None:
    bound = getattr(q, "max_alpha", None)
    if p.form != "cubic" or (bound is not None and bound <= 1):
        return None
    return (
        "the cubic form is valid for alpha <= 1 only. Use MultiplicativeGaussian(max_alpha=1.0), "
        "or LogUniform(form='exact')"
    )


def _additive_to_log_uniform(
    q: AdditiveGaussian,
    p: LogUniform,
    weight: Tensor,
    axes: Axes,
    qt: Tensors,
    pt: Tensors,
    value: bool = True,
) -> Tensor:
    if p.form == "exact":
        return F.log_uniform_kl_additive(weight, qt["log_sigma2"], value)
    return log_uniform_from_log_alpha(p, q.log_alpha(weight, qt)).sum()


register_kl(
    AdditiveGaussian,
    LogUniform,
    _cubic_needs_a_bound,
    gradient=partial(_additive_to_log_uniform, value=False),
    shared=lambda q, p, weight, qt, pt: (
        F.shared_weights(weight, qt["log_sigma2"]) if p.form == "exact" else None
    ),
)(_additive_to_log_uniform)


def _multiplicative_kl(
    q: MultiplicativeGaussian,
    p: LogUniform | ARD,
    weight: Tensor,
    axes: Axes,
    qt: Tensors,
    pt: Tensors,
) -> Tensor:
    log_alpha = q.log_alpha(weight, qt)
    if isinstance(p, ARD):
        each = 0.5 * torch.nn.functional.softplus(-log_alpha)
    else:
        each = log_uniform_from_log_alpha(p, log_alpha)
    return each.sum() * (weight.numel() / log_alpha.numel())  # several weights have one alpha


register_kl(MultiplicativeGaussian, LogUniform, _cubic_needs_a_bound)(_multiplicative_kl)
register_kl(MultiplicativeGaussian, ARD)(_multiplicative_kl)


@register_kl(
    AdditiveGaussian,
    ARD,
    shared=lambda q, p, weight, qt, pt: F.shared_weights(weight, qt["log_sigma2"], ARD_KL),
)
def _(q: AdditiveGaussian, p: ARD, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors) -> Tensor:
    return F.ard_kl_additive(weight, qt["log_sigma2"])


def _zero_mean_kl(
    q: ZeroMean, p: Prior, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors
) -> Tensor:
    return qt["sigma"].new_zeros(())  # alpha is infinite: the constant that KL is normalised by


register_kl(ZeroMean, LogUniform)(_zero_mean_kl)
register_kl(ZeroMean, ARD)(_zero_mean_kl)


def _needs_entropy(q: Posterior, p: Prior) -> str | None:
    return None if q.has_entropy else "the posterior does not define `entropy`"


def _blocked_normal(p: Normal, weight: Tensor, pt: Tensors) -> NormalKL:
    return NormalKL(p.location(weight, pt), p.scale(weight, pt))


@register_kl(
    AdditiveGaussian,
    Normal,
    shared=lambda q, p, weight, qt, pt: F.shared_weights(
        weight, qt["log_sigma2"], _blocked_normal(p, weight, pt)
    ),
)
def _(
    q: AdditiveGaussian, p: Normal, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors
) -> Tensor:
    log_sigma2, divergence = qt["log_sigma2"], _blocked_normal(p, weight, pt)
    weights = additive_weights(weight, log_sigma2, divergence)
    if weights is not None:
        return weights.kl()
    return divergence.expression(weight, log_sigma2, *divergence.hyper)


def _gaussian_to_normal(
    q: MultiplicativeGaussian | ZeroMean,
    p: Normal,
    weight: Tensor,
    axes: Axes,
    qt: Tensors,
    pt: Tensors,
) -> Tensor:
    # The KL of a zero weight under multiplicative noise is infinite. It counts as the smallest
    # normal number (`log_square`), so that a model with such weights can be trained.
    location, scale = p.location(weight, pt), p.scale(weight, pt)
    log_variance = q.log_variance(weight, qt)
    return F.normal_kl(weight, location, scale, log_variance=log_variance).sum()


register_kl(MultiplicativeGaussian, Normal)(_gaussian_to_normal)
register_kl(ZeroMean, Normal, _needs_entropy)(_gaussian_to_normal)


def _gaussian_to_student_t(
    q: Posterior, p: StudentT, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors
) -> Tensor:
    unit = p.scale * math.sqrt(p.df)
    scaled_mean, scaled_variance = weight / unit, q.variance(weight, qt) / unit**2
    if p.form == "bound":
        tail = torch.log1p(scaled_mean.square() + scaled_variance)
    else:
        tail = F.expected_log1p_square(scaled_mean, scaled_variance)
    cross = 0.5 * (p.df + 1) * tail + p.log_normalizer
    return (cross - q.entropy(weight, qt)).sum()


register_kl(AdditiveGaussian, StudentT)(_gaussian_to_student_t)
register_kl(MultiplicativeGaussian, StudentT)(_gaussian_to_student_t)
register_kl(ZeroMean, StudentT, _needs_entropy)(_gaussian_to_student_t)


def _zero_centred(q: Bernoulli, p: Normal) -> str | None:
    return None if p.mean == 0 and not p.learned else "it is defined for a fixed N(0, std^2) only"


@register_kl(Bernoulli, Normal, _zero_centred)
def _(q: Bernoulli, p: Normal, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors) -> Tensor:
    # Quasi-KL of Gal & Ghahramani 2016 (appendix): the singular posterior's mean term; a dropped
    # weight has no cost, and a retained one has the value weight / (1 - drop_rate).
    return 0.5 * weight.square().sum() / (p.std**2 * (1 - q.drop_rate))


@register_kl(Posterior, MonteCarlo, _needs_entropy)  # type: ignore[type-abstract]
def _(q: Posterior, p: MonteCarlo, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors) -> Tensor:
    log_prob = torch.zeros_like(weight)
    for _ in range(p.samples):
        draw = q.sample(weight, q.draw(weight, axes), qt)
        log_prob = log_prob + p.prior.log_prob(draw, pt)
    return -(q.entropy(weight, qt) + log_prob / p.samples).sum()
