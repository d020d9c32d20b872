"""Dropout in weight space."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from vardrop.functional import to_float32_or_wider, uniform
from vardrop.posteriors.base import Axes, Posterior, Sharing, Tensors, check_drop_rate, shared_shape

__all__ = ["Bernoulli"]


@dataclass(frozen=True)
class Bernoulli(Posterior):
    """w = weight * mask / (1 - drop_rate): the weight-space form of dropout.

    Args:
        drop_rate: the probability that a weight is dropped.
        per: "weight" is DropConnect. "input" drops all weights of an input together, which is
            dropout on that input.

    >>> import torch
    >>> q = Bernoulli(drop_rate=0.5)
    >>> q.variance(torch.tensor([2.0]), {})
    tensor([4.])

    Wan et al. 2013, "Regularization of neural networks using DropConnect"; Gal & Ghahramani 2016.
    """

    drop_rate: float = 0.5
    per: Literal["weight", "input"] = "weight"
    symmetric: ClassVar[bool] = False  # masks are skewed
    learned = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_drop_rate(self.drop_rate)

    @property
    def noise_per(self) -> Sharing:
        """One mask per weight or per input."""
        return self.per

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        """No tensors: the rate is a number."""
        return {}

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """weight^2 drop_rate / (1 - drop_rate)."""
        return to_float32_or_wider(weight).square() * (self.drop_rate / (1 - self.drop_rate))

    def draw(self, weight: Tensor, axes: Axes, batch: tuple[int, ...] = ()) -> Tensor:
        """mask / (1 - drop_rate), 0 or 1 / (1 - drop_rate)."""
        shape = (*batch, *shared_shape(weight, axes, self.per))
        mask = uniform(shape, weight) >= self.drop_rate
        return mask.to(weight.dtype) / (1 - self.drop_rate)

    def perturbation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        """weight (noise - 1)."""
        return weight * (noise - 1)

    def sample(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        """weight noise."""
        return weight * noise

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """log(drop_rate / (1 - drop_rate)), one number for all weights."""
        alpha = self.drop_rate / (1 - self.drop_rate)
        return weight.new_full((1,) * weight.dim(), math.log(alpha) if alpha else -math.inf)
