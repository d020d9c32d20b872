"""Diagonals of second derivatives over autograd: exact, and from random probes.

Averaged over draws of the weights and multiplied by their variances they measure how much the noise
of each weight matters: `kappa`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from vardrop.functional.random import random_signs

_ROWS = 64  # rows of the Hessian that are held at once


def diagonal_hessian(value: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The exact diagonal of the Hessian of a scalar, one tensor for each.

    d^2 value / dt_i^2 for every element i; one row of the Hessian per element, so for small layers.

    Args:
        value: a scalar that was computed from `tensors`, with its graph.
        tensors: leaves that require a gradient.

    >>> import torch
    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> diagonal_hessian((w**3).sum() + w.prod(), [w])
    [tensor([ 6., 12.])]
    """
    first = torch.autograd.grad(value, tensors, create_graph=True, materialize_grads=True)
    diagonals = [torch.zeros_like(t) for t in tensors]
    for gradient, tensor, diagonal in zip(first, tensors, diagonals, strict=True):
        if not gradient.requires_grad:  # the value is linear in the tensor
            continue
        size = tensor.numel()
        for index in torch.arange(size, device=tensor.device).split(_ROWS):
            (rows,) = torch.autograd.grad(
                gradient,
                tensor,
                one_hot(index, size).to(gradient.dtype).view(-1, *tensor.shape),
                retain_graph=True,
                is_grads_batched=True,
                allow_unused=True,
            )
            if rows is not None:
                diagonal.view(-1)[index] = rows.flatten(1).gather(1, index[:, None]).squeeze(1)
    return diagonals


def hutchinson_diagonal(value: Tensor, tensors: Sequence[Tensor], probes: int = 32) -> list[Tensor]:
    """An unbiased estimate of the diagonal of the Hessian of a scalar, a tensor each.

    diag H = E[z * H z] for independent random signs z; the variance of an element of one probe is
    the sum of the squares of the other elements of its row.

    Args:
        value: a scalar that was computed from `tensors`, with its graph.
        tensors: leaves that require a gradient.
        probes: how many products with the Hessian are averaged.

    >>> import torch
    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> hutchinson_diagonal((w**3).sum(), [w], probes=1)
    [tensor([ 6., 12.])]

    Bekas, Kokiopoulou & Saad 2007, "An estimator for the diagonal of a matrix", eq. 2.
    """
    first = torch.autograd.grad(value, tensors, create_graph=True, materialize_grads=True)
    totals = [torch.zeros_like(t) for t in tensors]
    if not any(g.requires_grad for g in first):  # the value is linear in all of them
        return totals
    for _ in range(probes):
        signs = [random_signs(t.shape, t) for t in tensors]
        inner = torch.stack([(g * z).sum() for g, z in zip(first, signs, strict=True)]).sum()
        products = torch.autograd.grad(inner, tensors, retain_graph=True, materialize_grads=True)
        for total, z, product in zip(totals, signs, products, strict=True):
            total.add_(z * product, alpha=1 / probes)
    return totals


def kappa(
    variances: Sequence[Tensor],
    draw: Callable[[], Sequence[Tensor]],
    curvature: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    draws: int,
) -> list[Tensor]:
    """How much the noise of each weight matters to log p, a tensor each.

        kappa = Var w * E_q d^2 log p / dw^2

    For Gaussian weights and a smooth net this is twice the derivative of E_q log p by the logarithm
    of the weight's variance (Price 1958). The average over draws matters: at the mean weights of a
    variance layer all rectified units are shut, and the curvature is zero for the weights that
    matter most. The kink of a ReLU itself, which has no second derivative, is not counted.

    Args:
        variances: Var w.
        draw: the weights, drawn from q.
        curvature: d^2 log p / dw^2 at given weights, which require a gradient.
        draws: over how many the curvature is averaged.

    >>> import torch
    >>> w = torch.tensor([1.0, 2.0])
    >>> cubes = lambda leaves: diagonal_hessian((leaves[0] ** 3).sum(), leaves)
    >>> kappa([torch.tensor([0.5, 0.1])], lambda: [w], cubes, draws=2)
    [tensor([3.0000, 1.2000])]

    Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", who take the mean weights.
    """
    totals = [torch.zeros_like(v) for v in variances]
    for _ in range(draws):
        leaves = [t.detach().clone().requires_grad_() for t in draw()]
        for total, diagonal in zip(totals, curvature(leaves), strict=True):
            total.add_(diagonal.detach())
    return [v * total / draws for v, total in zip(variances, totals, strict=True)]
