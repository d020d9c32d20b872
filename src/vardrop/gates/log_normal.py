"""Structured Bayesian pruning: truncated log-normal gates under a log-uniform prior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vardrop._core.errors import VardropError
from vardrop.functional import clamp_with_gradient, truncated_log_normal, uniform
from vardrop.gates.base import FeatureNoise, Side, along
from vardrop.noisy import Relevance
from vardrop.posteriors import Tensors


@dataclass(frozen=True)
class LogNormal(FeatureNoise):
    """theta ~ LogNormal(mu, sigma^2) truncated to log theta in [low, high], one draw per batch.

    The prior is log-uniform on the same range, so the KL is proper. The mean multiplies by
    E theta, or by zero if the signal-to-noise ratio E theta / sd theta is at most `threshold`. The
    gates are on the inputs of dense layers and on the output channels of convolutions. The authors
    start from a pretrained model.

    Args:
        mu: the initial mean of log theta.
        log_sigma: the initial log standard deviation of log theta.
        low: the smallest log theta.
        high: the largest log theta.
        threshold: of the signal-to-noise ratio.

    >>> noise = LogNormal()
    >>> noise.unit_mean(noise.initial(2))
    tensor([0.9946, 0.9946])

    Neklyudov et al. 2017, "Structured Bayesian pruning via log-normal multiplicative noise",
    eq. 11 to 18.
    """

    mu: float = 0.0
    log_sigma: float = -5.0
    low: float = -20.0
    high: float = 0.0
    threshold: float = 1.0
    positive: ClassVar[tuple[str, ...]] = ("threshold",)
    sides: ClassVar[tuple[Side, Side]] = ("input", "output")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise VardropError(f"Expected `low` < `high`, but got {self.low} and {self.high}.")

    def initial(self, units: int) -> dict[str, Tensor]:
        """mu and log_sigma per unit."""
        return {
            "mu": torch.full((units,), self.mu),
            "log_sigma": torch.full((units,), self.log_sigma),
        }

    def parameters(self, tensors: Tensors) -> tuple[Tensor, Tensor, float, float]:
        """mu, log sigma and the range. Far outside of the range mu has no effect but rounding.

        Args:
            tensors: the tensors of the noise by name.

        Returns:
            mu, log sigma, `low` and `high`.
        """
        mu = clamp_with_gradient(tensors["mu"], self.low, self.high + 5.0)
        return mu, clamp_with_gradient(tensors["log_sigma"], -10.0, 5.0), self.low, self.high

    def multiplier(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """theta, one per unit and batch."""
        parameters = self.parameters(tensors)
        noise = uniform(parameters[0].shape, parameters[0])
        return along(axis, x, truncated_log_normal.log_sample(*parameters, noise).exp().to(x.dtype))

    def unit_mean(self, tensors: Tensors) -> Tensor:
        """E theta, or zero if the signal-to-noise ratio is at most the threshold."""
        parameters = self.parameters(tensors)
        mean = truncated_log_normal.log_moment(*parameters, order=1).exp()
        snr = truncated_log_normal.snr(*parameters)
        return torch.where(snr > self.threshold, mean.to(snr.dtype), 0.0)

    def moments(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """E theta and Var theta."""
        parameters = self.parameters(tensors)
        mean = truncated_log_normal.log_moment(*parameters, order=1).exp()
        return mean, (mean / truncated_log_normal.snr(*parameters)).square()

    def kl(self, tensors: Tensors, units: int) -> Tensor:
        """KL to the log-uniform prior on [low, high], summed over the units."""
        return truncated_log_normal.kl(*self.parameters(tensors)).sum()

    def log_alpha(self, tensors: Tensors) -> Tensor:
        """-2 log(E theta / sd theta)."""
        return -2 * truncated_log_normal.snr(*self.parameters(tensors)).log()

    def relevance(self, tensors: Tensors, units: int) -> Relevance:
        """E theta / sd theta, kept above the threshold."""
        snr = truncated_log_normal.snr(*self.parameters(tensors))
        return Relevance(snr, self.threshold, True, "input")
