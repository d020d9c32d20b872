"""Likelihoods of numbers: one width of the noise, a width per example, or none."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vardrop._core.checks import check_number, check_shape, check_type
from vardrop._core.errors import VardropError
from vardrop._core.sharding import full_tensor
from vardrop.functional import standard_normal
from vardrop.functional.normal import LOG_2PI
from vardrop.likelihoods.base import Likelihood, Parts, TeacherOutput


class Gaussian(Likelihood):
    """-log N(target; output, std^2) with one standard deviation, fixed or learned.

    Args:
        std: the standard deviation, or its initial value.
        learned: whether it is learned.

    >>> import torch
    >>> likelihood = Gaussian(std=1.0)
    >>> likelihood(torch.zeros(1, 1), torch.zeros(1, 1)), likelihood.std
    (tensor(0.9189), tensor(1.))
    """

    log_std: Tensor
    defaults: ClassVar[dict[str, Any]] = {"std": None}
    scale_argument: ClassVar[str] = "std"

    def __init__(self, std: float = 1.0, learned: bool = False) -> None:
        super().__init__()
        check_number("std", std, above=0, remedy="Pass vardrop.Values() for outputs without noise.")
        check_type("learned", learned, bool, "True or False")
        log_std = torch.full((1,), math.log(std))
        if learned:
            self.log_std = nn.Parameter(log_std)
        else:
            self.register_buffer("log_std", log_std)

    @property
    def std(self) -> Tensor:
        """The current standard deviation of the targets, detached."""
        return full_tensor(self.log_std.detach()).exp().squeeze()

    def parts(self, draws: Tensor) -> Parts:
        """The draws, and std^2 for each."""
        return Parts(draws, self.std.square().to(draws).expand_as(draws))

    def log_density(self, draws: Tensor, y: Tensor) -> Tensor:
        """log N(y; draw, std^2)."""
        check_shape("target", y, draws.shape[1:], "output")
        z = (y - draws) * torch.exp(-self.log_std)
        return -(0.5 * (z.square() + LOG_2PI) + self.log_std)

    def sample(self, output: Tensor) -> Tensor:
        """output + std noise."""
        return output + self.std * standard_normal(output.shape, output)

    def frozen_copy(self) -> Gaussian:
        """A Gaussian with the current std."""
        likelihood = Gaussian()
        likelihood.log_std = full_tensor(self.log_std.detach()).clone()
        return likelihood


class HeteroscedasticGaussian(Likelihood):
    """-log N(target; mean, scale^2 exp(log_variance)), both from the last axis of the output.

    The last axis holds the means, then the log variances.

    Args:
        scale: the factor of the standard deviation. It is 1 in training.

    >>> import torch
    >>> HeteroscedasticGaussian()(torch.zeros(1, 2), torch.zeros(1, 1))
    tensor(0.9189)
    """

    defaults: ClassVar[dict[str, Any]] = {"scale": 1.0}
    scale_argument: ClassVar[str] = "scale"

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        check_number("scale", scale, above=0)
        self.scale = scale

    def _split(self, output: Tensor) -> tuple[Tensor, Tensor]:
        if output.shape[-1] % 2:
            raise VardropError(
                "Expected the output to hold a mean and a log variance per target, so an even last "
                f"axis, but got {output.shape[-1]} entries."
            )
        mean, log_variance = output.chunk(2, dim=-1)
        return mean, log_variance if self.scale == 1 else log_variance + 2 * math.log(self.scale)

    def parts(self, draws: Tensor) -> Parts:
        """Means and variances."""
        mean, log_variance = self._split(draws)
        return Parts(mean, log_variance.exp())

    def log_density(self, draws: Tensor, y: Tensor) -> Tensor:
        """log N(y; mean, variance)."""
        mean, log_variance = self._split(draws)
        check_shape("target", y, mean.shape[1:], "output")
        square = (y - mean).square() * torch.exp(-log_variance)
        return -0.5 * (square + log_variance + LOG_2PI)

    def sample(self, output: Tensor) -> Tensor:
        """mean + sqrt(variance) noise."""
        mean, log_variance = self._split(output)
        return mean + torch.exp(0.5 * log_variance) * standard_normal(mean.shape, mean)

    def distillation_loss(
        self, output: Tensor, teacher: TeacherOutput, temperature: float
    ) -> Tensor:
        """The KL from the normal with the teacher's mean and variance, without its constant."""
        mean, log_variance = self._split(output)
        square = (teacher.mean - mean).square() + teacher.std.square()
        return 0.5 * (square * torch.exp(-log_variance) + log_variance).mean()

    def locations(self, output: Tensor) -> Tensor:
        """The means."""
        return self._split(output)[0]

    def output_shape(self, mean: torch.Size) -> torch.Size:
        """As many log variances as means, along the last axis."""
        return torch.Size((*mean[:-1], 2 * mean[-1]))


class Values(Likelihood):
    """Outputs without a model of the noise of the targets, for prediction only.

    >>> import torch
    >>> Values().parts(torch.ones(8, 2, 1)).aleatoric.sum()
    tensor(0.)
    """

    def parts(self, draws: Tensor) -> Parts:
        """The draws, and no noise."""
        return Parts(draws, draws.new_zeros(()).expand_as(draws))

    def log_density(self, draws: Tensor, y: Tensor) -> Tensor:
        """Raises an error: there is no density."""
        raise VardropError(
            "Expected a likelihood with a density, but got Values(). "
            "Pass likelihood=vardrop.Gaussian(std) with the standard deviation of the targets."
        )

    def sample(self, output: Tensor) -> Tensor:
        """The output itself."""
        return output
