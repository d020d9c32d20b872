"""Where a training runs: its device, torch's generators there, several processes of `torchrun`."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vardrop._core.errors import VardropError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """The processes of one training; the first of them writes and prints."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def slice(self, batch: Tensor) -> tuple[Tensor, float]:
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
        total = values.to(self.device, copy=True)
        dist.all_reduce(total)
        return total / self.size

    def agree(self, decision: bool) -> bool:
        """The decision of the first process, in all of them."""
        if self.size == 1:
            return decision
        agreed = torch.tensor(int(decision), device=self.device)
        dist.broadcast(agreed, 0)
        return bool(agreed)


ALONE = World()


def device_named(name: str) -> torch.device:
    """The device of this process: "auto" is a GPU where there is one, under `torchrun` its own.

    Apple's (mps) has to be asked for by name, since it has no double precision.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        usable = accelerator is not None and accelerator.type != "mps"
        name = accelerator.type if accelerator is not None and usable else "cpu"
    try:
        found = torch.device(name)
        if found.type not in ("cpu", "mps") and found.index is None:
            found = torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))
        return torch.empty(0, device=found).device
    except (RuntimeError, AssertionError) as absent:
        raise VardropError(
            f"Expected `device` to be one that torch has here, but got {name!r}. Use auto or cpu."
        ) from absent


@contextmanager
def joined(device: torch.device = CPU) -> Iterator[World]:
    """The world that `torchrun` set up, each process on its device, or this process alone.

    What `World.wrap` returned has to be out of use by the end of the block: the last reference to
    the group joins its threads, and only `destroy_process_group` does so without the lock that a
    thread may be waiting for.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World(device=device)
        return
    # Default arguments in this module take hold of the group that exists when it is imported, and
    # DistributedDataParallel imports it. Imported first, it lets the group go in the end, threads
    # and all; a thread of gloo that outlives the interpreter aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    if device.type != "cpu":  # collectives and kernels of this process go to its own device
        torch.accelerator.set_device_index(device)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        gc.collect()
        dist.destroy_process_group()


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's own generators that a training on a device draws from."""
    found = {"noise": torch.get_rng_state()}
    if device.type != "cpu":
        found[f"noise_{device.type}"] = torch.get_device_module(device).get_rng_state(
            *_index(device)
        )
    return found


def set_generator_states(device: torch.device, states: dict[str, Tensor], seed: int) -> None:
    """Set torch's own generators; one whose state is not there, of another device, is seeded."""
    torch.set_rng_state(states["noise"])
    if device.type == "cpu":
        return
    state = states.get(f"noise_{device.type}")
    if state is None:
        state = torch.Generator(device).manual_seed(seed).get_state()
    torch.get_device_module(device).set_rng_state(state, *_index(device))


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed torch's own generators: the CPU's and that of the device, of whatever type."""
    states = {"noise": torch.Generator().manual_seed(seed).get_state()}
    set_generator_states(device, states, seed)


@contextmanager
def own_generators(device: torch.device = CPU, seed: int | None = None) -> Iterator[None]:
    """Leave torch's own generators as they were; inside they are seeded, where a seed is given."""
    before = generator_states(device)
    try:
        if seed is not None:
            seed_generators(device, seed)
        yield
    finally:
        set_generator_states(device, before, 0)


def process_noise(rank: int, size: int, device: torch.device) -> AbstractContextManager[None]:
    """Draw other noise in every data-parallel process, though all were seeded alike.

    Every process takes one number from torch's generator, equal if they had the same seed, and in
    the block torch's generators are seeded with it and the rank. After the block they go on after
    that number, as equal as before. With one process nothing happens.

    Args:
        rank: which of the processes that see different data this is. Processes that share one
            model (tensor parallel) have the same.
        size: how many of them there are.
        device: where the noise is drawn, beside the CPU.

    >>> def draw(rank):
    ...     torch.manual_seed(0)
    ...     with process_noise(rank, 2, CPU):
    ...         noise = torch.randn(())
    ...     return float(noise), float(torch.randn(()))
    >>> (first, after), (second, after_too) = draw(0), draw(1)
    >>> first == second, after == after_too
    (False, True)
    """
    if size == 1:
        return nullcontext()
    return own_generators(device, int(torch.randint(2**62, (), device="cpu")) + rank)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # of which there is one
