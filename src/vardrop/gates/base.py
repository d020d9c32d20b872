"""The gate: a module that owns the tensors of a feature-noise value and multiplies by its draw."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from vardrop._core.checks import check_choice, check_integer, check_type
from vardrop._core.errors import VardropError
from vardrop._core.kl_warning import count_pass
from vardrop._core.sharding import full_tensor
from vardrop._core.values import Value
from vardrop.functional import to_float32_or_wider
from vardrop.noisy import Noisy, Relevance
from vardrop.posteriors import Axes, Tensors

Side = Literal["input", "output"]
Granularity = Literal["element", "channel", "example", "sequence"]


@dataclass(frozen=True)
class FeatureNoise(Value, ABC):
    """Multiplicative noise on features: a value with pure functions.

    Every method defines, in this order: its tensors (`initial`, `statistics`), the multiplier of a
    draw (`multiplier`) and of the mean (`unit_mean`), its KL (`kl`, and `weight_kl` for a gate
    inside a layer), and which units it retains (`relevance`).
    """

    input_dependent: ClassVar[bool] = False  # the multiplier is a function of the features
    counts_weights: ClassVar[bool] = False  # `weight_kl` replaces `kl` for a gate inside a layer
    # Which units it gates, of dense layers and of convolutions.
    sides: ClassVar[tuple[Side, Side]] = ("input", "input")

    @property
    def learned(self) -> bool:
        """Whether the tensors are parameters, not buffers."""
        return True

    def at_axis(self, axis: int) -> FeatureNoise:
        """The noise of a new gate for units along `axis`, whose defaults may depend on the axis.

        Args:
            axis: of the units.

        Returns:
            The noise.
        """
        return self

    def initial(self, units: int) -> dict[str, Tensor]:
        """The tensors for this many units, at their initial values. By default there are none.

        Args:
            units: the number of units.

        Returns:
            The tensors by name.
        """
        return {}

    def statistics(self, units: int) -> dict[str, Tensor]:
        """Running statistics of the features, which no optimizer touches.

        Args:
            units: the number of units.

        Returns:
            The statistics by name.
        """
        return {}

    def observe(self, x: Tensor, axis: int, tensors: Tensors) -> None:
        """Update the statistics in place. Called in training mode only.

        Args:
            x: the features.
            axis: of the units.
            tensors: the tensors and statistics of the noise by name.
        """

    @abstractmethod
    def multiplier(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """One draw, broadcastable to x, whose units run along `axis`.

        Args:
            x: the features.
            axis: of the units.
            tensors: the tensors of the noise by name.

        Returns:
            The multiplier of the features.
        """

    def unit_mean(self, tensors: Tensors) -> Tensor | None:
        """The expected multiplier of each unit, or None if it is one.

        Args:
            tensors: the tensors of the noise by name.

        Returns:
            One number per unit or one for all, or None.
        """
        return None

    def mean(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor | None:
        """The expected multiplier, broadcastable to x, or None if it is one.

        Args:
            x: the features.
            axis: of the units.
            tensors: the tensors of the noise by name.

        Returns:
            The mean, or None.
        """
        unit_mean = self.at_axis(axis).unit_mean(tensors)
        return None if unit_mean is None else along(axis, x, unit_mean.to(x.dtype))

    def moments(self, tensors: Tensors) -> tuple[Tensor, Tensor] | None:
        """Mean and variance of a draw, per unit or shared, or None without a closed form.

        They describe draws: units that the mean sets to zero by a threshold are still drawn.

        Args:
            tensors: the tensors of the noise by name.

        Returns:
            Mean and variance, or None.
        """
        return None

    def kl(self, tensors: Tensors, units: int) -> Tensor | None:
        """KL to the prior of the method, summed over the units, or None without a prior.

        Args:
            tensors: the tensors of the noise by name.
            units: the number of units.

        Returns:
            A tensor without axes, or None.
        """
        return None

    def weight_kl(self, weight: Tensor, tensors: Tensors) -> Tensor | None:
        """The KL of the weights of the layer, for a gate inside a layer.

        The weight may be sharded over processes. `square_sum` and `weight.numel()` cover all parts.

        Args:
            weight: a weight of the layer.
            tensors: the tensors of the noise, for the units that the weight multiplies.

        Returns:
            A tensor without axes, or None.
        """
        return None

    def log_alpha(self, tensors: Tensors) -> Tensor | None:
        """log of noise variance over squared mean, per unit, or None without such a ratio.

        Args:
            tensors: the tensors of the noise by name.

        Returns:
            One number per unit or one for all, or None.
        """
        return None

    def relevance(self, tensors: Tensors, units: int) -> Relevance | None:
        """The score of each unit and the rule to retain it, or None without such a rule.

        Args:
            tensors: the tensors of the noise by name.
            units: the number of units.

        Returns:
            The scores and the rule, or None.
        """
        return None


class Gate(Noisy):
    """Applies a `FeatureNoise` to the units along one axis of its input.

    Args:
        noise: the method.
        units: the number of units along `axis`.
        axis: the axis of the units: -1 for dense features, 1 for channels.
        side: whether they are the inputs or the outputs of the layer that owns the gate.

    >>> import torch, vardrop as vd
    >>> gate = vd.Gate(vd.BinaryDropout(drop_rate=0.5), units=3)
    >>> gate.eval()(torch.ones(1, 3))
    tensor([[1., 1., 1.]])
    """

    def __init__(
        self, noise: FeatureNoise, units: int, axis: int = -1, side: Side = "input"
    ) -> None:
        super().__init__()
        check_type("noise", noise, FeatureNoise, "a FeatureNoise such as BinaryDropout()")
        check_integer("units", units, remedy="A gate needs features to act on.")
        check_type("axis", axis, int, "an integer")
        check_choice("side", side, ("input", "output"))
        noise = noise.at_axis(axis)
        self.noise, self.units, self.axis, self.side = noise, units, axis, side
        tensors, statistics = noise.initial(units), noise.statistics(units)
        self._names = (*tensors, *statistics)
        for name, tensor in (tensors | statistics).items():
            if noise.learned and name in tensors:
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The noise tensors by name, in at least single precision."""
        stored = {name: getattr(self, name) for name in self._names}
        return {name: to_float32_or_wider(full_tensor(t)) for name, t in stored.items()}

    def forward(self, x: Tensor) -> Tensor:
        """x times a draw while sampling, x times the mean otherwise."""
        if not -x.dim() <= self.axis < x.dim() or x.shape[self.axis] != self.units:
            raise VardropError(
                f"Expected axis {self.axis} of the input to have {self.units} units, "
                f"but got shape {tuple(x.shape)}."
            )
        if self.training:
            self.noise.observe(x, self.axis, {name: getattr(self, name) for name in self._names})
        if self.is_sampling:
            count_pass(self)
            return x * self.noise.multiplier(x, self.axis, self.tensors)
        mean = self.noise.mean(x, self.axis, self.tensors)
        return x if mean is None else x * mean

    def unit_mean(self) -> Tensor | None:
        """The expected multiplier of each unit, or None if it is one."""
        if self.noise.input_dependent:
            raise VardropError(
                "Expected a gate whose mean is a constant, but got "
                f"{type(self.noise).__name__}, which depends on its input and cannot be folded "
                "into weights. Keep the gate and use the model in evaluation mode."
            )
        mean = self.noise.unit_mean(self.tensors)
        return None if mean is None else mean.expand(self.units)

    def kl(self, value: bool = True) -> Tensor | None:
        """The KL of the noise to its prior, summed over the units."""
        return self.noise.kl(self.tensors, self.units)

    def weight_kl(self, weight: Tensor, select: Callable[[Tensor], Tensor]) -> Tensor | None:
        """The KL of a weight of the layer that owns the gate.

        Args:
            weight: the weight.
            select: maps one entry per unit to the entries of the units that the weight multiplies.

        Returns:
            A tensor without axes, or None.
        """
        tensors = {n: select(t) if t.shape == (self.units,) else t for n, t in self.tensors.items()}
        return self.noise.weight_kl(to_float32_or_wider(weight), tensors)

    def owes_kl(self) -> bool:
        with torch.no_grad():
            return self.kl() is not None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset the noise and the statistics of the features."""
        noise = self.noise
        for name, start in (noise.initial(self.units) | noise.statistics(self.units)).items():
            getattr(self, name).copy_(start)

    def get_log_alpha(self) -> Tensor | None:
        """log alpha of the noise, per unit, or None if the method has none."""
        return self.noise.log_alpha(self.tensors)

    def relevance(self) -> Relevance | None:
        """The rule of the method, on the inputs or outputs of the layer (`side`)."""
        relevance = self.noise.relevance(self.tensors, self.units)
        return None if relevance is None else replace(relevance, kind=self.side)

    def noise_names(self) -> Iterable[str]:
        """All of its tensors."""
        return self.state_dict()

    def extra_repr(self) -> str:
        return f"{self.noise!r}, units={self.units}, axis={self.axis}, side={self.side}"


def along(axis: int, x: Tensor, per_unit: Tensor) -> Tensor:
    """View a vector with one entry per unit so that it broadcasts along `axis` of x."""
    shape = [1] * x.dim()
    shape[axis] = per_unit.numel()
    return per_unit.view(shape)


def per_unit(factor: Tensor, weight: Tensor, side: Side, axes: Axes) -> Tensor:
    """View one number per input or output unit in a shape that multiplies a weight.

    Args:
        factor: one number per unit.
        weight: the weight to multiply.
        side: whether the units are inputs or outputs.
        axes: the axes of the weight.

    Returns:
        A view of the factor that broadcasts to the weight.
    """
    axis = axes.input[0] if side == "input" else axes.output[0]
    if factor.numel() == weight.shape[axis]:
        return along(axis, weight, factor)
    # Grouped convolution: the rows of the kernel (axis 0) use only the units of their group.
    groups = factor.numel() // weight.shape[axis]
    rows = factor.view(groups, -1).repeat_interleave(len(weight) // groups, 0)
    return rows.view(*rows.shape, *(1,) * (weight.dim() - 2))


def noise_shape(x: Tensor, axis: int, granularity: Granularity) -> tuple[int, ...]:
    """The shape of noise per element, per unit and example, or per example.

    Axes before the units count as examples: a dense feature over tokens (N, T, units) has one draw
    per unit, example and position. "sequence" is per unit and example, the same at all steps, for
    recurrent layers.

    >>> import torch
    >>> x = torch.zeros(8, 3, 5, 5)
    >>> [noise_shape(x, 1, g) for g in ("element", "channel", "example")]
    [(8, 3, 5, 5), (8, 3, 1, 1), (8, 1, 1, 1)]
    """
    if granularity == "element":
        return tuple(x.shape)
    units = axis % x.dim()
    last = min(0, units - 1) if granularity == "example" else units
    return tuple(n if i <= last else 1 for i, n in enumerate(x.shape))


def inverse_softplus(value: float) -> float:
    """The x with softplus(x) = value > 0."""
    return value + math.log(-math.expm1(-value))
