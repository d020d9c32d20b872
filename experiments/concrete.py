"""Concrete dropout on a line: y = 2 x + 8 + N(0, 1), x ~ N(0, 1), with ever more data.

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

import math
from typing import Any

import torch
from torch import Tensor, nn

from experiments.trainings import Watch, mlp
from vardrop.conversion import convert
from vardrop.gates import Gate
from vardrop.noisy import sampling
from vardrop.objective import ELBO, HeteroscedasticGaussian, parameter_groups
from vardrop.recipes import concrete_dropout
from vardrop.tuning import Loop

BATCH = 20


def line(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """`count` points of y = 2 x + 8 + N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, generator=generator)
    return x, 2 * x + 8 + torch.randn(count, 1, generator=generator)


def line_fits(
    seed: int,
    counts: tuple[int, ...] = (10, 100, 1000, 10_000),
    width: int = 256,
    steps: int = 5000,
    draws: int = 20,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Train on so many points; root mean square error, deviations and rates on 1000 others."""
    watch = watch or Watch()
    curve = []
    for count in counts:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = convert(mlp(1, width, width, width, 2), concrete_dropout(length_scale=1e-4))
            watch.fit(f"{count} points", _loop(net, count, steps, seed), fraction=1 / len(counts))
            curve.append({"points": count, **_scores(net, seed, draws)})
    figures = {
        f"{name}, {record['points']} points": value
        for record in curve
        for name, value in record.items()
        if name != "points"
    }
    return {"figures": figures, "curve": curve}


def _loop(net: nn.Module, count: int, steps: int, seed: int) -> Loop:
    elbo = ELBO(net, HeteroscedasticGaussian(), num_data=count)
    optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3, noise_lr=1e-2))
    epochs = steps // math.ceil(count / BATCH)

    def rate(epoch: float) -> float:
        return min(1.0, 2 - 2 * epoch / epochs)

    return Loop(elbo, optimizer, *line(count, seed), epochs, BATCH, rate=rate, seed=seed)


def _scores(net: nn.Module, seed: int, draws: int) -> dict[str, float]:
    x, y = line(1000, seed + 1_000_000)
    with torch.no_grad(), sampling(net.eval()):
        means, log_variances = torch.stack([net(x) for _ in range(draws)]).unbind(-1)
    gates = [m for m in net.modules() if isinstance(m, Gate)]
    rates = [torch.sigmoid(gate.tensors["drop_logit"].detach()).item() for gate in gates]
    return {
        "error": (means.mean(0) - y[:, 0]).square().mean().sqrt().item(),
        "epistemic deviation": means.var(0).mean().sqrt().item(),
        "aleatoric deviation": log_variances.exp().mean().sqrt().item(),
        "input rate": rates[0],
        "hidden rate": sum(rates[1:]) / len(rates[1:]),
    }
