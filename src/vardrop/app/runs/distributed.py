"""The device of a run, and the processes that `torchrun` started for it."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from vardrop._core.errors import report_errors
from vardrop._core.processes import World
from vardrop._core.rng import CPU


def resolve_device(name: str) -> torch.device:
    """The device of this process. "auto" is a GPU if one is available, under `torchrun` one each.

    Apple's GPU (mps) has no double precision, so it must be requested explicitly.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if accelerator is None or accelerator.type == "mps" else accelerator.type
    text = f"Expected `device` to be available, but got {name!r}. Use auto or cpu."
    with report_errors(lambda e: text):
        device = torch.device(name)
        if device.type not in ("cpu", "mps") and device.index is None:
            device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        return torch.empty(0, device=device).device


@contextmanager
def join_processes(device: torch.device = CPU) -> Iterator[World]:
    """The processes that `torchrun` started, each on its device, or this process alone.

    Nothing may refer to the result of `World.wrap` at the end of the block. Deleting the last
    reference to the group joins its threads, and only `destroy_process_group` does so without the
    lock that a thread may be waiting for.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World(device=device)
        return
    # Default arguments in this module keep the group that exists when it is imported, and
    # DistributedDataParallel imports it. If it is imported before the group exists, it does not
    # keep the group alive. A thread of gloo that outlives the interpreter aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    if device.type != "cpu":  # collectives and kernels of this process use its own device
        torch.accelerator.set_device_index(device)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        gc.collect()
        dist.destroy_process_group()
