"""Trains in children that are killed at random moments, trials and all; run by test_checkpoint.py.

The imports are done once; each life is a fork, so many of them take seconds.
"""

import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pandas  # noqa: F401  the lives need it, and should not each import it
import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo  # an optimizer's first step would import it in every life

from vardrop.app.runs import fit, resume
from vardrop.recipes import sparse_vd

SETTINGS = {"epochs": 10, "pretrain": 1, "batch_size": 16, "lr": 1e-2, "folds": 2}


def life(out, seconds):
    """Train from where the directory stands, to the end."""
    torch.set_num_threads(1)
    if (out / "config.json").is_file():
        resume(out)
    else:
        fit("iris", "mlp", sparse_vd(), out=out, force=True, checkpoint_seconds=seconds, **SETTINGS)


def child(out, seconds):
    pid = os.fork()
    if pid == 0:
        try:
            life(out, seconds)
        except KeyboardInterrupt:
            os._exit(1)
        os._exit(0)
    return pid


def written(out):
    """When the last checkpoint was written, of the run or of a trial."""
    times = [0]
    for folder, _, _ in os.walk(out):  # without a word where trials go meanwhile
        with suppress(FileNotFoundError):
            times.append((Path(folder) / "checkpoint.safetensors").stat().st_mtime_ns)
    return max(times)


def alive(pid):
    return os.waitpid(pid, os.WNOHANG)[0] == 0


def let_live(pid, out, chance, steps):
    """Wait for so many steps to be checkpointed, and a moment more."""
    for _ in range(steps):
        before = written(out)
        while written(out) == before:
            assert alive(pid), "the run ended before it was killed often enough"
            time.sleep(0.001)
    time.sleep(chance.uniform(0.0, 0.01 if steps else 0.05))


def main(root, kills):
    whole, broken = root / "whole", root / "broken"
    assert os.waitpid(child(whole, 1e9), 0)[1] == 0
    chance, places, stages = random.Random(0), [], set()
    for kill in range(kills):
        pid = child(broken, 0.0)
        # Every third dies while it starts, or wherever it is by then.
        let_live(pid, broken, chance, 0 if kill % 3 == 0 else chance.randint(1, 840 // kills))
        assert alive(pid), "the run ended before it was killed often enough"
        os.kill(pid, signal.SIGINT if kill == kills - 1 else signal.SIGKILL)
        os.waitpid(pid, 0)
        places.append(written(broken))
        stages.add("trials" if not (broken / "choice.safetensors").is_file() else "run")
    assert os.waitpid(child(broken, 0.0), 0)[1] == 0
    assert stages == {"trials", "run"}, stages
    print(kills, "killed at", len(set(places)), "different places")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
