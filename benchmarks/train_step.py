"""Train step of noisy nets against the same plain net: round-robin, medians, one thread.

python benchmarks/train_step.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import vardrop as vd
from vardrop.experiments.nets import lenet5, mlp

CASES = {
    "mlp 784-300-100-10 b100": (lambda: mlp(784, 300, 100, 10), (100, 784)),
    "mlp 784-1000-1000-10 b128": (lambda: mlp(784, 1000, 1000, 10), (128, 784)),
    "lenet5 b128": (lenet5, (128, 1, 28, 28)),
    "lenet5 b128 channels-last": (
        lambda: lenet5().to(memory_format=torch.channels_last),
        (128, 1, 28, 28),
    ),
}
RECIPES = {
    "sparse_vd (LRT, exact KL)": vd.sparse_vd(),
    "sparse_vd (LRT, sigmoid KL)": vd.sparse_vd(form="sigmoid"),
    "bayes_by_backprop (LRT)": vd.bayes_by_backprop(),
    "weight_sample, exact KL": vd.Recipe(vd.AdditiveGaussian(), vd.LogUniform(), vd.weight_sample),
    "variance_layer": vd.variance_layer(),
    "variational_dropout A": vd.variational_dropout("A"),
}


def plain_step(make, x, y, fused):
    net = make()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=fused)

    def step():
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def noisy_step(make, recipe, x, y, fused, kl_value_every=1):
    net = vd.convert(make(), recipe)
    elbo = vd.ELBO(net, vd.Categorical(), num_data=60_000, kl_value_every=kl_value_every)
    optimizer = torch.optim.Adam(vd.parameter_groups(elbo, lr=1e-3), fused=fused)

    def step():
        optimizer.zero_grad(set_to_none=True)
        elbo(x, y).loss.backward()
        optimizer.step()

    return step


def measure(steps, rounds):
    """Median seconds of each step, taken in turns so that a slow moment hits all alike."""
    times = {name: [] for name in steps}
    for i in range(rounds + 3):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if i >= 3:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--case", default="", help="part of a case's name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for case, (make, shape) in CASES.items():
        if arguments.case not in case:
            continue
        x, y = torch.rand(shape), torch.randint(10, (shape[0],))
        if "channels-last" in case:
            x = x.to(memory_format=torch.channels_last)
        steps = {("plain", fused): plain_step(make, x, y, fused) for fused in (False, True)} | {
            (name, fused): noisy_step(make, recipe, x, y, fused)
            for name, recipe in RECIPES.items()
            for fused in (False, True)
        }
        steps |= {
            ("sparse_vd, KL value every 10", fused): noisy_step(
                make, vd.sparse_vd(), x, y, fused, kl_value_every=10
            )
            for fused in (False, True)
        }
        medians = measure(steps, arguments.rounds)
        plain = medians["plain", False]
        print(f"{case}: plain step with default Adam {1e3 * plain:.2f} ms = 1")
        print("  default  fused Adam")
        for name in dict.fromkeys(name for name, _ in steps):
            default, fused = (medians[name, f] / plain for f in (False, True))
            print(f"  {default:6.2f}x {fused:6.2f}x  {name}")


if __name__ == "__main__":
    main()
