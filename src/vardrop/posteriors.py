"""Posteriors q(w) over weights: frozen values with pure functions; the layer owns the tensors.

Every posterior answers the same questions about a weight tensor and its noise tensors:

    initial(weight, axes)       the noise tensors that a layer must own
    variance(weight, tensors)   Var w, elementwise
    draw(weight, axes, batch)   standard noise
    deviation(weight, noise, tensors)   w - E w for that noise
    log_alpha(weight, tensors)  log of Var w / (E w)^2

`weight` is always the posterior mean.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from vardrop.errors import VardropError
from vardrop.functional import clamp_max, random_signs
from vardrop.values import Value

Tensors = Mapping[str, Tensor]
Sharing = Literal["weight", "input", "output", "layer"]
Noise = Literal["gaussian", "sign", "uniform"]


class Axes(NamedTuple):
    """Which axes of a weight tensor run over its inputs and over its outputs."""

    input: tuple[int, ...]
    output: tuple[int, ...]


def _shared_shape(weight: Tensor, axes: Axes, per: Sharing) -> tuple[int, ...]:
    if per == "weight":
        return tuple(weight.shape)
    kept = {"input": axes.input, "output": axes.output, "layer": ()}[per]
    return tuple(n if i in kept else 1 for i, n in enumerate(weight.shape))


def _log_square(weight: Tensor) -> Tensor:
    return torch.log(weight.square() + torch.finfo(weight.dtype).tiny)


def _check_sharing(per: str) -> None:
    if per not in ("weight", "input", "output", "layer"):
        raise VardropError(
            f"Expected `per` to be 'weight', 'input', 'output' or 'layer', but got {per!r}."
        )


def check_drop_rate(drop_rate: float) -> None:
    """Refuse a drop rate outside [0, 1)."""
    if not 0.0 <= drop_rate < 1.0:
        raise VardropError(
            f"Expected `drop_rate` to lie in [0, 1), but got {drop_rate}. "
            "It is the share that is dropped, not the share that is kept."
        )


def check_alpha(alpha: float, name: str = "alpha") -> None:
    """Refuse a noise-to-signal ratio that is not positive and finite."""
    if not (alpha > 0 and math.isfinite(alpha)):
        raise VardropError(f"Expected `{name}` to be positive and finite, but got {alpha}.")


@dataclass(frozen=True)
class Posterior(Value, ABC):
    """What every posterior can be asked."""

    symmetric: ClassVar[bool] = True  # w - E w and E w - w have the same distribution
    zero_mean: ClassVar[bool] = False
    learned: ClassVar[bool] = True  # the noise tensors are parameters, not buffers

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
        return torch.randn(*batch, *weight.shape, dtype=weight.dtype, device=weight.device)

    def sample(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        """w for standard noise from `draw`."""
        return weight + self.deviation(weight, noise, tensors)


@dataclass(frozen=True)
class AdditiveGaussian(Posterior):
    """w ~ N(weight, exp(log_sigma2)), one variance a weight.

    >>> import torch
    >>> q = AdditiveGaussian(log_sigma2=0.0)
    >>> q.variance(torch.ones(2), q.initial(torch.ones(2), Axes((0,), (0,))))
    tensor([1., 1.])

    Molchanov, Ashukha & Vetrov 2017, sec. 4.2 (additive noise reparameterisation).
    """

    log_sigma2: float = -10.0

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        return {"log_sigma2": torch.full_like(weight, self.log_sigma2)}

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return tensors["log_sigma2"].exp()

    def deviation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return torch.exp(0.5 * tensors["log_sigma2"]) * noise

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return tensors["log_sigma2"] - _log_square(weight)


@dataclass(frozen=True)
class MultiplicativeGaussian(Posterior):
    """w ~ N(weight, alpha weight^2), alpha per weight, input, output or layer, learned or fixed.

    `max_alpha` bounds alpha by projection (see `functional.clamp_max`).

    >>> import torch
    >>> q = MultiplicativeGaussian(alpha=0.25, per="layer")
    >>> q.variance(2 * torch.ones(2), q.initial(torch.ones(2), Axes((0,), (0,))))
    tensor([1., 1.])

    Kingma, Salimans & Welling 2015, sec. 3.2 (type B).
    """

    alpha: float = 1.0
    per: Sharing = "weight"
    learned: bool = True  # type: ignore[misc]
    max_alpha: float | None = None

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        _check_sharing(self.per)
        if self.max_alpha is not None:
            check_alpha(self.max_alpha, "max_alpha")
            if self.alpha > self.max_alpha:
                raise VardropError(
                    f"Expected `alpha` to be at most `max_alpha` = {self.max_alpha}, "
                    f"but got {self.alpha}."
                )

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        shape = _shared_shape(weight, axes, self.per)
        return {"log_alpha": weight.new_full(shape, math.log(self.alpha))}

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return self.log_alpha(weight, tensors).exp() * weight.square()

    def deviation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return torch.exp(0.5 * self.log_alpha(weight, tensors)) * weight * noise

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        if self.max_alpha is None:
            return tensors["log_alpha"]
        return clamp_max(tensors["log_alpha"], math.log(self.max_alpha))


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
    zero_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.noise not in ("gaussian", "sign", "uniform"):
            raise VardropError(
                f"Expected `noise` to be 'gaussian', 'sign' or 'uniform', but got {self.noise!r}."
            )

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        return {"sigma": weight.detach().clone()}

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        square = tensors["sigma"].square()
        return square / 3 if self.noise == "uniform" else square

    def draw(self, weight: Tensor, axes: Axes, batch: tuple[int, ...] = ()) -> Tensor:
        shape = (*batch, *weight.shape)
        if self.noise == "sign":
            return random_signs(shape, weight)
        if self.noise == "uniform":
            return torch.rand(shape, dtype=weight.dtype, device=weight.device) * 2 - 1
        return super().draw(weight, axes, batch)

    def deviation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return tensors["sigma"] * noise

    def sample(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return tensors["sigma"] * noise

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return torch.full_like(weight, math.inf)


@dataclass(frozen=True)
class Bernoulli(Posterior):
    """w = weight * mask / (1 - drop_rate): the weight-space form of dropout.

    `per="weight"` is DropConnect; `per="input"` drops all weights of an input together, which is
    dropout on that input.

    >>> import torch
    >>> q = Bernoulli(drop_rate=0.5)
    >>> q.variance(torch.tensor([2.0]), {})
    tensor([4.])

    Wan et al. 2013, "Regularization of neural networks using DropConnect"; Gal & Ghahramani 2016.
    """

    drop_rate: float = 0.5
    per: Literal["weight", "input"] = "weight"
    symmetric: ClassVar[bool] = False
    learned: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_drop_rate(self.drop_rate)
        if self.per not in ("weight", "input"):
            raise VardropError(f"Expected `per` to be 'weight' or 'input', but got {self.per!r}.")

    def initial(self, weight: Tensor, axes: Axes) -> dict[str, Tensor]:
        return {}

    def variance(self, weight: Tensor, tensors: Tensors) -> Tensor:
        return weight.square() * (self.drop_rate / (1 - self.drop_rate))

    def draw(self, weight: Tensor, axes: Axes, batch: tuple[int, ...] = ()) -> Tensor:
        shape = (*batch, *_shared_shape(weight, axes, self.per))
        kept = torch.rand(shape, dtype=weight.dtype, device=weight.device) >= self.drop_rate
        return kept.to(weight.dtype) / (1 - self.drop_rate)

    def deviation(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return weight * (noise - 1)

    def sample(self, weight: Tensor, noise: Tensor, tensors: Tensors) -> Tensor:
        return weight * noise

    def log_alpha(self, weight: Tensor, tensors: Tensors) -> Tensor:
        alpha = self.drop_rate / (1 - self.drop_rate)
        return weight.new_full((1,) * weight.dim(), math.log(alpha) if alpha else -math.inf)
