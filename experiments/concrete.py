"""Concrete dropout on a line: y = 2 x + 8 + N(0, 1), x ~ N(0, 1), with ever more data.

    python -m experiments.concrete /tmp/concrete.json

As N grows the model learns the line, so the learned rates and the epistemic deviation fall, and
the aleatoric deviation goes to 1. The recipe is that of the authors' notebook: three hidden layers
(1024 units there), a mean and a log variance as outputs, length scale 1e-4, Adam, batches of 20.
They train for 1000 to 2000 steps at one learning rate, so the rates are still on their way and the
aleatoric deviation ends at 1.12: it has to cover the noise of the gates too. Here every N has 5000
steps, so that only the data differ; the learning rate is 1e-2 for the rates, 1e-3 for the weights,
and falls to zero over the second half.

Gal, Hron & Kendall 2017, "Concrete dropout", sec. 4.1.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from experiments.nets import mlp
from vardrop.conversion import convert
from vardrop.gates import Gate
from vardrop.noisy import sampling
from vardrop.objective import ELBO, HeteroscedasticGaussian, parameter_groups
from vardrop.recipes import concrete_dropout
from vardrop.training import train

COUNTS = (10, 100, 1000, 10_000)
BATCH, STEPS = 20, 5000


def line(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """`count` points of y = 2 x + 8 + N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, generator=generator)
    return x, 2 * x + 8 + torch.randn(count, 1, generator=generator)


def run(
    count: int, seed: int, width: int = 256, steps: int = STEPS, draws: int = 20
) -> dict[str, float]:
    """Train on `count` points; root mean square error, deviations and rates on 1000 others."""
    x, y = line(count, seed)
    test_x, test_y = line(1000, seed + 1_000_000)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = convert(mlp(1, width, width, width, 2), concrete_dropout(length_scale=1e-4))
        elbo = ELBO(net, HeteroscedasticGaussian(), num_data=count)
        optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3, noise_lr=1e-2))
        epochs = steps // math.ceil(count / BATCH)

        def rate(epoch: float) -> float:
            return min(1.0, 2 - 2 * epoch / epochs)

        for _ in train(elbo, optimizer, x, y, epochs, BATCH, rate=rate, seed=seed):
            pass
        net.eval()
        with torch.no_grad(), sampling(net):
            means, log_variances = torch.stack([net(test_x) for _ in range(draws)]).unbind(-1)
    gates = [m for m in net.modules() if isinstance(m, Gate)]
    rates = [torch.sigmoid(gate.tensors["drop_logit"].detach()).item() for gate in gates]
    return {
        "rmse": (means.mean(0) - test_y[:, 0]).square().mean().sqrt().item(),
        "epistemic": means.var(0).mean().sqrt().item(),
        "aleatoric": log_variances.exp().mean().sqrt().item(),
        "input_rate": rates[0],
        "hidden_rate": sum(rates[1:]) / len(rates[1:]),
    }


def sweep(path: Path, counts: list[int], seeds: int = 3) -> dict[str, dict[str, float]]:
    """Every count and seed; what `path` holds already is not run again."""
    done: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.is_file() else {}
    for count in counts:
        for seed in range(seeds):
            if (key := f"{count}/{seed}") in done:
                continue
            done[key] = run(count, seed)
            path.write_text(json.dumps(done, indent=1))
            print(key, done[key], flush=True)
    return done


if __name__ == "__main__":
    sweep(Path(sys.argv[1]), list(COUNTS))
