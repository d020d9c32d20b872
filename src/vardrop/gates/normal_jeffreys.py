"""The group normal-Jeffreys gate of Bayesian compression, used together with a weight posterior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vardrop.functional import log_square, log_uniform_kl_of_log, standard_normal
from vardrop.gates.base import FeatureNoise, Side, along, noise_shape
from vardrop.noisy import Relevance
from vardrop.posteriors import Tensors, check_log_variance


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
        shape = noise_shape(x, axis, "channel")
        std = along(axis, x, torch.exp(0.5 * tensors["log_sigma2"]))
        noise = standard_normal(shape, std)
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
