"""The library's loop against a bare hand-written one on the MNIST MLP: ratio of an epoch's time.

python benchmarks/loop_overhead.py

The aim is at most 5 %. Measured twice on one thread of a quiet machine, medians of 25 rounds:
loop +1.7 % and +1.8 %, recorded -0.3 % and +3.2 %.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import vardrop as vd
from nets import mlp
from vardrop.app.runs import Recorder
from vardrop.app.runs.run_callbacks import RunCallback
from vardrop.tuning import Loop

STEPS, BATCH = 40, 100  # short turns, so that a slow moment of the machine hits all alike
EPOCH = 540  # steps of an epoch of MNIST without its validation part


def objective():
    torch.manual_seed(0)
    net = vd.convert(mlp(784, 300, 100, 10), vd.sparse_vd())
    elbo = vd.ELBO(net, vd.Categorical(), num_data=60_000)
    return elbo, torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-3), fused=True)


def bare(x, y):
    """An epoch as one would write it by hand, with the mean loss at its end."""
    elbo, optimizer = objective()

    def epoch():
        elbo.train()
        total = 0.0
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad(set_to_none=True)
            loss = elbo(x[batch], y[batch]).loss
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total

    return epoch


def looped(x, y):
    """An epoch of `Loop`, with its checks for finite numbers and its averages."""
    elbo, optimizer = objective()
    epochs = Loop(elbo, optimizer, x, y, 10**9, BATCH).run()
    return lambda: next(epochs)


class Clock(RunCallback):
    """Notes when the last step was done."""

    def on_step(self, at, loss):
        self.stepped = time.perf_counter()


def recorded(x, y, directory):
    """An epoch as `fit` runs it; what comes after its last step is sparsity and files on disk."""
    elbo, optimizer = objective()
    loop = Loop(elbo, optimizer, x, y, 0, BATCH)
    clock = Clock()
    recorder = Recorder(Path(directory), seconds=60.0, callback=clock)

    def epoch():
        loop.epochs += 1
        recorder.run(loop)

    return epoch, clock


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x, y = torch.rand(STEPS * BATCH, 784), torch.randint(10, (STEPS * BATCH,))
    with tempfile.TemporaryDirectory() as directory:
        kept, clock = recorded(x, y, directory)
        parts, rounds = (bare(x, y), looped(x, y), kept), []
        for _ in range(arguments.rounds + 1):
            times = [timed(part) for part in parts]
            rounds.append((*times, time.perf_counter() - clock.stepped))
        rounds = rounds[1:]
    longer = EPOCH / STEPS  # the end comes once an epoch, however long
    loop = statistics.median(b / a for a, b, _, _ in rounds)
    whole = statistics.median((longer * (c - d) + d) / (longer * a) for a, _, c, d in rounds)
    print(f"{STEPS} steps, bare: {1e3 * statistics.median(r[0] for r in rounds):.0f} ms")
    print(f"loop: {100 * (loop - 1):+.1f} %")
    print(f"recorded, over an epoch of {EPOCH} steps: {100 * (whole - 1):+.1f} %")


if __name__ == "__main__":
    main()
