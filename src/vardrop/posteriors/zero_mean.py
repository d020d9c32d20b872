"""Posteriors of mean zero: variance layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vardrop.functional import log_square, random_signs, uniform, wide
from vardrop.posteriors.base import (
    Axes,
    Noise,
    Posterior,
    Sharing,
    Tensors,
)

__all__ = ["ZeroMean"]


@dataclass(frozen=True)
class ZeroMean(Posterior):
    """w = sigma * noise with mean zero: everything is stored in the variance.

    `noise` is `gaussian` (variance sigma^2), `sign` (+-sigma) or `uniform` (U(-sigma, sigma), so
    variance sigma^2 / 3). The signed `sigma` starts at the weights that the layer had.

    >>> import torch
    >>> q = ZeroMean(noise="uniform")
    >>> q.variance(torch.zeros(1), {"sigma": torch.tensor([3.0])})
    tensor([3.])

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 3.
    """

    noise: Noise = "gaussian"

    @property
    def zero_mean(self) -> bool:
        return True

    @property
    def gaussian(self) -> bool:
        return self.noise == "gaussian"

    @property
    def noise_per(self) -> Sharing:
        return "weight"

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        return {"sigma": wide(weight.detach()).clone()}

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        square = wide(tensors["sigma"]).square()
        return square / 3 if self.noise == "uniform" else square

    def log_variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        log_square_sigma = log_square(tensors["sigma"])
        return log_square_sigma - math.log(3) if self.noise == "uniform" else log_square_sigma

    def draw(self, weight: Tensor, axes: Axes, batch: tuple[int, ...] = ()) -> Tensor:
        shape = (*batch, *weight.shape)
        if self.noise == "sign":
            return random_signs(shape, weight)
        if self.noise == "uniform":
            return (uniform(shape, weight) * 2 - 1).to(weight.dtype)
        return super().draw(weight, axes, batch)

    def deviation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return tensors["sigma"] * noise

    def sample(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return (tensors["sigma"] * noise).to(weight.dtype)

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return torch.full_like(weight, math.inf)
