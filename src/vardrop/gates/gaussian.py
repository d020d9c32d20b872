"""Gaussian noise on features: Gaussian and variational dropout (A), and normal-Jeffreys gates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vardrop._core.checks import check_number
from vardrop._core.errors import VardropError
from vardrop.divergence import log_uniform_from_log_alpha
from vardrop.functional import (
    clamp_with_gradient,
    log_square,
    log_uniform_kl_of_log,
    standard_normal,
)
from vardrop.gates.base import FeatureNoise, Granularity, Side, along, noise_shape
from vardrop.noisy import Relevance
from vardrop.posteriors import Tensors, check_log_variance
from vardrop.priors import LogUniform


@dataclass(frozen=True)
class GaussianDropout(FeatureNoise):
    """multiplier ~ N(1, alpha), with alpha fixed, or learned per unit or layer.

    With `prior=LogUniform()` the KL has one term per unit, or one term in all if there is one draw
    per example. Units with a learned log alpha below 3 are kept.

    Args:
        alpha: the initial or fixed value.
        per: whether each unit or the layer has an alpha.
        learned: whether alpha is learned.
        max_alpha: the upper bound of alpha, see `functional.clamp_with_gradient`. None means no
            bound.
        prior: of the multiplier, or None for no KL.
        kl_scale: the factor of the KL. 1/3 gives the A2 of the paper.
        granularity: whether each element, channel of an example, example or sequence has its own
            draw. One draw per example needs `per="layer"`.

    >>> import torch
    >>> noise = GaussianDropout(alpha=0.25, learned=False)
    >>> noise.log_alpha(noise.initial(3)).exp()
    tensor([0.2500, 0.2500, 0.2500])

    Srivastava et al. 2014, sec. 10; Kingma, Salimans & Welling 2015, sec. 3.1 (type A).
    """

    alpha: float = 1.0
    per: Literal["unit", "layer"] = "unit"
    learned: bool = True
    max_alpha: float | None = None
    prior: LogUniform | None = None
    kl_scale: float = 1.0
    granularity: Granularity = "element"
    positive: ClassVar[tuple[str, ...]] = ("alpha", "max_alpha")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("kl_scale", self.kl_scale, at_least=0)
        if self.granularity == "example" and self.per == "unit":
            raise VardropError(
                "Expected `per` to be 'layer' where one draw serves a whole example, "
                "but got 'unit'."
            )
        bound = math.inf if self.max_alpha is None else self.max_alpha
        if self.alpha > bound:
            raise VardropError(
                f"Expected `alpha` to be at most `max_alpha` = {bound}, but got {self.alpha}."
            )
        if self.prior is not None and self.prior.form == "cubic" and bound > 1:
            raise VardropError(
                f"Expected `max_alpha` to be at most 1 for the cubic form, but got "
                f"{self.max_alpha}. Use max_alpha=1.0 or LogUniform(form='exact')."
            )

    def initial(self, units: int) -> dict[str, Tensor]:
        """log_alpha, one per unit or for the layer."""
        count = units if self.per == "unit" else 1
        return {"log_alpha": torch.full((count,), math.log(self.alpha))}

    def multiplier(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """1 + sqrt(alpha) noise."""
        std = torch.exp(0.5 * self.log_alpha(tensors)).to(x.dtype)
        return 1 + along(axis, x, std) * standard_normal(noise_shape(x, axis, self.granularity), x)

    def moments(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """1 and alpha."""
        alpha = self.log_alpha(tensors).exp()
        return torch.ones_like(alpha), alpha

    def kl(self, tensors: Tensors, units: int) -> Tensor | None:
        """The log-uniform KL of every noise variable, times `kl_scale`, or None without a prior."""
        if self.prior is None:
            return None
        log_alpha = self.log_alpha(tensors)
        variables = 1 if self.granularity == "example" else units
        per_alpha = variables / log_alpha.numel()  # noise variables with one alpha
        return log_uniform_from_log_alpha(self.prior, log_alpha).sum() * (per_alpha * self.kl_scale)

    def log_alpha(self, tensors: Tensors) -> Tensor:
        """The tensor, at most log `max_alpha`."""
        if self.max_alpha is None:
            return tensors["log_alpha"]
        return clamp_with_gradient(tensors["log_alpha"], -math.inf, math.log(self.max_alpha))

    def relevance(self, tensors: Tensors, units: int) -> Relevance | None:
        """log alpha, kept below 3, or None if it is fixed."""
        if not self.learned:
            return None
        return Relevance(self.log_alpha(tensors).expand(units), 3.0, False, "input")


@dataclass(frozen=True)
class NormalJeffreys(FeatureNoise):
    """z ~ N(mu, exp(log_sigma2)), one draw per unit and example, with the prior p(z) ~ 1/|z|.

    The KL is the log-uniform KL at log alpha = log_sigma2 - log mu^2, per unit. The gates are on
    the inputs of dense layers and on the output channels of convolutions. A weight w ~ N(m, s^2)
    becomes z w with mean mu m and variance mu^2 s^2 + sigma^2 m^2 + sigma^2 s^2.

    Args:
        log_sigma2: the initial log variance.
        threshold: units with log alpha below it are kept. The authors choose it by hand for each
            layer (-2.8, -3 and -5 in their example).

    >>> noise = NormalJeffreys(log_sigma2=-9.0)
    >>> noise.log_alpha(noise.initial(2))
    tensor([-9., -9.])

    Louizos, Ullrich & Welling 2017, "Bayesian compression for deep learning", eq. 7 to 10.
    """

    log_sigma2: float = -9.0
    threshold: float = -3.0
    sides: ClassVar[tuple[Side, Side]] = ("input", "output")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_log_variance("log_sigma2", self.log_sigma2)

    def initial(self, units: int) -> dict[str, Tensor]:
        """mu and log_sigma2 per unit."""
        return {"mu": torch.ones(units), "log_sigma2": torch.full((units,), self.log_sigma2)}

    def multiplier(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """mu + sigma noise."""
        std = along(axis, x, torch.exp(0.5 * tensors["log_sigma2"]))
        noise = standard_normal(noise_shape(x, axis, "channel"), std)
        return (along(axis, x, tensors["mu"]) + std * noise).to(x.dtype)

    def unit_mean(self, tensors: Tensors) -> Tensor:
        """mu."""
        return tensors["mu"]

    def moments(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """mu and sigma^2."""
        return tensors["mu"], tensors["log_sigma2"].exp()

    def kl(self, tensors: Tensors, units: int) -> Tensor:
        """The log-uniform KL at log alpha, summed over the units."""
        return log_uniform_kl_of_log(self.log_alpha(tensors)).sum()

    def log_alpha(self, tensors: Tensors) -> Tensor:
        """log_sigma2 - log mu^2."""
        return tensors["log_sigma2"] - log_square(tensors["mu"])

    def relevance(self, tensors: Tensors, units: int) -> Relevance:
        """log alpha, kept below the threshold."""
        return Relevance(self.log_alpha(tensors), self.threshold, False, "input")
