"""L0 regularisation: hard concrete gates, which are exactly zero with positive probability."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vardrop._core.checks import check_number
from vardrop._core.errors import VardropError
from vardrop.functional import concrete, uniform
from vardrop.gates.base import FeatureNoise, Side, along, noise_shape
from vardrop.noisy import Relevance
from vardrop.posteriors import Tensors


@dataclass(frozen=True)
class HardConcrete(FeatureNoise):
    """z = min(1, max(0, s (high - low) + low)) with one concrete draw s per unit and example.

    The KL is `penalty` times the expected number of retained weights,

        sum_units |weights of the unit| P(z > 0),  P(z > 0) = sigmoid(logit - t log(-low / high)),

    with the temperature t. A gate outside of a layer counts one weight per unit. The mean
    multiplies by min(1, max(0, sigmoid(logit) (high - low) + low)), and a unit is kept if this is
    positive.

    Args:
        penalty: lambda N of the paper (0.1 on MNIST).
        drop_rate: the initial rate. Up to (high - 1) / (high - low), which is 1/12 by default, the
            mean of the gates is exactly one, so the outputs of a trained model are unchanged. The
            authors start untrained models at 0.2 to 0.5.
        temperature: of the concrete draw.
        low: the lower end of the stretched range, below 0.
        high: the upper end of the stretched range, above 1.

    >>> noise = HardConcrete()
    >>> noise.unit_mean(noise.initial(2))
    tensor([1., 1.])

    Louizos, Welling & Kingma 2018, "Learning sparse neural networks through L0 regularization",
    eq. 10 to 13.
    """

    penalty: float = 0.1
    drop_rate: float = 0.05
    temperature: float = 2 / 3
    low: float = -0.1
    high: float = 1.1
    positive: ClassVar[tuple[str, ...]] = ("penalty", "temperature")
    counts_weights: ClassVar[bool] = True  # the penalty is on the expected number of weights
    sides: ClassVar[tuple[Side, Side]] = ("input", "output")

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "It is where the learned gates start."
        check_number("drop_rate", self.drop_rate, above=0, below=1, remedy=remedy)
        if not (self.low < 0 and self.high > 1):
            raise VardropError(
                f"Expected `low` < 0 and `high` > 1, but got {self.low} and {self.high}. "
                "The stretch is what lets a gate close."
            )

    def initial(self, units: int) -> dict[str, Tensor]:
        """logit per unit."""
        return {"logit": torch.full((units,), math.log((1 - self.drop_rate) / self.drop_rate))}

    def _stretch(self, s: Tensor) -> Tensor:
        return (s * (self.high - self.low) + self.low).clamp(0, 1)

    def multiplier(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """A stretched concrete draw, cut to [0, 1]."""
        logit = along(axis, x, tensors["logit"])
        noise = uniform(noise_shape(x, axis, "channel"), logit)
        return self._stretch(concrete(logit, noise, self.temperature)).to(x.dtype)

    def open_probability(self, tensors: Tensors) -> Tensor:
        """P(z > 0), per unit.

        Args:
            tensors: the tensors of the noise by name.

        Returns:
            The probabilities.
        """
        return torch.sigmoid(tensors["logit"] - self.temperature * math.log(-self.low / self.high))

    def unit_mean(self, tensors: Tensors) -> Tensor:
        """sigmoid(logit), stretched and cut to [0, 1]."""
        return self._stretch(torch.sigmoid(tensors["logit"]))

    def kl(self, tensors: Tensors, units: int) -> Tensor:
        """penalty sum P(z > 0). Inside a layer its weights count instead of its units."""
        return self.penalty * self.open_probability(tensors).sum()

    def weight_kl(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """penalty sum P(z > 0) over the weights."""
        open_probability = self.open_probability(tensors)
        return self.penalty * weight.numel() * open_probability.mean()

    def relevance(self, tensors: Tensors, units: int) -> Relevance:
        """The mean, kept above zero."""
        return Relevance(self.unit_mean(tensors), 0.0, True, "input")
