"""Beta-Bernoulli dropout: sparse gates with a Kumaraswamy posterior on their rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from vardrop._core.checks import check_number
from vardrop.functional import (
    clamp_with_gradient,
    concrete,
    kumaraswamy_beta_kl,
    kumaraswamy_log_mean,
    kumaraswamy_log_sample,
    logit_from_log,
    uniform,
)
from vardrop.gates.base import FeatureNoise, Side, along, inverse_softplus, noise_shape
from vardrop.noisy import Relevance
from vardrop.posteriors import Tensors


@dataclass(frozen=True)
class BetaBernoulli(FeatureNoise):
    """z ~ Bernoulli(pi) per unit and example, pi ~ Kumaraswamy(a, b) per unit and batch.

    The prior is pi ~ Beta(alpha, 1). The mean multiplies by E pi, or by zero if E pi is at most
    `threshold`. The gates are on the inputs of dense layers and on the output channels of
    convolutions.

    Args:
        alpha: of the prior, alpha / K in the paper. A small alpha favours closed gates.
        a: the initial a of the posterior. The authors use 0.3133 for LeNets and 2.127 for VGG.
        b: the initial b of the posterior.
        temperature: of the relaxed z.
        threshold: units with E pi above it are kept.

    >>> noise = BetaBernoulli(a=1.0)
    >>> noise.unit_mean(noise.initial(2))
    tensor([0.5000, 0.5000])

    Lee et al. 2018, "Adaptive network sparsification with dependent variational beta-Bernoulli
    dropout", eq. 12 to 15.
    """

    alpha: float = 1e-4
    a: float = 0.3133
    b: float = 1.0
    temperature: float = 0.1
    threshold: float = 1e-3
    positive: ClassVar[tuple[str, ...]] = ("alpha", "a", "b", "temperature", "threshold")
    sides: ClassVar[tuple[Side, Side]] = ("input", "output")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("threshold", self.threshold, below=1, remedy="Else every unit is closed.")

    def initial(self, units: int) -> dict[str, Tensor]:
        """raw_a and raw_b per unit, whose softplus is a and b."""
        return {
            "raw_a": torch.full((units,), inverse_softplus(self.a)),
            "raw_b": torch.full((units,), inverse_softplus(self.b)),
        }

    def parameters(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """a and b of the posterior, per unit, within a range in which all results are finite.

        Args:
            tensors: the tensors of the noise by name.

        Returns:
            a and b.
        """
        a = functional.softplus(clamp_with_gradient(tensors["raw_a"], -10.0, 50.0))
        return a, functional.softplus(clamp_with_gradient(tensors["raw_b"], -10.0, 50.0))

    def multiplier(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """A relaxed z per unit and example, with one pi per unit and batch."""
        a, b = self.parameters(tensors)
        log_pi = kumaraswamy_log_sample(a, b, uniform(a.shape, a))
        logit = along(axis, x, logit_from_log(log_pi))
        noise = uniform(noise_shape(x, axis, "channel"), logit)
        return concrete(logit, noise, self.temperature).to(x.dtype)

    def retain_probability(self, tensors: Tensors) -> Tensor:
        """E pi, per unit.

        Args:
            tensors: the tensors of the noise by name.

        Returns:
            The probabilities.
        """
        return kumaraswamy_log_mean(*self.parameters(tensors)).exp()

    def unit_mean(self, tensors: Tensors) -> Tensor:
        """E pi, or zero if it is at most the threshold."""
        mean = self.retain_probability(tensors)
        return torch.where(mean > self.threshold, mean, 0.0)

    def kl(self, tensors: Tensors, units: int) -> Tensor:
        """KL(Kumaraswamy(a, b) || Beta(alpha, 1)), summed over the units."""
        return kumaraswamy_beta_kl(*self.parameters(tensors), self.alpha).sum()

    def relevance(self, tensors: Tensors, units: int) -> Relevance:
        """E pi, kept above the threshold."""
        return Relevance(self.retain_probability(tensors), self.threshold, True, "input")
