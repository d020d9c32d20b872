"""The processes of one training, and how they share its batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vardrop._core.rng import CPU


@dataclass(frozen=True)
class World:
    """The processes of one training. The first of them writes and prints."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def slice(self, batch: Tensor) -> tuple[Tensor, float]:
        """The part of a batch for this process, and its weight in the mean over processes."""
        part = batch.tensor_split(self.size)[self.rank]
        if len(part) == 0:
            return batch[:1], 0.0
        return part, len(part) * self.size / len(batch)

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module, with its gradients averaged over the processes."""
        return module if self.size == 1 else DistributedDataParallel(module)

    def all_reduce_mean(self, tensor: Tensor) -> Tensor:
        """The mean of a tensor over the processes."""
        if self.size == 1:
            return tensor
        total = tensor.to(self.device, copy=True)
        dist.all_reduce(total)
        return total / self.size

    def broadcast_decision(self, decision: bool) -> bool:
        """The decision of the first process, in all processes."""
        if self.size == 1:
            return decision
        flag = torch.tensor(int(decision), device=self.device)
        dist.broadcast(flag, 0)
        return bool(flag)


ALONE = World()
