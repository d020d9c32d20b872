"""Gal & Ghahramani 2016: dropout as variational inference, as an identity and on a toy.

With a mask e, (h * e) M = h (e * M): noise on features is noise on weights, and the dropout loss is
a scaled data term plus the KL of the singular posterior.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.trainings import Watch
from vardrop.conversion import convert
from vardrop.divergence import kl_divergence
from vardrop.noisy import sampling
from vardrop.objective import ELBO, Gaussian, parameter_groups
from vardrop.posteriors import Axes, Bernoulli
from vardrop.priors import Normal
from vardrop.recipes import binary_dropout
from vardrop.tuning import Loop


def identity(seed: int, inputs: int = 50, outputs: int = 30, rows: int = 64) -> dict[str, Any]:
    """The largest difference between the two forms, in output, gradient and regulariser."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64).requires_grad_()
    x = torch.randn(rows, inputs, generator=generator, dtype=torch.float64)
    drop_rate, length = 0.3, 2.0
    kept = torch.rand(inputs, generator=generator, dtype=torch.float64) >= drop_rate
    mask = kept.double() / (1 - drop_rate)
    q = Bernoulli(drop_rate, per="input")
    forms = (
        functional.linear(x * mask, weight),
        functional.linear(x, q.sample(weight, mask.view(1, -1), {})),
    )
    gradients = [torch.autograd.grad(y.square().sum(), weight)[0] for y in forms]
    axes = Axes(input=(1,), output=(0,))
    kl = kl_divergence(q, Normal(std=1 / length), weight, axes, {}, {})
    stated = 0.5 * length**2 * (1 - drop_rate) * (weight / (1 - drop_rate)).square().sum()
    return {
        "figures": {
            "output, largest difference": float((forms[0] - forms[1]).detach().abs().max()),
            "gradient, largest relative difference": _relative(*gradients),
            "regulariser, relative difference": _relative(kl, stated),
        }
    }


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def toy(
    seed: int, epochs: int = 2000, draws: int = 200, watch: Watch | None = None
) -> dict[str, Any]:
    """MC dropout on a noisy curve with a gap: the deviation grows where there is no data."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat([torch.linspace(-4, -1, 60), torch.linspace(1, 4, 60)]).unsqueeze(1)
    y = torch.sin(x) + 0.1 * torch.randn(x.shape, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net: nn.Module = nn.Sequential(
            nn.Linear(1, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 1)
        )
        convert(net, binary_dropout(0.1), exclude="0")
        elbo = ELBO(net, Gaussian(0.1), len(x))
        optimizer = torch.optim.Adam(parameter_groups(elbo, lr=1e-3, weight_decay=1e-4), fused=True)
        loop = Loop(elbo, optimizer, x, y, epochs, batch_size=len(x), seed=seed)
        (watch or Watch()).fit("MC dropout", loop)
        grid = torch.linspace(-8, 8, 161).unsqueeze(1)
        with sampling(net.eval()), torch.no_grad():
            outputs = torch.stack([net(grid) for _ in range(draws)]).squeeze(-1)
    std, mean, at = outputs.std(0), outputs.mean(0), grid.squeeze(1).abs()
    inside, outside = std[(at > 1) & (at < 4)].mean(), std[at > 6].mean()
    figures = {
        "deviation inside the data": float(inside),
        "deviation outside": float(outside),
        "outside / inside": float(outside / inside),
    }
    rows = zip(grid.squeeze(1).tolist(), mean.tolist(), std.tolist(), strict=True)
    curve = [{"x": a, "mean": b, "std": c} for a, b, c in rows]
    return {"figures": figures, "curve": curve}
