"""Posteriors of mean zero: variance layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vardrop.functional import log_square, random_signs, to_float32_or_wider, uniform
from vardrop.posteriors.base import Axes, Noise, Posterior, Sharing, Tensors

__all__ = ["ZeroMean"]


@dataclass(frozen=True)
class ZeroMean(Posterior):
    """w = sigma * noise with mean zero: everything is stored in the variance.

    The signed `sigma` starts at the weights of the layer.

    Args:
        noise: `gaussian` (variance sigma^2), `sign` (+-sigma) or `uniform` (U(-sigma, sigma), so
            variance sigma^2 / 3).

    >>> import torch
    >>> q = ZeroMean(noise="uniform")
    >>> q.variance(torch.zeros(1), {"sigma": torch.tensor([3.0])})
    tensor([3.])

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 3.
    """

    noise: Noise = "gaussian"
    zero_mean: ClassVar[bool] = True
    noise_per: ClassVar[Sharing] = "weight"

    @property
    def gaussian(self) -> bool:  # type: ignore[override]
        """Whether the noise is normal."""
        return self.noise == "gaussian"

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        """sigma, one per weight, at the weights of the layer."""
        return {"sigma": to_float32_or_wider(weight.detach()).clone()}

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """sigma^2, or sigma^2 / 3 for uniform noise."""
        square = to_float32_or_wider(tensors["sigma"]).square()
        return square / 3 if self.noise == "uniform" else square

    def log_variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """log sigma^2, less log 3 for uniform noise."""
        log_square_sigma = log_square(tensors["sigma"])
        return log_square_sigma - math.log(3) if self.noise == "uniform" else log_square_sigma

    def draw(self, weight: Tensor, axes: Axes, batch: tuple[int, ...] = ()) -> Tensor:
        """Normal numbers, signs, or numbers from U(-1, 1)."""
        shape = (*batch, *weight.shape)
        if self.noise == "sign":
            return random_signs(shape, weight)
        if self.noise == "uniform":
            return (uniform(shape, weight) * 2 - 1).to(weight.dtype)
        return super().draw(weight, axes, batch)

    def perturbation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        """sigma noise."""
        return tensors["sigma"] * noise

    def sample(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        """sigma noise, without the sum with zero."""
        return (tensors["sigma"] * noise).to(weight.dtype)

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """Infinity: there is no mean."""
        return torch.full_like(weight, math.inf)
