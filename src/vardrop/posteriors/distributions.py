"""Gaussian posteriors with additive or multiplicative noise, variance layers, and dropout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vardrop._core.errors import VardropError
from vardrop.functional import (
    clamp_with_gradient,
    log_square,
    random_signs,
    to_float32_or_wider,
    uniform,
)
from vardrop.posteriors.base import (
    Axes,
    Noise,
    Posterior,
    Sharing,
    Tensors,
    check_drop_rate,
    check_log_variance,
    shared_shape,
)

__all__ = ["AdditiveGaussian", "Bernoulli", "MultiplicativeGaussian", "ZeroMean"]


@dataclass(frozen=True)
class AdditiveGaussian(Posterior):
    """w ~ N(weight, exp(log_sigma2)), one variance per weight.

    Args:
        log_sigma2: the initial log sigma^2.
        train_clip: in training mode, weights whose log alpha is at least this value are drawn
            around zero, so that their means learn from the KL alone. None draws every weight
            around its mean, as evaluation mode always does. The authors' code of sparse
            variational dropout clips at 3.

    >>> import torch
    >>> q = AdditiveGaussian(log_sigma2=0.0)
    >>> q.variance(torch.ones(2), q.initial(torch.ones(2), Axes((0,), (0,))))
    tensor([1., 1.])

    Molchanov, Ashukha & Vetrov 2017, sec. 4.2 (additive noise reparameterisation).
    """

    log_sigma2: float = -10.0
    train_clip: float | None = None
    gaussian: ClassVar[bool] = True
    zero_mean: ClassVar[bool] = False  # a constant, because every product asks for it
    positive: ClassVar[tuple[str, ...]] = ("train_clip",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_log_variance("log_sigma2", self.log_sigma2)

    def training_mean(self, weight: Tensor, tensors: Tensors, variance: Tensor | None) -> Tensor:
        """The weight, and zero if its log alpha is at least `train_clip`."""
        if self.train_clip is None:
            return weight
        with torch.no_grad():
            variance = self.variance(weight, tensors) if variance is None else variance
            signal = to_float32_or_wider(weight).square() * math.exp(self.train_clip) > variance
        return weight * signal

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        """log_sigma2, one per weight."""
        return {"log_sigma2": torch.full_like(to_float32_or_wider(weight), self.log_sigma2)}

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """exp(log_sigma2)."""
        return to_float32_or_wider(tensors["log_sigma2"]).exp()

    def log_variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """log_sigma2, whatever its size."""
        return to_float32_or_wider(tensors["log_sigma2"])

    def perturbation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        """exp(log_sigma2 / 2) noise."""
        return torch.exp(0.5 * to_float32_or_wider(tensors["log_sigma2"])) * noise


@dataclass(frozen=True)
class MultiplicativeGaussian(Posterior):
    """w ~ N(weight, alpha weight^2), with learned or fixed alpha.

    Args:
        alpha: the initial or fixed value.
        per: whether each weight, input, output or layer has an alpha.
        learned: whether alpha is learned.
        max_alpha: the upper bound of alpha, see `functional.clamp_with_gradient`. None means no
            bound.

    >>> import torch
    >>> q = MultiplicativeGaussian(alpha=0.25, per="layer")
    >>> q.variance(2 * torch.ones(2), q.initial(torch.ones(2), Axes((0,), (0,))))
    tensor([1., 1.])

    Kingma, Salimans & Welling 2015, sec. 3.2 (type B).
    """

    alpha: float = 1.0
    per: Sharing = "weight"
    learned: bool = True
    max_alpha: float | None = None
    gaussian: ClassVar[bool] = True
    positive: ClassVar[tuple[str, ...]] = ("alpha", "max_alpha")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_alpha is not None and self.alpha > self.max_alpha:
            raise VardropError(
                f"Expected `alpha` to be at most `max_alpha` = {self.max_alpha}, "
                f"but got {self.alpha}."
            )

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        """log_alpha, one per weight, input, output or layer, as `per` says."""
        shape = shared_shape(weight, axes, self.per)
        return {"log_alpha": to_float32_or_wider(weight).new_full(shape, math.log(self.alpha))}

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """alpha weight^2."""
        return self.log_alpha(weight, tensors).exp() * to_float32_or_wider(weight).square()

    def log_variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """log_alpha + log weight^2."""
        return self.log_alpha(weight, tensors) + log_square(weight)

    def perturbation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        """sqrt(alpha) weight noise."""
        return torch.exp(0.5 * self.log_alpha(weight, tensors)) * weight * noise

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        """The tensor itself, at most log `max_alpha`."""
        if self.max_alpha is None:
            return to_float32_or_wider(tensors["log_alpha"])
        return to_float32_or_wider(
            clamp_with_gradient(tensors["log_alpha"], -math.inf, math.log(self.max_alpha))
        )


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
    def gaussian(self) -> bool:
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
    learned: ClassVar[bool] = False

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
