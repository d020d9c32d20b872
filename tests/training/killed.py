"""Trains in children that are killed at random moments and resumed; run by test_kill.py.

The imports are done once; each life is a fork, so twenty of them take seconds.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from vardrop.application import fit, resume
from vardrop.recipes import sparse_vd
from vardrop.training.checkpoint import read_tensors
from vardrop.training.observers import Observer

SETTINGS = {"epochs": 20, "pretrain": 4, "batch_size": 8, "lr": 1e-2}


def life(out, seconds):
    """Train from where the directory stands, to the end."""
    torch.set_num_threads(1)
    if (out / "config.json").is_file():
        resume(out, observer=Observer())
    else:
        fit("iris", "mlp", sparse_vd(), out=out, observer=Observer(), force=True,
            checkpoint_seconds=seconds, **SETTINGS)  # fmt: skip


def child(out, seconds):
    pid = os.fork()
    if pid == 0:
        try:
            life(out, seconds)
        except KeyboardInterrupt:
            os._exit(1)
        os._exit(0)
    return pid


def position(out):
    """Where the last checkpoint stands."""
    path = out / "checkpoint.safetensors"
    return str(read_tensors(path)[1]) if path.is_file() else None


def main(root, kills):
    whole, broken = root / "whole", root / "broken"
    begun = time.monotonic()
    assert os.waitpid(child(whole, 0.0), 0)[1] == 0
    # Lives last long enough, on average, for all of them to end before the run does.
    longest = 1.2 * (time.monotonic() - begun) / kills
    chance, killed, positions = random.Random(0), 0, []
    while killed < kills:
        before, pid = position(broken), child(broken, 0.0)
        if killed % 2:  # half of them die once training has begun again, the others anywhere
            while position(broken) == before:
                time.sleep(0.002)
        time.sleep(chance.uniform(0.0, longest))
        assert os.waitpid(pid, os.WNOHANG)[0] == 0, "the run outlived its killers"
        os.kill(pid, signal.SIGINT if killed == kills - 1 else signal.SIGKILL)
        os.waitpid(pid, 0)
        killed += 1
        positions.append(position(broken))
    assert os.waitpid(child(broken, 0.0), 0)[1] == 0
    print(killed, "killed at", len(set(positions)), "different places")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
