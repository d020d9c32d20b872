"""The interface of likelihoods, and sums over the targets of an example."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.checks import check_shape
from vardrop._core.errors import VardropError


class Parts(NamedTuple):
    """Draws (S, N, ...) by meaning.

    `location` is averaged into the mean. `log_probs` has one entry per outcome, along the class
    axis of the likelihood. `probs` is the probability of every class, or of a one. `aleatoric` is
    the entropy (classes) or the variance (values) of the target given the draw.
    """

    location: Tensor
    aleatoric: Tensor
    log_probs: Tensor | None = None
    probs: Tensor | None = None


class TeacherOutput(NamedTuple):
    """The predictive mean, standard deviation and log-probabilities of N examples."""

    mean: Tensor
    std: Tensor
    log_probs: Tensor | None


class Likelihood(nn.Module, ABC):
    """p(y | output)."""

    class_axis: int | None = None  # the axis of outcomes in the log-probabilities (N, ...)
    defaults: ClassVar[dict[str, Any]] = {}  # arguments, each stored under its name
    scale_argument: ClassVar[str] = ""  # the argument that `scaled` multiplies

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean NLL of an example, in nats: summed over its targets, averaged over examples."""
        return -sum_targets(self.log_density(output.unsqueeze(0), target).squeeze(0), 1).mean()

    def valid_mask(self, y: Tensor) -> Tensor:
        """True for targets (N, ...) that count: all except an ignored class."""
        return torch.ones_like(y, dtype=torch.bool)

    @abstractmethod
    def parts(self, draws: Tensor) -> Parts:
        """Outputs (S, N, ...) by meaning."""

    @abstractmethod
    def log_density(self, draws: Tensor, y: Tensor) -> Tensor:
        """log p of every target under every draw, (S, N, ...)."""

    def log_prob(self, draws: Tensor, y: Tensor) -> Tensor:
        """log p(y | x) of every example, (N,), from outputs (S, N, ...).

        log 1/S sum_s prod_t p(y_t | draw s), over all targets of an example. It is finite if one
        draw is finite.
        """
        each = sum_targets(self.log_density(draws, y), 2)
        return torch.logsumexp(each, 0) - math.log(len(each))

    @abstractmethod
    def sample(self, output: Tensor) -> Tensor:
        """Draw one target for every example."""

    def distillation_loss(
        self, output: Tensor, teacher: TeacherOutput, temperature: float
    ) -> Tensor:
        """The loss of a student with this output under the predictive distribution of a teacher."""
        return functional.mse_loss(output, teacher.mean)

    def locations(self, output: Tensor) -> Tensor:
        """The part of an output that is averaged into the mean."""
        return output

    def output_shape(self, mean: torch.Size) -> torch.Size:
        """The shape of an output whose locations have this shape."""
        return mean

    def check_target(self, mean: Tensor, y: Tensor) -> None:
        """Raise an error for a target that does not fit locations (N, ...)."""
        check_shape("y", y, mean.shape, "prediction")

    def check_outcomes(self, shape: torch.Size) -> None:
        """Raise an error for outputs (N, ...) that this likelihood has no meaning for."""
        return

    def frozen_copy(self) -> Likelihood:
        """The same with copies of the current tensors, which training does not change."""
        return self

    def scaled(self, factor: float) -> Likelihood:
        """The same with its standard deviation or temperature multiplied by `factor`, fixed.

        `vardrop.calibrate` finds the factor that fits held-out data.
        """
        if not self.scale_argument:
            raise VardropError(f"Expected a likelihood with noise, but got {self!r}.")
        arguments = {name: getattr(self, name) for name in self.defaults}
        arguments[self.scale_argument] = float(arguments[self.scale_argument]) * factor
        return type(self)(**arguments)

    def extra_repr(self) -> str:
        arguments = {name: getattr(self, name) for name in self.defaults}
        changed = [(k, v) for k, v in arguments.items() if v != self.defaults[k]]
        return ", ".join(f"{k}={v}" if isinstance(v, int) else f"{k}={v:.4g}" for k, v in changed)

    def apply_temperature(self, log_probs: Tensor, temperature: float) -> Tensor:
        """Divide log-probabilities (N, ...) by a temperature and normalise them."""
        if self.class_axis is None:
            raise VardropError(f"Expected class probabilities, but got {self!r}.")
        return functional.log_softmax(log_probs / temperature, self.class_axis)


def sum_targets(values: Tensor, leading: int) -> Tensor:
    """Sums over the axes after the first `leading` ones."""
    return values.flatten(leading).sum(leading) if values.dim() > leading else values
