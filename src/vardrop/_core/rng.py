"""States of torch's global random number generators: save, restore, seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

CPU = torch.device("cpu")


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's global generators that a training on a device draws from."""
    states = {"noise": torch.get_rng_state()}
    if device.type != "cpu":
        module = torch.get_device_module(device)
        states[f"noise_{device.type}"] = module.get_rng_state(*_index(device))
    return states


def set_generator_states(device: torch.device, states: dict[str, Tensor], seed: int) -> None:
    """Set torch's global generators. A generator without a stored state is seeded."""
    torch.set_rng_state(states["noise"])
    if device.type == "cpu":
        return
    state = states.get(f"noise_{device.type}")
    if state is None:
        state = torch.Generator(device).manual_seed(seed).get_state()
    torch.get_device_module(device).set_rng_state(state, *_index(device))


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed torch's global generators of the CPU and of a device."""
    set_generator_states(device, {"noise": torch.Generator().manual_seed(seed).get_state()}, seed)


@contextmanager
def preserve_rng(device: torch.device = CPU, seed: int | None = None) -> Iterator[None]:
    """Restore torch's global generators after the block. A seed is used inside it."""
    before = generator_states(device)
    try:
        if seed is not None:
            seed_generators(device, seed)
        yield
    finally:
        set_generator_states(device, before, 0)


def process_noise(rank: int, size: int, device: torch.device) -> AbstractContextManager[None]:
    """Draw different noise in every data-parallel process, although all have the same seed.

    Every process draws one number from torch's generator, the same one if they had the same seed.
    Inside the block the generators are seeded with this number plus the rank. After the block they
    continue after that number, equal in all processes. With one process nothing happens.

    Args:
        rank: the rank among the processes that see different data. Processes that share one model
            (tensor parallel) have the same rank.
        size: the number of these processes.
        device: the device on which noise is drawn, in addition to the CPU.

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
    return preserve_rng(device, int(torch.randint(2**62, (), device="cpu")) + rank)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is only one MPS device
