"""Dependent Beta-Bernoulli dropout: a gate that opens for the inputs that need the unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from vardrop._core.errors import VardropError
from vardrop.functional import concrete, log_square, normal_kl, normal_like, uniform
from vardrop.gates.base import FeatureNoise, Gate, Side, along, inverse_softplus, noise_shape
from vardrop.gates.beta_bernoulli import BetaBernoulli
from vardrop.noisy import Relevance
from vardrop.posteriors import Tensors

_MOMENTUM, _EPS, _EDGE = 0.1, 1e-5, 1e-6


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
