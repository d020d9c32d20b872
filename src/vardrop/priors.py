"""Priors p(w): frozen values. The tensors of a prior belong to the layer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from vardrop._core.checks import check_integer, check_number
from vardrop._core.errors import VardropError
from vardrop._core.values import Value
from vardrop.functional import to_float32_or_wider
from vardrop.functional.normal import LOG_2PI


@dataclass(frozen=True)
class Prior(Value):
    """Base of priors. Their tensors are in at least single precision."""

    @property
    def learned(self) -> bool:
        """Whether its tensors are parameters, fitted by empirical Bayes."""
        return False

    def initial(self, weight: Tensor) -> dict[str, Tensor]:
        """The tensors that a layer must own for this prior, at their initial values.

        Args:
            weight: the weight at the start.

        Returns:
            The tensors by name.
        """
        return {}


@dataclass(frozen=True)
class Proper(Prior, ABC):
    """A prior with a density, which a Monte-Carlo KL needs."""

    @abstractmethod
    def log_prob(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """log p(w), elementwise.

        Args:
            weight: the weight.
            tensors: the tensors of the prior by name.

        Returns:
            The log densities, in the shape of `weight`.
        """


@dataclass(frozen=True)
class LogUniform(Prior):
    """p(|w|) proportional to 1/|w|. It is improper, so the KL is defined up to a constant.

    Args:
        form: of the KL: `exact` (closed form), `sigmoid` (Molchanov 2017), `cubic` (Kingma 2015,
            only for alpha <= 1) or `bound` (Kingma 2015, appendix).

    Kingma, Salimans & Welling 2015, sec. 3.3.
    """

    form: Literal["exact", "sigmoid", "cubic", "bound"] = "exact"


@dataclass(frozen=True)
class ARD(Prior):
    """N(0, 1/tau) with one precision per weight at its best value: KL = 1/2 log(1 + 1/alpha).

    Kharitonov, Molchanov & Vetrov 2018, "Variational dropout via empirical Bayes", eq. 12.
    """


@dataclass(frozen=True)
class Normal(Proper):
    """N(mean, std^2).

    Args:
        mean: a number, or "pretrained" for the weights at conversion.
        std: the standard deviation, or its initial value if it is learned.
        learned: whether each layer fits its standard deviation by empirical Bayes.

    >>> import torch
    >>> Normal(std=1.0).log_prob(torch.tensor(0.0), {})
    tensor(-0.9189)

    Blundell et al. 2015, "Weight uncertainty in neural networks", sec. 3.3.
    """

    mean: float | Literal["pretrained"] = 0.0
    std: float = 1.0
    learned: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("std", self.std, above=0)
        if self.learned and self.mean == "pretrained":
            raise VardropError(
                "Expected `learned` to be False where `mean` is 'pretrained', but got True: "
                "the best std would be the distance already travelled. Give a fixed `std`."
            )

    def initial(self, weight: Tensor) -> dict[str, Tensor]:
        """prior_log_std if it is learned, prior_mean if the mean is the pretrained weights."""
        if self.learned:
            return {"prior_log_std": to_float32_or_wider(weight).new_full((1,), math.log(self.std))}
        if self.mean == "pretrained":
            return {"prior_mean": to_float32_or_wider(weight.detach()).clone()}
        return {}

    def location(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """The mean, broadcastable to `weight`.

        Args:
            weight: the weight.
            tensors: the tensors of the prior by name.

        Returns:
            The mean.
        """
        if "prior_mean" in tensors:
            return tensors["prior_mean"]
        return weight.new_full((), float(self.mean))

    def scale(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """The standard deviation, broadcastable to `weight`.

        Args:
            weight: the weight.
            tensors: the tensors of the prior by name.

        Returns:
            The standard deviation.
        """
        if "prior_log_std" in tensors:
            return tensors["prior_log_std"].exp()
        return weight.new_full((), self.std)

    def log_prob(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """-1/2 ((w - mean) / std)^2 - log std - 1/2 log 2 pi."""
        scale = self.scale(weight, tensors)
        z = (weight - self.location(weight, tensors)) / scale
        return -0.5 * z.square() - scale.log() - 0.5 * LOG_2PI


@dataclass(frozen=True)
class ScaleMixture(Proper):
    """pi N(0, std1^2) + (1 - pi) N(0, std2^2), a wide and a narrow component.

    Its KL has no closed form. Use `MonteCarlo(ScaleMixture(...), samples=n)`.

    Args:
        pi: the weight of the first component.
        std1: the standard deviation of the wide component.
        std2: the standard deviation of the narrow component.

    >>> import torch
    >>> ScaleMixture(pi=1.0 - 1e-12, std1=1.0, std2=0.1).log_prob(torch.tensor(1.0), {})
    tensor(-1.4189)

    Blundell et al. 2015, eq. 7 (pi in 1/4..3/4, -log std1 in 0..2, -log std2 in 6..8).
    """

    pi: float = 0.5
    std1: float = 1.0
    std2: float = math.exp(-6)
    positive: ClassVar[tuple[str, ...]] = ("std1", "std2")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("pi", self.pi, above=0, below=1)

    def log_prob(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """log(pi N(w; 0, std1^2) + (1 - pi) N(w; 0, std2^2))."""
        broad, narrow = (
            math.log(fraction / std) - 0.5 * (weight / std).square() - 0.5 * LOG_2PI
            for fraction, std in ((self.pi, self.std1), (1 - self.pi, self.std2))
        )
        # In log space, so that the gradient does not vanish beyond a few std1. The second
        # derivative of torch.logaddexp is NaN if one component is much larger.
        return broad + functional.softplus(narrow - broad, threshold=50.0)


@dataclass(frozen=True)
class StudentT(Proper):
    """Student's t distribution. For df -> 0 it tends to the log-uniform prior.

    Args:
        df: the degrees of freedom.
        scale: the scale.
        form: `exact` integrates E log(1 + w^2 / (df scale^2)) to about 1e-7. `bound` moves the
            expectation inside the logarithm (Jensen), a cheap upper bound of the KL that becomes
            ARD for df -> 0.

    >>> import torch
    >>> StudentT(df=1.0).log_prob(torch.tensor(0.0), {})
    tensor(-1.1447)
    """

    df: float = 1.0
    scale: float = 1.0
    form: Literal["exact", "bound"] = "exact"
    positive: ClassVar[tuple[str, ...]] = ("df", "scale")

    @property
    def log_normalizer(self) -> float:
        """log of the integral of (1 + w^2 / (df scale^2))^(-(df + 1) / 2)."""
        half = 0.5 * self.df
        return (
            math.lgamma(half)
            - math.lgamma(half + 0.5)
            + 0.5 * math.log(self.df * math.pi)
            + math.log(self.scale)
        )

    def log_prob(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """-(df + 1) / 2 log(1 + w^2 / (df scale^2)) - log normalizer."""
        square = weight.square() / (self.df * self.scale**2)
        return -0.5 * (self.df + 1) * torch.log1p(square) - self.log_normalizer


@dataclass(frozen=True)
class MonteCarlo(Prior):
    """The KL to `prior` by sampling: the entropy of q is exact, and -E_q log p uses draws.

    Args:
        prior: a prior with a density.
        samples: the number of draws per KL.

    Blundell et al. 2015, eq. 2.
    """

    prior: Proper = ScaleMixture()
    samples: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.prior, Proper):
            raise VardropError(
                f"Expected `prior` to have a density, but got {self.prior!r}. "
                "Use a Normal, ScaleMixture, StudentT or your own subclass of Proper."
            )
        super().__post_init__()
        check_integer("samples", self.samples)

    @property
    def learned(self) -> bool:
        """Whether the sampled prior has parameters."""
        return self.prior.learned

    def initial(self, weight: Tensor) -> dict[str, Tensor]:
        """The tensors of the sampled prior."""
        return self.prior.initial(weight)
