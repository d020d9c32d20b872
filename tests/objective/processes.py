"""Run a function in several gloo processes."""

import fcntl
import gc
import importlib
import os

import torch
import torch.distributed as dist
from torch import multiprocessing


def run_processes(function, size, folder, *arguments):
    """The results of `function(rank, *arguments)` in every process of a group.

    They are computed once per folder, for all processes of pytest that share it.
    """
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / f"{size}-0").exists():
            multiprocessing.spawn(_worker, (function, size, str(folder), arguments), nprocs=size)
    return [torch.load(f"{folder}/{size}-{rank}", weights_only=True) for rank in range(size)]


def _worker(rank, function, size, folder, arguments):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # Imported before there is a group, or its default arguments keep the group, and the threads of
    # gloo outlive the interpreter (see `vardrop.app.runs.distributed.join_processes`).
    importlib.import_module("torch.distributed.nn.functional")
    store = f"file://{folder}/store-{size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    torch.save(function(rank, *arguments), f"{folder}/{size}-{rank}")
    gc.collect()  # modules go before their group, or the threads of gloo may wait for each other
    dist.destroy_process_group()
