"""Binary masks: at a fixed rate (binary dropout), or at a rate set by each unit (standout)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vardrop._core.sharding import square_sum
from vardrop.functional import uniform
from vardrop.gates.base import FeatureNoise, Granularity, Side, noise_shape
from vardrop.posteriors import Tensors, check_drop_rate


@dataclass(frozen=True)
class BinaryDropout(FeatureNoise):
    """Drop each element with probability `drop_rate` and scale up the others.

    multiplier = z / (1 - drop_rate), z ~ Bernoulli(1 - drop_rate), with mean 1 and variance
    drop_rate / (1 - drop_rate).

    With a prior `length_scale` l, a gate in a layer with weights W adds l^2 |W|^2 / (2 (1 -
    drop_rate)) to the KL. This is l^2 (1 - drop_rate) |M|^2 / 2 in the paper, with M = W / (1 -
    drop_rate), the value of a retained weight.

    Args:
        drop_rate: the probability that an element is dropped.
        granularity: whether each element, channel of an example, example or sequence has its own
            mask.
        length_scale: l of the prior, or None for no KL.

    >>> import torch
    >>> BinaryDropout(drop_rate=0.0).multiplier(torch.zeros(1, 2), -1, {})
    tensor([[1., 1.]])

    Srivastava et al. 2014, "Dropout", sec. 4; Gal & Ghahramani 2016, "Dropout as a Bayesian
    approximation", eq. 7 (variational inference).
    """

    drop_rate: float = 0.5
    granularity: Granularity = "element"
    length_scale: float | None = None
    positive: ClassVar[tuple[str, ...]] = ("length_scale",)
    learned: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_drop_rate(self.drop_rate)

    def multiplier(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """0 or 1 / (1 - drop_rate)."""
        mask = uniform(noise_shape(x, axis, self.granularity), x) >= self.drop_rate
        return mask.to(x.dtype) / (1 - self.drop_rate)

    def moments(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """1 and drop_rate / (1 - drop_rate)."""
        return torch.ones(1), torch.full((1,), self.drop_rate / (1 - self.drop_rate))

    def weight_kl(self, weight: Tensor, tensors: Tensors) -> Tensor | None:
        """l^2 |W|^2 / (2 (1 - drop_rate)) if there is a length scale l."""
        if self.length_scale is None:
            return None
        return square_sum(weight) * (0.5 * self.length_scale**2 / (1 - self.drop_rate))


@dataclass(frozen=True)
class Standout(FeatureNoise):
    """A unit with pre-activation x is kept with probability sigmoid(scale x + shift).

    multiplier = z, z ~ Bernoulli(sigmoid(scale x + shift)). The mean multiplies by the
    probability. It is applied to the outputs of a layer, before a non-linearity that keeps 0 and
    commutes with positive factors (ReLU). No gradient flows through the probabilities.

    Args:
        scale: the factor of x.
        shift: the shift.

    >>> import torch
    >>> Standout().mean(torch.zeros(1, 2), -1, {})
    tensor([[0.5000, 0.5000]])

    Ba & Frey 2013, "Adaptive dropout for training deep neural networks", eq. 3 and 4.
    """

    scale: float = 1.0
    shift: float = 0.0
    learned: ClassVar[bool] = False
    input_dependent: ClassVar[bool] = True
    sides: ClassVar[tuple[Side, Side]] = ("output", "output")  # before the non-linearity

    def multiplier(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """z ~ Bernoulli(sigmoid(scale x + shift))."""
        probability = self.mean(x, axis, tensors)
        return (uniform(probability.shape, probability) < probability).to(x.dtype)

    def mean(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """sigmoid(scale x + shift)."""
        return torch.sigmoid(self.scale * x.detach() + self.shift)
