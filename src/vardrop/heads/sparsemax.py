"""Sparsemax: the projection of the logits onto the simplex, which gives exact zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vardrop.functional import wide
from vardrop.heads.base import Branches, ClassRule, HeadParts, only_nll, per_example


def sparsemax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """argmin_p |p - logits|^2 over the simplex, and the threshold: p = max(logits - t, 0).

    >>> import torch
    >>> sparsemax(torch.tensor([1.0, 0.5, -1.0]))[0]
    tensor([0.7500, 0.2500, 0.0000])

    Martins & Astudillo 2016, "From softmax to sparsemax", alg. 1.
    """
    logits, dtype = wide(logits), logits.dtype
    descending = logits.sort(-1, descending=True).values
    sums = descending.cumsum(-1) - 1
    count = torch.arange(1, logits.shape[-1] + 1, device=logits.device, dtype=logits.dtype)
    size = (count * descending > sums).sum(-1, keepdim=True)
    threshold = sums.gather(-1, size - 1) / size
    return (logits - threshold).clamp(min=0).to(dtype), threshold.to(dtype)


@dataclass(frozen=True)
class SparsemaxRule(ClassRule):
    """p = sparsemax(o), trained by the sparsemax loss, which stands in the place of the NLL.

        loss = -o_y + 1/2 sum_{k in support} (o_k^2 - t^2) + 1/2

    A class outside the support has log-probability minus infinity.

    Martins & Astudillo 2016, "From softmax to sparsemax", eq. 21.
    """

    def log_probs(self, logits: Tensor, branches: Branches) -> Tensor:
        probs = self.retain_probability(logits, branches)
        inside = probs > 0
        return torch.where(inside, torch.where(inside, probs, 1.0).log(), -torch.inf)

    def loss(self, logits: Tensor, branches: Branches, y: Tensor) -> HeadParts:
        # Both the map and the loss ignore a shift; without it the squares would cancel.
        shifted = logits - logits.amax(-1, keepdim=True).detach()
        probs, threshold = sparsemax(shifted)
        squares = torch.where(probs > 0, shifted.square() - threshold.square(), 0.0).sum(-1)
        target = shifted.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return only_nll(per_example(0.5 + 0.5 * squares - target))

    def retain_probability(self, logits: Tensor, branches: Branches) -> Tensor:
        return sparsemax(logits - logits.amax(-1, keepdim=True).detach())[0]
