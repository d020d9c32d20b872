"""The library's loop against a bare hand-written one on the MNIST MLP: ratio of an epoch's time.

python benchmarks/loop_overhead.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import vardrop as vd
from vardrop.experiments.nets import mlp
from vardrop.training import Loop, Recorder

STEPS, BATCH = 40, 100


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


def recorded(x, y, directory):
    """An epoch as `fit` runs it: with history, checkpoint and sparsity on disk."""
    elbo, optimizer = objective()
    loop = Loop(elbo, optimizer, x, y, 0, BATCH)
    recorder = Recorder(Path(directory), seconds=60.0)

    def epoch():
        loop.epochs += 1
        recorder.run(loop)

    return epoch


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x, y = torch.rand(STEPS * BATCH, 784), torch.randint(10, (STEPS * BATCH,))
    with tempfile.TemporaryDirectory() as directory:
        epochs = {
            "bare": bare(x, y), "loop": looped(x, y), "recorded": recorded(x, y, directory),
        }  # fmt: skip
        times = {name: [] for name in epochs}
        for i in range(arguments.rounds + 1):
            for name, epoch in epochs.items():  # in turns, so that a slow moment hits all alike
                start = time.perf_counter()
                epoch()
                if i:
                    times[name].append(time.perf_counter() - start)
    print(f"an epoch of {STEPS} steps, bare: {1e3 * statistics.median(times['bare']):.0f} ms")
    for name in ("loop", "recorded"):
        ratio = statistics.median(b / a for a, b in zip(times["bare"], times[name], strict=True))
        print(f"{name}: {100 * (ratio - 1):+.1f} %")


if __name__ == "__main__":
    main()
