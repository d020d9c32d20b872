"""DropMax: a softmax that learns which classes to drop for each example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from vardrop.functional import bernoulli_entropy, bernoulli_kl, concrete_logit, uniform
from vardrop.heads.base import Branches, ClassRule, HeadParts, is_target, mean_nll
from vardrop.likelihoods.base import sum_targets


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
