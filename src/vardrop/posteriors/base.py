"""What every posterior answers, and how noise tensors are shared over a weight."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from vardrop.checks import check_number, shown
from vardrop.errors import VardropError
from vardrop.functional import standard_normal
from vardrop.values import Value

Tensors = Mapping[str, Tensor]
Sharing = Literal["weight", "input", "output", "layer"]
Noise = Literal["gaussian", "sign", "uniform"]


class Axes(NamedTuple):
    """Which axes of a weight tensor run over its inputs and over its outputs."""

    input: tuple[int, ...]
    output: tuple[int, ...]


def shared_shape(weight: Tensor, axes: Axes, per: Sharing) -> tuple[int, ...]:
    """The shape of one entry a weight, input, output or layer, broadcastable to `weight`."""
    if per == "weight":
        return tuple(weight.shape)
    kept = {"input": axes.input, "output": axes.output, "layer": ()}[per]
    return tuple(n if i in kept else 1 for i, n in enumerate(weight.shape))


def log_square(weight: Tensor) -> Tensor:
    """log w^2, finite at w = 0."""
    return torch.log(weight.square() + torch.finfo(weight.dtype).tiny)


def check_drop_rate(drop_rate: float) -> None:
    """Refuse a drop rate outside [0, 1)."""
    real = isinstance(drop_rate, Real) and not isinstance(drop_rate, bool)
    if not (real and 0.0 <= drop_rate < 1.0):
        raise VardropError(
            f"Expected `drop_rate` to lie in [0, 1), but got {shown(drop_rate)}. "
            "It is the share that is dropped, not the share that is kept."
        )


def check_alpha(alpha: float, name: str = "alpha") -> None:
    """Refuse a noise-to-signal ratio that is not positive and finite."""
    if not (alpha > 0 and math.isfinite(alpha)):
        raise VardropError(f"Expected `{name}` to be positive and finite, but got {alpha}.")


def check_log_variance(name: str, value: float) -> None:
    """Refuse a logarithm whose exponential is zero or infinite in single precision."""
    remedy = "It is a logarithm: -10 is a standard deviation of 0.0067."
    check_number(name, value, at_least=-87, at_most=87, remedy=remedy)


@dataclass(frozen=True)
class Posterior(Value, ABC):
    """What every posterior can be asked."""

    symmetric: ClassVar[bool] = True  # w - E w and E w - w have the same distribution
    zero_mean: ClassVar[bool] = False

    @property
    def learned(self) -> bool:
        """Whether the noise tensors are parameters, not buffers."""
        return True

    @abstractmethod
    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        """The noise tensors for a weight, at their initial values."""

    @abstractmethod
    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """Var w, in the shape of `weight`."""

    @abstractmethod
    def deviation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        """w - E w for standard noise from `draw`."""

    @abstractmethod
    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """log(Var w / (E w)^2); broadcastable to the shape of `weight`."""

    def draw(self, weight: Tensor, axes: Axes, batch: tuple[int, ...] = ()) -> Tensor:
        """Standard noise for one weight tensor, or for a batch of them."""
        return standard_normal((*batch, *weight.shape), weight)

    def sample(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        """w for standard noise from `draw`."""
        return weight + self.deviation(weight, noise, tensors)
