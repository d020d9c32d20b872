"""The evidence lower bound as a module, so that DDP, compile and checkpoints treat it as one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vardrop.errors import VardropError
from vardrop.noisy import kl, noisy_modules


class ELBOParts(NamedTuple):
    """loss = nll + beta kl / num_data, per data point; `kl` is the full sum over the net."""

    loss: Tensor
    nll: Tensor
    kl: Tensor
    beta: Tensor


class ELBO(nn.Module):
    """The negative ELBO per data point and its parts.

        loss = mean_batch -log p(y | x, w) + beta KL(q || p) / num_data,  w ~ q

    Wrap *this* module in DistributedDataParallel or `torch.compile`: parameters that only the KL
    sees are then synchronised too, and `beta`, a buffer, changes without a recompilation.

    Args:
        net: a net with noisy modules.
        likelihood: a module such as `Categorical()`, or any callable that returns the mean NLL.
        num_data: how many training examples there are in all (not in a batch).
        beta: the weight of the KL; change it with `set_beta`. A net without noise needs beta=0.
        samples: draws a step; their NLLs are averaged and the gradient is exact.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd())
    >>> elbo = vd.ELBO(net, vd.Categorical(), num_data=100)
    >>> out = elbo(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    >>> out.loss.backward()
    >>> bool(torch.isclose(out.loss, out.nll + out.kl / 100))
    True

    Kingma, Salimans & Welling 2015, eq. 1 and 4.
    """

    beta: Tensor

    def __init__(
        self,
        net: nn.Module,
        likelihood: Callable[[Any, Any], Tensor],
        num_data: int,
        beta: float = 1.0,
        samples: int = 1,
    ) -> None:
        super().__init__()
        if isinstance(num_data, bool) or not isinstance(num_data, int) or num_data < 1:
            raise VardropError(
                f"Expected `num_data` to be a positive integer, but got {num_data!r}. "
                "It is the size of the training set, which scales the KL."
            )
        if not callable(likelihood):
            raise VardropError(
                f"Expected `likelihood` to be callable as (output, target), but got {likelihood!r}."
            )
        if samples < 1:
            raise VardropError(f"Expected `samples` to be at least 1, but got {samples}.")
        self.noisy = beta != 0
        if self.noisy:
            noisy_modules(net)
        self.net, self.likelihood = net, likelihood
        self.num_data, self.samples = num_data, samples
        self.register_buffer("beta", torch.tensor(0.0))
        self.set_beta(beta)

    def set_beta(self, beta: float) -> None:
        """Change the weight of the KL in place."""
        if not (beta >= 0 and math.isfinite(beta)):
            raise VardropError(f"Expected `beta` to be finite and at least 0, but got {beta}.")
        self.beta.fill_(beta)

    def forward(self, x: Any, y: Any) -> ELBOParts:
        """The loss and its parts on one batch."""
        nll = self.likelihood(self.net(x), y)
        for _ in range(self.samples - 1):
            nll = nll + self.likelihood(self.net(x), y)
        nll = nll / self.samples
        divergence = kl(self.net)
        loss = nll + self.beta * divergence / self.num_data
        return ELBOParts(loss, nll, divergence, self.beta)
