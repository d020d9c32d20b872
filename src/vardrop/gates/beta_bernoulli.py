"""Beta-Bernoulli dropout: sparse gates, and gates that open for the inputs that need the unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from vardrop._core.checks import check_number
from vardrop._core.errors import VardropError
from vardrop.functional import (
    clamp_with_gradient,
    concrete,
    kumaraswamy_beta_kl,
    kumaraswamy_log_mean,
    kumaraswamy_log_sample,
    log_square,
    logit_from_log,
    normal_kl,
    normal_like,
    uniform,
)
from vardrop.gates.base import FeatureNoise, Gate, Side, along, inverse_softplus, noise_shape
from vardrop.noisy import Relevance
from vardrop.posteriors import Tensors

_MOMENTUM, _EPS, _EDGE = 0.1, 1e-5, 1e-6  # of the running averages, and of a clipped probability


@dataclass(frozen=True)
class BetaBernoulli(FeatureNoise):
    """z ~ Bernoulli(pi) per unit and example, pi ~ Kumaraswamy(a, b) per unit and batch.

    The prior is pi ~ Beta(alpha, 1). The mean multiplies by E pi, or by zero if E pi is at most
    `threshold`. The gates are on the inputs of dense layers and on the output channels of
    convolutions.

    Args:
        alpha: of the prior, alpha / K in the paper. A small alpha favours closed gates.
        a: the initial a of the posterior. The authors use 0.3133 for LeNets and 2.127 for VGG.
        b: the initial b of the posterior.
        temperature: of the relaxed z.
        threshold: units with E pi above it are kept.

    >>> noise = BetaBernoulli(a=1.0)
    >>> noise.unit_mean(noise.initial(2))
    tensor([0.5000, 0.5000])

    Lee et al. 2018, "Adaptive network sparsification with dependent variational beta-Bernoulli
    dropout", eq. 12 to 15.
    """

    alpha: float = 1e-4
    a: float = 0.3133
    b: float = 1.0
    temperature: float = 0.1
    threshold: float = 1e-3
    positive: ClassVar[tuple[str, ...]] = ("alpha", "a", "b", "temperature", "threshold")
    sides: ClassVar[tuple[Side, Side]] = ("input", "output")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("threshold", self.threshold, below=1, remedy="Else every unit is closed.")

    def initial(self, units: int) -> dict[str, Tensor]:
        """raw_a and raw_b per unit, whose softplus is a and b."""
        return {
            "raw_a": torch.full((units,), inverse_softplus(self.a)),
            "raw_b": torch.full((units,), inverse_softplus(self.b)),
        }

    def parameters(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """a and b of the posterior, per unit, within a range in which all results are finite.

        Args:
            tensors: the tensors of the noise by name.

        Returns:
            a and b.
        """
        a = functional.softplus(clamp_with_gradient(tensors["raw_a"], -10.0, 50.0))
        return a, functional.softplus(clamp_with_gradient(tensors["raw_b"], -10.0, 50.0))

    def multiplier(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """A relaxed z per unit and example, with one pi per unit and batch."""
        a, b = self.parameters(tensors)
        logit = along(axis, x, logit_from_log(kumaraswamy_log_sample(a, b, uniform(a.shape, a))))
        noise = uniform(noise_shape(x, axis, "channel"), logit)
        return concrete(logit, noise, self.temperature).to(x.dtype)

    def retain_probability(self, tensors: Tensors) -> Tensor:
        """E pi, per unit.

        Args:
            tensors: the tensors of the noise by name.

        Returns:
            The probabilities.
        """
        return kumaraswamy_log_mean(*self.parameters(tensors)).exp()

    def unit_mean(self, tensors: Tensors) -> Tensor:
        """E pi, or zero if it is at most the threshold."""
        mean = self.retain_probability(tensors)
        return torch.where(mean > self.threshold, mean, 0.0)

    def kl(self, tensors: Tensors, units: int) -> Tensor:
        """KL(Kumaraswamy(a, b) || Beta(alpha, 1)), summed over the units."""
        return kumaraswamy_beta_kl(*self.parameters(tensors), self.alpha).sum()

    def relevance(self, tensors: Tensors, units: int) -> Relevance:
        """E pi, kept above the threshold."""
        return Relevance(self.retain_probability(tensors), self.threshold, True, "input")


@dataclass(frozen=True)
class DependentBetaBernoulli(FeatureNoise):
    """z = z_base z_input, z_input ~ Bernoulli(clip(scale h + shift + std eps, 0, 1)).

    h is the activation of the unit (averaged over space for channels), detached and standardised by
    running averages. These are used in training too, so that the gate of an example does not depend
    on its batch. The shift has the posterior N(shift, std^2), with one draw per batch, and the
    prior N(0, prior_std^2).

    By default the gate takes over a trained `BetaBernoulli` gate. The tensors of that gate are
    frozen, and its KL is a constant that is left out.

    Args:
        base: the Beta-Bernoulli gate under it.
        joint: whether both gates start together, without a trained base.
        scale: the initial factor of h.
        shift: the initial shift.
        std: the initial standard deviation of the shift.
        prior_std: of the prior of the shift.

    >>> gate = Gate(DependentBetaBernoulli(joint=True), units=3)
    >>> [name for name, _ in gate.named_parameters()]
    ['raw_a', 'raw_b', 'scale', 'shift', 'raw_std']

    Lee et al. 2018, "Adaptive network sparsification with dependent variational beta-Bernoulli
    dropout", eq. 16 to 21.
    """

    base: BetaBernoulli = field(default_factory=BetaBernoulli)
    joint: bool = False
    scale: float = 1.0
    shift: float = 1.0
    std: float = 1.0
    prior_std: float = math.sqrt(5.0)
    input_dependent: ClassVar[bool] = True
    sides: ClassVar[tuple[Side, Side]] = BetaBernoulli.sides
    positive: ClassVar[tuple[str, ...]] = ("scale", "std", "prior_std")

    def take_over(self, gate: Gate) -> Gate:
        """Make a gate with the a and b of a trained Beta-Bernoulli gate, frozen, and new tensors.

        Args:
            gate: the trained gate.

        Returns:
            The new gate.
        """
        noise = replace(self, base=cast(BetaBernoulli, gate.noise))
        dependent = Gate(replace(noise, joint=True), gate.units, gate.axis, gate.side)
        dependent.to(gate.get_parameter("raw_a")).train(gate.training)
        for name, tensor in gate.named_parameters(recurse=False):
            setattr(dependent, name, tensor.requires_grad_(False))
        dependent.noise = noise
        return dependent

    def at_axis(self, axis: int) -> DependentBetaBernoulli:
        """Raises an error for a new gate that needs a trained base."""
        if not self.joint:
            raise VardropError(
                "Expected a trained Beta-Bernoulli gate under the dependent one, but got none. "
                "Convert with beta_bernoulli() and train first, or use joint=True."
            )
        return self

    def initial(self, units: int) -> dict[str, Tensor]:
        """Its tensors and the tensors of the base."""
        return {
            **self.base.initial(units),
            "scale": torch.full((units,), self.scale),
            "shift": torch.full((units,), self.shift),
            "raw_std": torch.full((units,), inverse_softplus(self.std)),
        }

    def statistics(self, units: int) -> dict[str, Tensor]:
        """Running mean and variance of the activations, and how many batches they saw."""
        zeros, ones = torch.zeros(units), torch.ones(units)
        return {"running_mean": zeros, "running_var": ones, "batches": torch.zeros(())}

    @torch.no_grad()
    def observe(self, x: Tensor, axis: int, tensors: Tensors) -> None:
        """A plain average over the first batches, then an exponential one."""
        mean, variance = tensors["running_mean"], tensors["running_var"]
        rows = self._pool(x, axis).movedim(axis, -1).reshape(-1, x.shape[axis]).to(mean)
        if rows.shape[0] < 2:
            return  # one example has no variance
        rate = torch.clamp(1 / (tensors["batches"] + 1), min=_MOMENTUM)
        for old, new in ((mean, rows.mean(0)), (variance, rows.var(0, unbiased=False))):
            step = new - old
            # As torch.lerp, exact at both ends and for equal tensors, but with a rule for vmap.
            old.copy_(torch.where(rate < 0.5, old + rate * step, new - step * (1 - rate)))
        tensors["batches"].add_(1)

    @staticmethod
    def _pool(x: Tensor, axis: int) -> Tensor:
        space = tuple(range(axis % x.dim() + 1, x.dim()))
        return x.detach().mean(space, keepdim=True) if space else x.detach()

    def _activation(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        h = self._pool(x, axis).to(tensors["running_mean"].dtype)
        deviation = torch.rsqrt(tensors["running_var"] + _EPS)
        h = (h - along(axis, x, tensors["running_mean"])) * along(axis, x, deviation)
        return h * along(axis, x, tensors["scale"]) + along(axis, x, tensors["shift"])

    def multiplier(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """z_base z_input, both relaxed."""
        std = functional.softplus(tensors["raw_std"])
        noise = along(axis, x, std * normal_like(std))
        phi = (self._activation(x, axis, tensors) + noise).clamp(_EDGE, 1 - _EDGE)
        draw = uniform(noise_shape(x, axis, "channel"), std)
        z = concrete(torch.logit(phi), draw, self.base.temperature)
        return z.to(x.dtype) * self.base.multiplier(x, axis, tensors)

    def mean(self, x: Tensor, axis: int, tensors: Tensors) -> Tensor:
        """E pi clip(scale h + shift, 0, 1), or zero if that is at most the threshold."""
        base = along(axis, x, self.base.unit_mean(tensors))
        open_ = base * self._activation(x, axis, tensors).clamp(0, 1)
        return torch.where(open_ > self.base.threshold, open_, 0.0).to(x.dtype)

    def kl(self, tensors: Tensors, units: int) -> Tensor:
        """KL(N(shift, std^2) || N(0, prior_std^2)), plus the KL of the base if `joint`."""
        log_variance = log_square(functional.softplus(tensors["raw_std"]))
        zero, prior_std = log_variance.new_zeros(()), log_variance.new_tensor(self.prior_std)
        shift_kl = normal_kl(tensors["shift"], zero, prior_std, log_variance=log_variance).sum()
        return shift_kl + self.base.kl(tensors, units) if self.joint else shift_kl

    def relevance(self, tensors: Tensors, units: int) -> Relevance:
        """The relevance of the base: a unit is removed for all inputs or for none."""
        return self.base.relevance(tensors, units)
