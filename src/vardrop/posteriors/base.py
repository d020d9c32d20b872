"""The interface of posteriors, and how weights share noise tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple

from torch import Tensor

from vardrop._core.checks import check_number, describe_value
from vardrop._core.errors import VardropError
from vardrop._core.values import Value
from vardrop.functional import log_square, normal_entropy, standard_normal

Tensors = Mapping[str, Tensor]
Sharing = Literal["weight", "input", "output", "layer"]
Noise = Literal["gaussian", "sign", "uniform"]


class Axes(NamedTuple):
    """Which axes of a weight tensor run over its inputs and over its outputs.

    Args:
        input: the axes over inputs.
        output: the axes over outputs.
    """

    input: tuple[int, ...]
    output: tuple[int, ...]


def shared_shape(weight: Tensor, axes: Axes, per: Sharing) -> tuple[int, ...]:
    """The shape of one entry per weight, input, output or layer, broadcastable to `weight`."""
    if per == "weight":
        return tuple(weight.shape)
    full = {"input": axes.input, "output": axes.output, "layer": ()}[per]
    return tuple(n if i in full else 1 for i, n in enumerate(weight.shape))


def check_drop_rate(drop_rate: float) -> None:
    """Raise an error for a drop rate outside [0, 1).

    Args:
        drop_rate: the rate.
    """
    real = isinstance(drop_rate, Real) and not isinstance(drop_rate, bool)
    if not (real and 0.0 <= drop_rate < 1.0):
        raise VardropError(
            f"Expected `drop_rate` to be in [0, 1), but got {describe_value(drop_rate)}. "
            "It is the dropped fraction, not the retained one."
        )


def check_log_variance(name: str, value: float) -> None:
    """Raise an error for a logarithm whose exponential is zero or infinite in single precision.

    Args:
        name: of the argument, for the message.
        value: the logarithm.
    """
    remedy = "It is a logarithm: -10 is a standard deviation of 0.0067."
    check_number(name, value, at_least=-87, at_most=87, remedy=remedy)


@dataclass(frozen=True)
class Posterior(Value, ABC):
    """A distribution q(w) of a weight tensor: a value with pure functions.

    Noise tensors have at least single precision, whatever the precision of the weight. Cast the
    converted model to change that.
    """

    @property
    def symmetric(self) -> bool:
        """Whether w - E w and E w - w have the same distribution."""
        return True

    @property
    def zero_mean(self) -> bool:
        """Whether E w = 0, so that all information is in the noise."""
        return False

    @property
    def gaussian(self) -> bool:
        """Whether the weights are independent normal numbers, and so pre-activations are normal."""
        return False

    @property
    def learned(self) -> bool:
        """Whether the noise tensors are parameters, not buffers."""
        return True

    @property
    def noise_per(self) -> Sharing | None:
        """Which weights share one noise number, or None if the posterior does not declare it."""
        return "weight" if self.gaussian else None

    def adds_variances(self, weight: Tensor, axes: Axes) -> bool:
        """Whether the variance of an output is a sum over its weights, because none share noise.

        Args:
            weight: the mean of the weight.
            axes: of its inputs and outputs.

        Returns:
            Whether it is the sum.
        """
        if self.noise_per == "input":
            units = (*axes.input, *axes.output)
            return all(n == 1 for i, n in enumerate(weight.shape) if i not in units)
        return self.noise_per == "weight"

    @abstractmethod
    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        """The noise tensors for a weight, at their initial values.

        Args:
            weight: the mean of the weight.
            axes: of its inputs and outputs.

        Returns:
            The tensors by name.
        """

    @abstractmethod
    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """Var w, in the shape of `weight`.

        Args:
            weight: the mean of the weight.
            tensors: the noise tensors by name.

        Returns:
            The variances.
        """

    def training_mean(self, weight: Tensor, tensors: Tensors, variance: Tensor | None) -> Tensor:
        """The mean of draws in training mode.

        Args:
            weight: the mean of the weight.
            tensors: the noise tensors by name.
            variance: Var w if it is already computed.

        Returns:
            The mean.
        """
        return weight

    @abstractmethod
    def perturbation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        """w - E w for standard noise from `draw`.

        Args:
            weight: the mean of the weight.
            noise: from `draw`.
            tensors: the noise tensors by name.

        Returns:
            The perturbations of the weights.
        """

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """log(Var w / (E w)^2), broadcastable to the shape of `weight`.

        Args:
            weight: the mean of the weight.
            tensors: the noise tensors by name.

        Returns:
            The ratios.
        """
        return self.log_variance(weight, tensors) - log_square(weight)

    def log_variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """log Var w. Override it if the variance itself may underflow.

        Args:
            weight: the mean of the weight.
            tensors: the noise tensors by name.

        Returns:
            The log variances, in the shape of `weight`.
        """
        return self.variance(weight, tensors).log()

    @property
    def has_entropy(self) -> bool:
        """Whether `entropy` is available, which a Monte-Carlo KL needs."""
        return self.gaussian or type(self).entropy is not Posterior.entropy

    def entropy(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """The differential entropy of each weight. Override it for weights that are not normal.

        Args:
            weight: the mean of the weight.
            tensors: the noise tensors by name.

        Returns:
            The entropies, in the shape of `weight`.
        """
        if not self.gaussian:
            raise VardropError(f"Expected a posterior with an `entropy`, but got {self!r}.")
        return normal_entropy(log_variance=self.log_variance(weight, tensors))

    def draw(self, weight: Tensor, axes: Axes, batch: tuple[int, ...] = ()) -> Tensor:
        """Standard noise for one weight tensor, or for a batch of them.

        Args:
            weight: the mean of the weight.
            axes: of its inputs and outputs.
            batch: the shape of the batch.

        Returns:
            The noise.
        """
        return standard_normal((*batch, *weight.shape), weight)

    def sample(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        """w for standard noise from `draw`, in the dtype of `weight`.

        Args:
            weight: the mean of the weight.
            noise: from `draw`.
            tensors: the noise tensors by name.

        Returns:
            The weights.
        """
        return (weight + self.perturbation(weight, noise, tensors)).to(weight.dtype)
