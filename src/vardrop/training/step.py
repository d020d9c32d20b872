"""One step: forward, backward, clip, update; compiled, in mixed precision, in several processes."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vardrop.errors import NotFiniteError, VardropError
from vardrop.objective import ELBO
from vardrop.training.finite import culprit
from vardrop.training.processes import ALONE, World

Precision = Literal["float32", "bfloat16"]


class Step:
    """Makes one step of training and returns (loss, nll, kl), detached.

    Args:
        elbo: the objective.
        optimizer: over its parameters.
        clip: the largest norm of the gradient; no bound where None.
        precision: "bfloat16" runs the forward pass under autocast.
        compile: pass the objective through `torch.compile`.
        world: the processes among which gradients are averaged.
    """

    def __init__(
        self,
        elbo: ELBO,
        optimizer: torch.optim.Optimizer,
        clip: float | None = None,
        precision: Precision = "float32",
        compile: bool = False,
        world: World = ALONE,
    ) -> None:
        if clip is not None and not clip > 0:
            raise VardropError(f"Expected `clip` to be positive, but got {clip}.")
        if precision not in ("float32", "bfloat16"):
            raise VardropError(
                f"Expected `precision` to be 'float32' or 'bfloat16', but got {precision!r}."
            )
        self.elbo, self.optimizer, self.clip = elbo, optimizer, clip
        self.mixed = precision == "bfloat16"
        wrapped = world.wrap(elbo)
        self.forward: Any = torch.compile(wrapped) if compile else wrapped

    def __call__(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        """Step on a batch whose examples count `weight` times in the mean over processes."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.mixed):
            out = self.forward(x, y)
        loss = out.loss
        if weight != 1.0:  # the KL is whole in every process, the likelihood a part of it
            loss = loss + (weight - 1) * (loss - out.beta * out.kl / self.elbo.num_data)
        if not math.isfinite(float(loss.detach())):
            raise NotFiniteError(f"{float(loss.detach())} ({culprit(self.elbo, x, y)})")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.elbo.parameters(), self.clip)
        self.optimizer.step()
        return torch.stack([loss.detach(), weight * out.nll.detach(), out.kl.detach()])
