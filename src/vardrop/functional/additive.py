"""Weights with additive Gaussian noise and all that a training step derives from them, at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vardrop.functional.blocks import can_block, like_layout
from vardrop.functional.log_uniform_sum import (
    add_kl_gradients,
    is_in_range,
    kl_gradients,
    summed_kl,
)


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
    def forward(ctx: Any, weight: Tensor, log_sigma2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        variance = log_sigma2.exp()
        ctx.save_for_backward(weight, variance)
        ctx.set_materialize_grads(False)
        return weight.detach(), variance, weight.new_zeros(())

    @staticmethod
    def backward(
        ctx: Any, to_mean: Tensor | None, to_variance: Tensor | None, to_kl: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        weight, variance = ctx.saved_tensors
        if to_kl is None:
            return to_mean, None if to_variance is None else to_variance * variance
        if torch.is_grad_enabled():  # a second derivative needs expressions, not what is written
            to_weight, to_log_sigma2 = kl_gradients(weight, variance, to_kl)
            return (
                to_weight if to_mean is None else to_mean + to_weight,
                to_log_sigma2 if to_variance is None else to_variance * variance + to_log_sigma2,
            )
        to_mean, to_variance = (
            like_layout(torch.zeros_like(weight) if grad is None else grad, weight)
            for grad in (to_mean, to_variance)
        )
        add_kl_gradients(weight, variance, float(to_kl), to_mean, to_variance)
        return to_mean, to_variance


def can_share(weight: Tensor, log_sigma2: Tensor) -> bool:
    """Whether `additive_weights` may be used: `can_block` of both, and variances in range."""
    return can_block(weight, log_sigma2) and is_in_range(log_sigma2)


def additive_weights(weight: Tensor, log_sigma2: Tensor) -> AdditiveWeights:
    """What draws and the KL of N(weight, exp(log_sigma2)) share; needs `can_share`."""
    return AdditiveWeights(*_AdditiveWeights.apply(weight, log_sigma2))


class _Step(threading.local):
    """What the training step of this thread has computed; None outside of a step."""

    found: dict[tuple[int, int], tuple[Tensor, Tensor, AdditiveWeights]] | None = None


_step = _Step()


@contextmanager
def sharing() -> Iterator[None]:
    """For the draws and the KL of one training step: what they have in common is computed once.

    Weights must not change inside.
    """
    before, _step.found = _step.found, {}
    try:
        yield
    finally:
        _step.found = before


def shared_weights(weight: Tensor, log_sigma2: Tensor) -> AdditiveWeights | None:
    """`additive_weights`, once per step inside `sharing`; None where nothing may be shared.

    What runs without a gradient finds what is there and leaves nothing behind, or the pass that
    learns would find it. Activation checkpointing runs the layer again when the step is over.
    """
    if _step.found is None or not can_block(weight, log_sigma2):
        return None
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    key = id(weight), id(log_sigma2)
    if key not in _step.found and torch.is_grad_enabled() and is_in_range(log_sigma2):
        _step.found[key] = weight, log_sigma2, additive_weights(weight, log_sigma2)
    return _step.found[key][2] if key in _step.found else None
