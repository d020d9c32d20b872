"""Weights with additive Gaussian noise: what the draws and the KL of a training step share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vardrop._core.torch_private import (
    FunctionContext,
    in_checkpoint,
    in_forward_mode,
    in_transform,
)
from vardrop.functional.fast import switch
from vardrop.functional.fast.blocked_kl import LOG_UNIFORM_KL, BlockedKL, like_layout

_PLAIN = (Tensor, nn.Parameter)
_LIMIT = 80.0  # of |log sigma^2|, beyond which quotients leave single precision


class AdditiveWeights(NamedTuple):
    """The mean and the variance of weights, and a zero with the gradient of their KL.

    Use the tensors in products only, because the backward pass writes into their gradients.

    Args:
        mean: of the weights.
        variance: of the weights.
        kl_gradient: a zero with the gradient of the KL.
        log_sigma2: the logarithm of the variance, without a gradient.
        divergence: the KL to the prior.
    """

    mean: Tensor
    variance: Tensor
    kl_gradient: Tensor
    log_sigma2: Tensor
    divergence: BlockedKL

    def kl(self, value: bool = True) -> Tensor:
        """The KL to the prior, summed.

        Args:
            value: with False the result is zero, and only its gradient is exact.

        Returns:
            A tensor without axes.
        """
        if not value:
            return self.kl_gradient
        tensors = self.mean.detach(), self.variance.detach(), self.log_sigma2
        return self.kl_gradient + self.divergence.value(*tensors)


class _WeightsContext(FunctionContext, Protocol):
    divergence: BlockedKL


class _AdditiveWeights(torch.autograd.Function):
    """Collects the gradients of all draws and of the KL, with one pass over the weights.

    It is elementwise on float32 tensors, which autocast leaves unchanged.
    """

    @staticmethod
    def forward(
        ctx: _WeightsContext,
        divergence: BlockedKL,
        weight: Tensor,
        log_sigma2: Tensor,
        *hyper: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        variance = log_sigma2.exp()
        ctx.divergence = divergence
        ctx.save_for_backward(weight, log_sigma2, variance, *hyper)
        ctx.set_materialize_grads(False)
        return weight.detach(), variance, weight.new_zeros(())

    @staticmethod
    def backward(
        ctx: _WeightsContext,
        to_mean: Tensor | None,
        to_variance: Tensor | None,
        to_kl: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        weight, log_sigma2, variance, *hyper = ctx.saved_tensors
        if to_kl is None:
            to_log_sigma2 = None if to_variance is None else to_variance * variance
            return None, to_mean, to_log_sigma2, *(None for _ in hyper)
        if torch.is_grad_enabled():  # a second derivative cannot follow writes in place
            tensors = weight, log_sigma2, *hyper
            inputs = [t if t.requires_grad else t.detach().requires_grad_() for t in tensors]
            kl = ctx.divergence.expression(*inputs)
            to_weight, to_log_sigma2, *rest = torch.autograd.grad(
                kl, inputs, to_kl, create_graph=True
            )
            return (
                None,
                to_weight if to_mean is None else to_mean + to_weight,
                to_log_sigma2 if to_variance is None else to_variance * variance + to_log_sigma2,
                *rest,
            )
        to_mean, to_variance = (
            like_layout(torch.zeros_like(weight) if grad is None else grad, weight)
            for grad in (to_mean, to_variance)
        )
        to_hyper = ctx.divergence.add_gradients(
            weight, variance, float(to_kl), to_mean, to_variance
        )
        return None, to_mean, to_variance, *to_hyper


def additive_weights(
    weight: Tensor, log_sigma2: Tensor, divergence: BlockedKL = LOG_UNIFORM_KL
) -> AdditiveWeights | None:
    """Compute what draws and the KL of N(weight, exp(log_sigma2)) have in common.

    A trace needs one expression, transforms cannot write into scratch memory, float64 needs more
    precision, and values written into a view of a tensor subclass (a sharded one) may be lost.

    Args:
        weight: the means.
        log_sigma2: the log variances.
        divergence: the KL to the prior.

    Returns:
        None if the tensors cannot be processed in blocks, or if sigma^2 or its quotients are not
        normal numbers of single precision.
    """
    traced = torch.compiler.is_compiling() or in_transform() or in_forward_mode()
    if traced or not switch.enabled:
        return None
    for x in (weight, log_sigma2, *divergence.hyper):  # a generator expression would be slower
        if type(x) not in _PLAIN or x.dtype != torch.float32 or not x.is_cpu:
            return None
    low, high = torch.aminmax(log_sigma2.detach())
    if not (low > -_LIMIT and high < _LIMIT):
        return None
    mean, variance, kl = _AdditiveWeights.apply(divergence, weight, log_sigma2, *divergence.hyper)
    return AdditiveWeights(mean, variance, kl, log_sigma2.detach(), divergence)


class _Step(threading.local):
    """Tensors that the training step of this thread has computed. None outside of a step."""

    computed: dict[tuple[int, int], tuple[Tensor, Tensor, AdditiveWeights]] | None = None


_step = _Step()


@contextmanager
def share_in_step() -> Iterator[None]:
    """Compute what the draws and the KL of one training step have in common only once.

    Weights must not change inside.
    """
    before, _step.computed = _step.computed, {}
    try:
        yield
    finally:
        _step.computed = before


def shared_weights(
    weight: Tensor, log_sigma2: Tensor, divergence: BlockedKL = LOG_UNIFORM_KL
) -> AdditiveWeights | None:
    """Return `additive_weights`, once per step inside `share_in_step`, or None outside of it.

    A pass without gradients uses stored tensors but stores none, because a later pass with
    gradients would use them. Activation checkpointing runs the layer again after the step.

    Args:
        weight: the means.
        log_sigma2: the log variances.
        divergence: the KL to the prior.

    Returns:
        The shared tensors, or None.
    """
    if _step.computed is None or in_checkpoint():
        return None
    key = id(weight), id(log_sigma2)
    if key not in _step.computed:
        weights = None
        if torch.is_grad_enabled():
            weights = additive_weights(weight, log_sigma2, divergence)
        if weights is None:
            return None
        _step.computed[key] = weight, log_sigma2, weights  # the tensors keep their ids
    return _step.computed[key][2]
