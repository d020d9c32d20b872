"""The rules of heads: DropMax, and its baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from vardrop._core.errors import VardropError
from vardrop.functional import (
    bernoulli_entropy,
    bernoulli_kl,
    concrete_logit,
    to_float32_or_wider,
    uniform,
)
from vardrop.heads.base import Branches, ClassRule, HeadParts, is_target, mean_nll, only_nll
from vardrop.likelihoods.base import sum_targets
from vardrop.posteriors import check_drop_rate


@dataclass(frozen=True)
class DropMaxRule(ClassRule):
    """p(y | x, z) ~ z_k exp(o_k), z_k ~ Bernoulli(rho_k), rho = sigmoid(a), a linear in x.

    Training draws from q(z | x, y): the target is kept, and every other class is kept with
    probability g = sigmoid(stop_gradient(a) + r), r linear in x, relaxed with `temperature`. With
    KL_target = -log rho_target and KL_k = KL(Bernoulli(g_k) || Bernoulli(rho_k)) otherwise,

        loss = -log p(y | x, z) + sum_k KL_k + sum_k BCE(sigmoid(r_k), [k = y]) - sum_k H(rho_k).

    The entropy H of the rates enters with a minus sign, so that training raises it: it keeps the
    rates away from zero and one. Read literally, the sign of the paper's
    sum rho log rho + (1 - rho) log(1 - rho) would lower it. The epsilon that the paper adds to z is
    left out: a relaxed z is positive, and its logarithm is computed without rounding to zero.

    Args:
        temperature: of the relaxed z.
        inference: "p" draws z ~ p(z | x) in training too, and its loss is -log p(y | x, z) alone.

    Lee et al. 2018, "DropMax: adaptive variational softmax", eq. 4 to 14.
    """

    temperature: float = 0.1
    inference: Literal["q", "p"] = "q"
    branches: ClassVar[tuple[str, ...]] = ("retain", "correction")
    positive: ClassVar[tuple[str, ...]] = ("temperature",)

    def _log_mask(self, logit: Tensor) -> Tensor:
        noise = uniform(logit.shape, logit)
        return functional.logsigmoid(concrete_logit(logit, noise, self.temperature))

    def draw(self, logits: Tensor, branches: Branches) -> Tensor:
        """log softmax(o + log z), z ~ Bernoulli(rho), relaxed."""
        return torch.log_softmax(logits + self._log_mask(branches["retain"]), dim=-1)

    def loss(self, logits: Tensor, branches: Branches, y: Tensor) -> HeadParts:
        """The objective above under one draw of q(z | x, y), or of p(z | x)."""
        a, r = branches["retain"], branches["correction"]
        if self.inference == "p":
            nll = mean_nll(self.draw(logits, branches), y)
            zero = 0 * (a.sum() + r.sum())  # keeps every branch in the graph, for DDP
            return HeadParts(nll + zero, nll, zero, zero, zero)
        target, g = is_target(y, logits), a.detach() + r
        log_mask = torch.where(target, 0.0, self._log_mask(g))
        nll = mean_nll(torch.log_softmax(logits + log_mask, -1), y)
        kl = torch.where(target, -functional.logsigmoid(a), bernoulli_kl(g, a))
        aux = functional.binary_cross_entropy_with_logits(r, target.to(r.dtype), reduction="none")
        kl, aux, entropy = (
            sum_targets(t.sum(-1), 1).mean() for t in (kl, aux, bernoulli_entropy(a))
        )
        return HeadParts(nll + kl + aux - entropy, nll, kl, aux, entropy)


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
        log_probs = torch.log_softmax(logits.masked_fill(~chosen, -torch.inf), -1)
        return only_nll(mean_nll(log_probs, y))


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
        log_probs = torch.log_softmax(logits.masked_fill(~mask, -torch.inf), -1)
        return only_nll(mean_nll(log_probs, y))

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
