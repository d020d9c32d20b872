"""One small loop: shuffled batches, a schedule for beta and one for the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vardrop.errors import VardropError
from vardrop.objective import ELBO


class Epoch(NamedTuple):
    """What one epoch of training measured, averaged over its batches."""

    epoch: int
    loss: float
    nll: float
    kl: float
    beta: float


def train(
    elbo: ELBO,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    epochs: int,
    batch_size: int = 100,
    beta: Callable[[float], float] | None = None,
    rate: Callable[[float], float] | None = None,
    seed: int = 0,
) -> Iterator[Epoch]:
    """Train on tensors, yielding after every epoch.

    Args:
        elbo: the objective; its net is put into training mode at every epoch.
        optimizer: over the parameters of `elbo`.
        x, y: the training data.
        epochs: how many.
        batch_size: examples a step; the last, shorter batch is used too.
        beta: schedule of the KL weight by epoch.
        rate: schedule by epoch of the factor on every group's initial learning rate.
        seed: of the shuffling, which has a generator of its own.
    """
    if len(x) != len(y) or len(x) == 0:
        raise VardropError(
            f"Expected `x` and `y` to have the same positive length, but got {len(x)} and {len(y)}."
        )
    generator = torch.Generator().manual_seed(seed)
    base = [group["lr"] for group in optimizer.param_groups]
    for epoch in range(epochs):
        elbo.train()
        if beta is not None:
            elbo.set_beta(beta(epoch))
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * (rate(epoch) if rate is not None else 1.0)
        sums, steps = torch.zeros(3), 0
        for batch in torch.randperm(len(x), generator=generator).split(batch_size):
            out = elbo(x[batch], y[batch])
            optimizer.zero_grad(set_to_none=True)
            out.loss.backward()
            optimizer.step()
            sums += torch.stack([out.loss.detach(), out.nll.detach(), out.kl.detach()])
            steps += 1
        loss, nll, kl = (sums / steps).tolist()
        yield Epoch(epoch, loss, nll, kl, float(elbo.beta))
