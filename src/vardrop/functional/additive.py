"""Weights with additive Gaussian noise and all that a training step derives from them, at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vardrop.functional.blocks import like_layout
from vardrop.functional.log_uniform_sum import add_kl_gradients, summed_kl


class AdditiveWeights(NamedTuple):
    """The mean and the variance of weights, and a zero whose gradient is that of their KL.

    The tensors are for products alone: their gradients are taken over and written into.
    """

    mean: Tensor
    variance: Tensor
    kl_gradient: Tensor

    def kl(self, value: bool = True) -> Tensor:
        """The exact KL to the log-uniform prior, summed; zero in its place for `value=False`."""
        if not value:
            return self.kl_gradient
        return self.kl_gradient + summed_kl(self.mean.detach(), self.variance.detach())


class _AdditiveWeights(torch.autograd.Function):
    """Gathers the gradients of all draws and of the KL, and passes over the weights once."""

    @staticmethod
    def forward(weight: Tensor, log_sigma2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return weight.detach(), log_sigma2.exp(), weight.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, to_mean: Tensor | None, to_variance: Tensor | None, to_kl: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        weight, variance = ctx.saved_tensors
        if to_kl is None:
            return to_mean, None if to_variance is None else to_variance * variance
        to_mean, to_variance = (
            like_layout(torch.zeros_like(weight) if grad is None else grad, weight)
            for grad in (to_mean, to_variance)
        )
        add_kl_gradients(weight, variance, float(to_kl), to_mean, to_variance)
        return to_mean, to_variance


def additive_weights(weight: Tensor, log_sigma2: Tensor) -> AdditiveWeights:
    """What draws and the KL of N(weight, exp(log_sigma2)) share; needs `can_block(weight)`."""
    return AdditiveWeights(*_AdditiveWeights.apply(weight, log_sigma2))
