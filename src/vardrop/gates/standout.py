"""Standout: dropout whose rate depends on the unit's own pre-activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vardrop.functional import uniform
from vardrop.gates.base import FeatureNoise, Side
from vardrop.posteriors import Tensors


@dataclass(frozen=True)
class Standout(FeatureNoise):
    """A unit with pre-activation x is kept with probability sigmoid(scale x + shift).

    multiplier = z, z ~ Bernoulli(sigmoid(scale x + shift)); the mean multiplies by the
    probability. It sits on the outputs of a layer, before a non-linearity that keeps 0 and
    commutes with positive factors (ReLU). No gradient flows through the probabilities.

    >>> import torch
    >>> Standout().mean(torch.zeros(1, 2), -1, {})
    tensor([[0.5000, 0.5000]])

    Ba & Frey 2013, "Adaptive dropout for training deep neural networks", eq. 3 and 4.
    """

    scale: float = 1.0
    shift: float = 0.0
    input_dependent: ClassVar[bool] = True

    @property
    def learned(self) -> bool:
        """False: scale and shift are fixed."""
        return False

    def side(self, spatial: int) -> Side:
        """Outputs, before the non-linearity."""
        return "output"

    def initial(self, units: int) -> dict[str, Tensor]:
        """No tensors: scale and shift are numbers."""
        return {}

    def multiplier(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """z ~ Bernoulli(sigmoid(scale x + shift))."""
        probability = self.mean(x, axis, tensors)
        return (uniform(probability.shape, probability) < probability).to(x.dtype)

    def mean(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """sigmoid(scale x + shift)."""
        return torch.sigmoid(self.scale * x.detach() + self.shift)
