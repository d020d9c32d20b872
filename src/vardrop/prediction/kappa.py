"""`kappa`: the variance of a weight times the curvature of log p, the effect of its noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from vardrop._core.calls import (
    Batch,
    LabelledData,
    call_arguments,
    clone_batch,
    labelled_batches,
    output_tensor,
)
from vardrop._core.checks import check_integer
from vardrop._core.errors import VardropError, report_arguments
from vardrop._core.modules import evaluating
from vardrop.functional.curvature import diagonal_hessian, hutchinson_diagonal, kappa as kappa_of
from vardrop.functional.random import (
    GeneratorNoise,
    draw_from,
    resolve_seed,
    restore_state_on_error,
)
from vardrop.noisy import NoisyTensor, noisy_weights, sampling


def example_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of every example, (N, C, ...) and (N, ...) to (N,): summed over positions."""
    loss = functional.cross_entropy(output, target, reduction="none")
    return loss.flatten(1).sum(1) if loss.dim() > 1 else loss


def mean_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean over examples of their cross-entropy."""
    return example_cross_entropy(output, target).mean()


@restore_state_on_error
def kappa(
    net: nn.Module,
    data: LabelledData,
    loss: Callable[[Tensor, Tensor], Tensor] = mean_cross_entropy,
    probes: int | None = None,
    samples: int = 16,
    seed: int | None = None,
) -> dict[str, Tensor]:
    """How much the noise of each weight matters, averaged over examples and draws of the weights.

        kappa_ij = Var w_ij * E_q d^2 log p(y | x, W) / dw_ij^2

    For a smooth model, half of it is the gain of E log p by a relative change of the weight's
    variance. A weight with a small |kappa| may be replaced by its mean. See
    `vardrop.functional.curvature.kappa`.

    Args:
        net: a model with noisy weights. It is evaluated in evaluation mode.
        data: inputs and targets, a pair (x, y) or batches of such pairs.
        loss: mean negative log-likelihood of a batch, (output, target) -> scalar.
        probes: None for the exact diagonal (one row of the Hessian per weight: small layers), or
            the number of random signs to average per batch, draw and layer, without bias.
        samples: draws of the weights for each batch. 0 takes the curvature at the means, as the
            authors do. Half of it is the effect of small noise on log p there, but it is zero for
            the weights before a ReLU that is closed at the means.
        seed: makes signs and draws repeatable.

    Returns:
        A tensor in the shape of its weight for each noisy layer, by name; a tied weight once.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(2, 1, bias=False), vd.bayes_by_backprop(log_sigma2=0.0))
    >>> half_square = lambda output, y: 0.5 * (output - y).square().sum(1).mean()
    >>> kappa(net, [(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 1))], half_square)
    {'': tensor([[-1., -9.]])}

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks".
    """
    if probes is not None:
        check_integer("probes", probes, remedy="None takes the exact diagonal.")
    check_integer("samples", samples, at_least=0)
    weights: dict[int, tuple[str, str, NoisyTensor]] = {}
    for weight in noisy_weights(net):  # a tied one once
        weights.setdefault(id(weight[2].mean), weight)
    if not weights:
        raise VardropError(
            "Expected `net` to have noisy weights, but got gates or heads only. "
            "Convert it with a posterior, such as vardrop.sparse_vd()."
        )
    names, keys, tensors = zip(*weights.values(), strict=True)
    totals, count = [torch.zeros_like(t.mean) for t in tensors], 0

    def draw() -> list[Tensor]:
        return [t.sample(t.draw()).detach() if samples else t.mean for t in tensors]

    noise = nullcontext() if seed is None else draw_from(GeneratorNoise(resolve_seed(seed)))
    report = report_arguments("data", "loss")
    with report, evaluating(net), sampling(net, on=False), torch.enable_grad(), noise:
        variances = [t.variance().detach().expand_as(t.mean) for t in tensors]
        for x, y in labelled_batches(data):
            curvature = partial(_curvature, net, keys, x, y, loss, probes)
            means = kappa_of(variances, draw, curvature, max(samples, 1))
            totals = [t + mean * len(y) for t, mean in zip(totals, means, strict=True)]
            count += len(y)
    return {name: total / count for name, total in zip(names, totals, strict=True)}


def _curvature(
    net: nn.Module,
    keys: Sequence[str],
    x: Batch,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    probes: int | None,
    leaves: Sequence[Tensor],
) -> list[Tensor]:
    """d^2 log p / dw^2 of a batch, per example, at the weights `leaves` with these keys."""
    named = dict(zip(keys, leaves, strict=True))
    log_likelihood = -loss(call_with_tensors(net, named, x), y)
    if probes is None:
        return diagonal_hessian(log_likelihood, leaves)
    # One layer at a time, because signs on other layers would only add variance.
    return [hutchinson_diagonal(log_likelihood, [leaf], probes)[0] for leaf in leaves]


def call_with_tensors(net: nn.Module, tensors: dict[str, Tensor], x: Batch) -> Any:
    """Call a model with other tensors in place of its parameters; returns its `logits`, if any."""
    args, kwargs = call_arguments(net, clone_batch(x))
    output = functional_call(net, tensors, args, kwargs)
    return output_tensor(output) if hasattr(output, "logits") else output
