"""KL(q || p) by type pair, always the sum over the weights.

`register_kl` adds a pair; a second registration of the same pair is an error, and so is a pair
that nobody registered. Nothing falls back to sampling: a Monte-Carlo KL is asked for by wrapping
the prior in `MonteCarlo`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vardrop import functional as F
from vardrop.checks import check_type, shown
from vardrop.errors import UnregisteredKLError, VardropError
from vardrop.posteriors import (
    AdditiveGaussian,
    Axes,
    Bernoulli,
    MultiplicativeGaussian,
    Posterior,
    Tensors,
    ZeroMean,
)
from vardrop.priors import ARD, LogUniform, MonteCarlo, Normal, Prior, StudentT

# (q, p, weight, axes, noise tensors of q, tensors of p) -> 0-dim tensor
Formula = Callable[[Any, Any, Tensor, Axes, Tensors, Tensors], Tensor]
Refusal = Callable[[Any, Any], str | None]  # why this pair of values has no KL, or None
_PAIRS: dict[tuple[type[Posterior], type[Prior]], tuple[Formula, Refusal]] = {}


def register_kl(
    q_type: type[Posterior], p_type: type[Prior], refuse: Refusal = lambda q, p: None
) -> Callable[[Formula], Formula]:
    """Register the KL of a pair of types; `refuse(q, p)` may name a reason why it has none."""
    for name, given, kind in (("q_type", q_type, Posterior), ("p_type", p_type, Prior)):
        if not (isinstance(given, type) and issubclass(given, kind)):
            raise VardropError(
                f"Expected `{name}` to be a subclass of {kind.__name__}, but got {shown(given)}."
            )

    def register(formula: Formula) -> Formula:
        if (q_type, p_type) in _PAIRS:
            raise VardropError(
                f"Expected the KL of ({q_type.__name__}, {p_type.__name__}) to be registered once, "
                "but got a second registration. Define a type of your own instead."
            )
        _PAIRS[q_type, p_type] = (formula, refuse)
        return formula

    return register


def check_kl(q: Posterior, p: Prior) -> None:
    """Raise unless KL(q || p) can be computed."""
    check_type("q", q, Posterior, "a Posterior")
    check_type("p", p, Prior, "a Prior")
    if (type(q), type(p)) not in _PAIRS:
        known = ", ".join(sorted(f"({a.__name__}, {b.__name__})" for a, b in _PAIRS))
        raise UnregisteredKLError(
            f"Expected a registered KL for ({type(q).__name__}, {type(p).__name__}), but the known "
            f"pairs are {known}. Add one with `register_kl`, or ask for sampling with "
            "MonteCarlo(prior)."
        )
    if reason := _PAIRS[type(q), type(p)][1](q, p):
        raise VardropError(f"Expected a KL of {q!r} to {p!r}, but {reason}.")


def kl_divergence(
    q: Posterior,
    p: Prior,
    weight: Tensor,
    axes: Axes,
    q_tensors: Tensors,
    p_tensors: Tensors,
    value: bool = True,
) -> Tensor:
    """KL(q || p) summed over the elements of `weight`.

    `value=False` asks for the gradient alone: the value is then unspecified, and the pair
    (AdditiveGaussian, LogUniform), whose value is dear, leaves it out.

    >>> import torch
    >>> q, w = AdditiveGaussian(log_sigma2=0.0), torch.ones(4)
    >>> axes = Axes((0,), (0,))
    >>> kl_divergence(q, Normal(), w, axes, q.initial(w, axes), {})
    tensor(2.)
    """
    check_kl(q, p)
    if not value and type(q) is AdditiveGaussian and p == LogUniform():
        return F.log_uniform_kl_additive(weight, q_tensors["log_sigma2"], value=False)
    return _PAIRS[type(q), type(p)][0](q, p, weight, axes, q_tensors, p_tensors)


def log_uniform_from_log_alpha(prior: LogUniform, log_alpha: Tensor) -> Tensor:
    """The KL to a log-uniform prior as a function of log alpha, elementwise."""
    if prior.form == "exact":
        return F.log_uniform_kl(0.5 * torch.exp(-log_alpha))
    forms = {
        "sigmoid": F.log_uniform_kl_sigmoid,
        "cubic": F.log_uniform_kl_cubic,
        "bound": F.log_uniform_kl_bound,
    }
    return forms[prior.form](log_alpha)


def _cubic_needs_a_bound(q: Posterior, p: LogUniform) -> str | None:
    bound = getattr(q, "max_alpha", None)
    if p.form != "cubic" or (bound is not None and bound <= 1):
        return None
    return (
        "the cubic form is valid for alpha <= 1 only. Use MultiplicativeGaussian(max_alpha=1.0), "
        "or LogUniform(form='exact')"
    )


@register_kl(AdditiveGaussian, LogUniform, _cubic_needs_a_bound)
def _(q: Any, p: Any, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors) -> Tensor:
    if p.form == "exact":
        return F.log_uniform_kl_additive(weight, qt["log_sigma2"])
    return log_uniform_from_log_alpha(p, q.log_alpha(weight, qt)).sum()


@register_kl(MultiplicativeGaussian, LogUniform, _cubic_needs_a_bound)
def _(q: Any, p: Any, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors) -> Tensor:
    log_alpha = q.log_alpha(weight, qt)
    sharing = weight.numel() / log_alpha.numel()  # weights that share one alpha
    return log_uniform_from_log_alpha(p, log_alpha).sum() * sharing


@register_kl(AdditiveGaussian, ARD)
def _(q: Any, p: Any, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors) -> Tensor:
    return 0.5 * torch.log1p(weight.square() * torch.exp(-qt["log_sigma2"])).sum()


@register_kl(MultiplicativeGaussian, ARD)
def _(q: Any, p: Any, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors) -> Tensor:
    log_alpha = q.log_alpha(weight, qt)
    sharing = weight.numel() / log_alpha.numel()
    return 0.5 * torch.nn.functional.softplus(-log_alpha).sum() * sharing


@register_kl(ZeroMean, LogUniform)
@register_kl(ZeroMean, ARD)
def _(q: Any, p: Any, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors) -> Tensor:
    return qt["sigma"].new_zeros(())  # alpha is infinite: the constant that KL is normalised by


def _only_gaussian(q: ZeroMean, p: Prior) -> str | None:
    return None if q.noise == "gaussian" else f"{q.noise} noise has no Gaussian density"


def _entropy_and_cross(q: Posterior, weight: Tensor, qt: Tensors) -> tuple[Tensor, Tensor]:
    mean = torch.zeros_like(weight) if q.zero_mean else weight
    return mean, q.variance(weight, qt)


@register_kl(AdditiveGaussian, Normal)
def _(q: Any, p: Any, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors) -> Tensor:
    # `normal_kl` with the sums taken term by term: fewer passes over the weights.
    log_sigma2, scale = qt["log_sigma2"], p.scale(weight, pt)
    squares = log_sigma2.exp().sum() + (weight - p.location(weight, pt)).square().sum()
    constant = weight.numel() * (scale.log() - 0.5)
    return 0.5 * (squares / scale.square() - log_sigma2.sum()) + constant


@register_kl(MultiplicativeGaussian, Normal)
@register_kl(ZeroMean, Normal, _only_gaussian)
def _(q: Any, p: Any, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors) -> Tensor:
    mean, variance = _entropy_and_cross(q, weight, qt)
    return F.normal_kl(mean, variance, p.location(weight, pt), p.scale(weight, pt)).sum()


@register_kl(AdditiveGaussian, StudentT)
@register_kl(MultiplicativeGaussian, StudentT)
@register_kl(ZeroMean, StudentT, _only_gaussian)
def _(q: Any, p: Any, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors) -> Tensor:
    mean, variance = _entropy_and_cross(q, weight, qt)
    unit = p.scale * math.sqrt(p.df)
    scaled_mean, scaled_variance = mean / unit, variance / unit**2
    if p.form == "bound":
        tail = torch.log1p(scaled_mean.square() + scaled_variance)
    else:
        tail = F.expected_log1p_square(scaled_mean, scaled_variance)
    cross = 0.5 * (p.df + 1) * tail + p.log_normalizer
    return (cross - F.normal_entropy(variance)).sum()


def _zero_centred(q: Bernoulli, p: Normal) -> str | None:
    return None if p.mean == 0 and not p.learned else "it is defined for a fixed N(0, std^2) only"


@register_kl(Bernoulli, Normal, _zero_centred)
def _(q: Any, p: Any, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors) -> Tensor:
    # Quasi-KL of Gal & Ghahramani 2016 (appendix): the singular posterior's mean term; a dropped
    # weight costs nothing and a kept one stands at weight / (1 - drop_rate).
    return 0.5 * weight.square().sum() / (p.std**2 * (1 - q.drop_rate))


def _has_entropy(q: Posterior, p: MonteCarlo) -> str | None:
    return _only_gaussian(q, p) if isinstance(q, ZeroMean) else None


@register_kl(AdditiveGaussian, MonteCarlo)
@register_kl(MultiplicativeGaussian, MonteCarlo)
@register_kl(ZeroMean, MonteCarlo, _has_entropy)
def _(q: Any, p: Any, weight: Tensor, axes: Axes, qt: Tensors, pt: Tensors) -> Tensor:
    log_prob = torch.zeros_like(weight)
    for _ in range(p.samples):
        draw = q.sample(weight, q.draw(weight, axes), qt)
        log_prob = log_prob + p.prior.log_prob(draw, pt)
    return -(F.normal_entropy(q.variance(weight, qt)) + log_prob / p.samples).sum()
