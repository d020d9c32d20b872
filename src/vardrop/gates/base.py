"""The gate: a module that owns the tensors of a feature-noise value and multiplies by its draw."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from vardrop.errors import VardropError
from vardrop.noisy import Noisy
from vardrop.posteriors import Tensors
from vardrop.values import Value


@dataclass(frozen=True)
class FeatureNoise(Value, ABC):
    """Multiplicative noise on features: a value with pure functions.

    Every method answers, in this order: which tensors it needs (`initial`), what one draw
    multiplies by (`multiplier`), what the mean multiplies by (`mean`), and its KL (`kl`).
    """

    learned: ClassVar[bool] = True

    @abstractmethod
    def initial(self, units: int) -> dict[str, Tensor]:
        """The tensors for this many units, at their initial values."""

    @abstractmethod
    def multiplier(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """One draw, broadcastable to x, whose units run along `axis`."""

    def mean(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor | None:
        """The expected multiplier, or None where it is one."""
        return None

    def kl(self, tensors: Tensors, units: int) -> Tensor | None:
        """KL to the method's prior, summed over the units; None where it has none."""
        return None

    def log_alpha(self, tensors: Tensors) -> Tensor | None:
        """log of noise variance over squared mean, a unit each, where the method has it."""
        return None


class Gate(Noisy):
    """Applies a `FeatureNoise` to the units along one axis of its input.

    Args:
        noise: the method.
        units: how many units there are along `axis`.
        axis: where they run: -1 for dense features, 1 for channels.

    >>> import torch, vardrop as vd
    >>> gate = vd.Gate(vd.BinaryDropout(drop_rate=0.5), units=3)
    >>> gate.eval()(torch.ones(1, 3))
    tensor([[1., 1., 1.]])
    """

    def __init__(self, noise: FeatureNoise, units: int, axis: int = -1) -> None:
        super().__init__()
        if not isinstance(noise, FeatureNoise):
            raise VardropError(f"Expected `noise` to be a FeatureNoise, but got {noise!r}.")
        if units < 1:
            raise VardropError(f"Expected `units` to be at least 1, but got {units}.")
        self.noise, self.units, self.axis = noise, units, axis
        self._names = tuple(noise.initial(units))
        for name, value in noise.initial(units).items():
            if noise.learned:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The noise tensors by name."""
        return {name: getattr(self, name) for name in self._names}

    def forward(self, x: Tensor) -> Tensor:
        """x times a draw while sampling, x times the mean otherwise."""
        if x.shape[self.axis] != self.units:
            raise VardropError(
                f"Expected axis {self.axis} of the input to have {self.units} units, "
                f"but got shape {tuple(x.shape)}."
            )
        if self.is_sampling:
            return x * self.noise.multiplier(x, self.axis, self.tensors)
        mean = self.noise.mean(x, self.axis, self.tensors)
        return x if mean is None else x * mean

    def kl(self) -> Tensor | None:
        return self.noise.kl(self.tensors, self.units)

    def log_alpha(self) -> Tensor | None:
        return self.noise.log_alpha(self.tensors)

    def noise_tensors(self) -> Iterator[Tensor]:
        yield from self.parameters(recurse=False)

    def extra_repr(self) -> str:
        return f"{self.noise!r}, units={self.units}, axis={self.axis}"


def along(axis: int, x: Tensor, per_unit: Tensor) -> Tensor:
    """View a vector with one entry a unit so that it broadcasts along `axis` of x."""
    shape = [1] * x.dim()
    shape[axis] = per_unit.numel()
    return per_unit.view(shape)
