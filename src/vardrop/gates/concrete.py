"""Relaxed masks: concrete dropout with a learned rate, and hard concrete gates (L0)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from vardrop._core.checks import check_number
from vardrop._core.errors import VardropError
from vardrop._core.sharding import square_sum
from vardrop.functional import bernoulli_entropy, concrete, concrete_mean_ratio, uniform
from vardrop.gates.base import FeatureNoise, Side, along, noise_shape
from vardrop.noisy import Relevance
from vardrop.posteriors import Tensors

_DENSE, _SPATIAL = 0.1, 2 / 3  # the authors' temperatures


@dataclass(frozen=True)
class ConcreteDropout(FeatureNoise):
    """x (1 - d) / (1 - p) with a relaxed Bernoulli(p) draw d, and one learned rate p per layer.

        KL = length_scale^2 |W|^2 / (2 (1 - p)) - K H(p)

    with K the number of input units (channels of a convolution, whatever its image size) and the
    entropy H of a Bernoulli(p). Biases are not regularised. A gate outside of a layer has only the
    second term.

    The mean multiplies by E (1 - d) / (1 - p), from quadrature. It is not one, because relaxed
    draws are biased: at p = 0.1 it is 0.950 for channels and 0.999 for dense features. The
    authors' code multiplies by 1.

    Args:
        drop_rate: the initial rate.
        temperature: of the relaxation. None uses the values of the authors: 0.1 for dense features
            (units along the last axis) and 2/3 for channels.
        length_scale: of the prior.
        granularity: "channel" draws one mask per channel, for convolutions. Dense features have one
            mask per element in both cases.

    >>> import torch
    >>> noise = ConcreteDropout(drop_rate=0.5)
    >>> noise.kl(noise.initial(10), units=10)
    tensor(-6.9315)

    Gal, Hron & Kendall 2017, "Concrete dropout", eq. 3 and 5.
    """

    drop_rate: float = 0.1
    temperature: float | None = None
    length_scale: float = 1e-2
    granularity: Literal["element", "channel", "sequence"] = "channel"
    positive: ClassVar[tuple[str, ...]] = ("length_scale", "temperature")

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "It is where the learned rate starts."
        check_number("drop_rate", self.drop_rate, above=0, below=1, remedy=remedy)

    def at_axis(self, axis: int) -> ConcreteDropout:
        """The same with the temperature for units along `axis`, if none was passed."""
        if self.temperature is not None:
            return self
        spatial = self.granularity == "channel" and axis != -1
        return replace(self, temperature=_SPATIAL if spatial else _DENSE)

    def initial(self, units: int) -> dict[str, Tensor]:
        """drop_logit, one number for the layer."""
        return {"drop_logit": torch.full((1,), math.log(self.drop_rate / (1 - self.drop_rate)))}

    def multiplier(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """(1 - d) / (1 - p) with a relaxed d."""
        logit = tensors["drop_logit"]
        shape = noise_shape(x, axis, self.granularity)
        temperature = self.at_axis(axis).temperature or _DENSE
        retained = concrete(-logit, uniform(shape, logit), temperature)
        return (retained / torch.sigmoid(-logit)).to(x.dtype)

    def unit_mean(self, tensors: Tensors) -> Tensor:
        """E (1 - d) / (1 - p), by quadrature."""
        return concrete_mean_ratio(-tensors["drop_logit"], self.temperature or _DENSE)

    def kl(self, tensors: Tensors, units: int) -> Tensor:
        """-K H(p), K units."""
        return -units * bernoulli_entropy(tensors["drop_logit"]).sum()

    def weight_kl(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """length_scale^2 |W|^2 / (2 (1 - p))."""
        # 1 / (1 - p) = 1 + exp(logit), bounded for a rate near one.
        inverse_keep = torch.exp(functional.softplus(tensors["drop_logit"].clamp(max=50.0)))
        return 0.5 * self.length_scale**2 * square_sum(weight) * inverse_keep.sum()


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
        return self.penalty * weight.numel() * self.open_probability(tensors).mean()

    def relevance(self, tensors: Tensors, units: int) -> Relevance:
        """The mean, kept above zero."""
        return Relevance(self.unit_mean(tensors), 0.0, True, "input")
