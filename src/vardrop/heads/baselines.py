"""Baselines of DropMax: softmax, sampled softmax, class dropout, attention, sparsemax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from vardrop._core.errors import VardropError
from vardrop.functional import to_float32_or_wider, uniform
from vardrop.heads.base import Branches, ClassRule, HeadParts, is_target, mean_nll, only_nll
from vardrop.likelihoods.base import sum_targets
from vardrop.posteriors import check_drop_rate


@dataclass(frozen=True)
class SoftmaxRule(ClassRule):
    """p_k ~ exp(o_k), trained with its likelihood."""

    linear: ClassVar[bool] = True

    def loss(self, logits: Tensor, branches: Branches, y: Tensor) -> HeadParts:
        """-log softmax(o)[y]."""
        return only_nll(mean_nll(torch.log_softmax(logits, -1), y))


@dataclass(frozen=True)
class SampledSoftmaxRule(ClassRule):
    """Train on the target and a uniform sample of a `fraction` of the classes. Predict with all.

    Args:
        fraction: above 0, at most 1.

    Jean et al. 2015, "On using very large target vocabulary for neural machine translation",
    sec. 3, with a uniform proposal, which needs no correction.
    """

    fraction: float = 0.4
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction <= 1:
            raise VardropError(f"Expected `fraction` to be in (0, 1], but got {self.fraction}.")

    def loss(self, logits: Tensor, branches: Branches, y: Tensor) -> HeadParts:
        """-log softmax over the target and the sampled classes."""
        target = is_target(y, logits)
        count = max(2, round(self.fraction * logits.shape[-1]))
        ranks = uniform(logits.shape, logits).masked_fill(target, 2.0).argsort(-1, descending=True)
        chosen = torch.zeros_like(target).scatter(-1, ranks[..., :count], True)
        masked = logits.masked_fill(~chosen, -torch.inf)
        return only_nll(mean_nll(torch.log_softmax(masked, -1), y))


@dataclass(frozen=True)
class ClassDropoutRule(ClassRule):
    """Drop every class but the target at a fixed rate in training. Predict with all.

    Args:
        drop_rate: the probability that a class is dropped.

    Lee et al. 2018, "DropMax: adaptive variational softmax", sec. 5 (random DropMax).
    """

    drop_rate: float = 0.6
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_drop_rate(self.drop_rate)

    def loss(self, logits: Tensor, branches: Branches, y: Tensor) -> HeadParts:
        """-log softmax over the target and the retained classes."""
        mask = (uniform(logits.shape, logits) >= self.drop_rate) | is_target(y, logits)
        masked = logits.masked_fill(~mask, -torch.inf)
        return only_nll(mean_nll(torch.log_softmax(masked, -1), y))

    def retain_probability(self, logits: Tensor, branches: Branches) -> Tensor:
        """1 - drop_rate for every class."""
        return torch.full_like(logits, 1 - self.drop_rate)


@dataclass(frozen=True)
class AttentionRule(ClassRule):
    """p_k ~ sigmoid(a_k) exp(o_k), a linear in x, without noise: deterministic attention.

    Lee et al. 2018, "DropMax: adaptive variational softmax", sec. 5.
    """

    branches: ClassVar[tuple[str, ...]] = ("retain",)

    def loss(self, logits: Tensor, branches: Branches, y: Tensor) -> HeadParts:
        """-log softmax(o + log sigmoid(a))[y]."""
        log_mask = functional.logsigmoid(branches["retain"])
        return only_nll(mean_nll(torch.log_softmax(logits + log_mask, -1), y))


def sparsemax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """argmin_p |p - logits|^2 over the simplex, and the threshold: p = max(logits - t, 0).

    >>> import torch
    >>> sparsemax(torch.tensor([1.0, 0.5, -1.0]))[0]
    tensor([0.7500, 0.2500, 0.0000])

    Martins & Astudillo 2016, "From softmax to sparsemax", alg. 1.
    """
    logits, dtype = to_float32_or_wider(logits), logits.dtype
    descending = logits.sort(-1, descending=True).values
    sums = descending.cumsum(-1) - 1
    count = torch.arange(1, logits.shape[-1] + 1, device=logits.device, dtype=logits.dtype)
    size = (count * descending > sums).sum(-1, keepdim=True)
    threshold = sums.gather(-1, size - 1) / size
    return (logits - threshold).clamp(min=0).to(dtype), threshold.to(dtype)


@dataclass(frozen=True)
class SparsemaxRule(ClassRule):
    """p = sparsemax(o), trained with the sparsemax loss instead of the NLL.

        loss = -o_y + 1/2 sum_{k in support} (o_k^2 - t^2) + 1/2

    A class outside the support has log-probability minus infinity.

    Martins & Astudillo 2016, "From softmax to sparsemax", eq. 21.
    """

    def log_probs(self, logits: Tensor, branches: Branches) -> Tensor:
        """log sparsemax(o), minus infinity outside the support."""
        probs = self.retain_probability(logits, branches)
        inside = probs > 0
        return torch.where(inside, torch.where(inside, probs, 1.0).log(), -torch.inf)

    def loss(self, logits: Tensor, branches: Branches, y: Tensor) -> HeadParts:
        """The sparsemax loss."""
        # Map and loss do not change with this shift, without which the squares would cancel.
        shifted = logits - logits.amax(-1, keepdim=True).detach()
        probs, threshold = sparsemax(shifted)
        squares = torch.where(probs > 0, shifted.square() - threshold.square(), 0.0).sum(-1)
        target = shifted.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return only_nll(sum_targets(0.5 + 0.5 * squares - target, 1).mean())

    def retain_probability(self, logits: Tensor, branches: Branches) -> Tensor:
        """sparsemax(o)."""
        return sparsemax(logits - logits.amax(-1, keepdim=True).detach())[0]
