"""Several processes under `torchrun`: each takes its share of every batch."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class World:
    """The processes of one training; the first of them writes and prints."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def share(self, batch: Tensor) -> tuple[Tensor, float]:
        """This process's rows of a batch, and how often each counts in the mean over processes."""
        if self.size == 1:
            return batch, 1.0
        rows = batch.tensor_split(self.size)[self.rank]
        if len(rows) == 0:
            return batch[:1], 0.0
        return rows, len(rows) * self.size / len(batch)

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module, with its gradients averaged over the processes."""
        return module if self.size == 1 else DistributedDataParallel(module)

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a tensor over the processes."""
        if self.size == 1:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total / self.size

    def agree(self, decision: bool) -> bool:
        """The decision of the first process, in all of them."""
        if self.size == 1:
            return decision
        shared = torch.tensor(int(decision))
        dist.broadcast(shared, 0)
        return bool(shared)


ALONE = World()


@contextmanager
def joined() -> Iterator[World]:
    """The world that `torchrun` set up, or this process alone.

    What `World.wrap` returned has to be out of use by the end of the block: the last reference to
    the group joins its threads, and only `destroy_process_group` does so without the lock that a
    thread may be waiting for.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    # Default arguments in this module take hold of the group that exists when it is imported, and
    # DistributedDataParallel imports it. Imported first, it lets the group go in the end, threads
    # and all; a thread of gloo that outlives the interpreter aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        gc.collect()
        dist.destroy_process_group()
