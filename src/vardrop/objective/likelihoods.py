"""Likelihoods: modules that map (output, target) to the mean negative log-likelihood.

The mean is over examples (axis 0); within one example it is a sum over targets, pixels or tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop.errors import VardropError

_LOG_2PI = math.log(2 * math.pi)


class Categorical(nn.Module):
    """-log softmax(output)[target]; output (N, C, ...), target (N, ...) of class indices.

    An image of classes, or a sequence of tokens, is one example: its NLL is the sum over positions.

    >>> import torch
    >>> Categorical()(torch.zeros(1, 2), torch.tensor([1]))
    tensor(0.6931)
    """

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean NLL of an example: summed over its positions, averaged over examples."""
        if output.dim() <= 2:
            return functional.cross_entropy(output, target)
        loss = functional.cross_entropy(output, target, reduction="none")
        return loss.flatten(1).sum(1).mean()


class Bernoulli(nn.Module):
    """-log p(target) for independent binary targets; output holds logits.

    >>> import torch
    >>> Bernoulli()(torch.zeros(2), torch.tensor([0.0, 1.0]))
    tensor(0.6931)
    """

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean NLL of an example: summed over its targets, averaged over examples."""
        loss = functional.binary_cross_entropy_with_logits(
            output, target.to(output.dtype), reduction="none"
        )
        return loss.flatten(1).sum(1).mean() if loss.dim() > 1 else loss.mean()


class Gaussian(nn.Module):
    """-log N(target; output, std^2) with one standard deviation, fixed or learned.

    >>> import torch
    >>> Gaussian(std=1.0)(torch.zeros(1, 1), torch.zeros(1, 1))
    tensor(0.9189)
    """

    log_std: Tensor

    def __init__(self, std: float = 1.0, learned: bool = False) -> None:
        super().__init__()
        if not (std > 0 and math.isfinite(std)):
            raise VardropError(f"Expected `std` to be positive and finite, but got {std}.")
        value = torch.tensor(math.log(std))
        if learned:
            self.log_std = nn.Parameter(value)
        else:
            self.register_buffer("log_std", value)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean NLL of an example: summed over its targets, averaged over examples."""
        _check_same_shape(output, target)
        z = (target - output) * torch.exp(-self.log_std)
        loss = 0.5 * (z.square() + _LOG_2PI) + self.log_std
        return loss.flatten(1).sum(1).mean() if loss.dim() > 1 else loss.mean()


class HeteroscedasticGaussian(nn.Module):
    """-log N(target; mean, exp(log_variance)): the net's last axis holds means, then log variances.

    >>> import torch
    >>> HeteroscedasticGaussian()(torch.zeros(1, 2), torch.zeros(1, 1))
    tensor(0.9189)
    """

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean NLL of an example: summed over its targets, averaged over examples."""
        if output.shape[-1] % 2:
            raise VardropError(
                "Expected `output` to hold a mean and a log variance a target, so an even last "
                f"axis, but got shape {tuple(output.shape)}."
            )
        mean, log_variance = output.chunk(2, dim=-1)
        _check_same_shape(mean, target)
        loss = 0.5 * ((target - mean).square() * torch.exp(-log_variance) + log_variance + _LOG_2PI)
        return loss.flatten(1).sum(1).mean() if loss.dim() > 1 else loss.mean()


def _check_same_shape(output: Tensor, target: Tensor) -> None:
    if output.shape != target.shape:
        raise VardropError(
            f"Expected `target` to have the shape {tuple(output.shape)} of the prediction, but got "
            f"{tuple(target.shape)}: broadcasting would mix examples. Reshape the target."
        )
