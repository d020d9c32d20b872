"""Toy problems for a variance layer: four Gaussians through two units, regression with a band.

Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vardrop.conversion import convert
from vardrop.diagnostics import Accuracies, accuracies
from vardrop.noisy import sampling
from vardrop.objective import ELBO, Categorical, Gaussian
from vardrop.recipes import variance_layer
from vardrop.training import train


def gaussians(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` points of each of four unit Gaussians at (3 or 10, 3 or 10), and their classes."""
    centres = torch.cartesian_prod(torch.tensor([3.0, 10.0]), torch.tensor([3.0, 10.0]))
    y = torch.arange(4).repeat_interleave(count)
    return centres[y] + torch.randn(4 * count, 2, generator=generator), y


def four_gaussians(
    steps: int = 2000, samples: int = 101, seed: int = 0
) -> tuple[nn.Module, Accuracies]:
    """Classify four Gaussians through a variance layer of two units; (net, test accuracies).

    The two units have mean zero, so a class can be told by their variances alone.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Linear(2, 100), nn.LeakyReLU()]
        for _ in range(3):
            layers += [nn.Linear(100, 100), nn.LeakyReLU()]
        bottleneck = convert(nn.Linear(100, 2, bias=False), variance_layer())
        layers += [bottleneck, nn.LeakyReLU(), nn.Linear(2, 100), nn.LeakyReLU(), nn.Linear(100, 4)]
        net = nn.Sequential(*layers)
        generator = torch.Generator().manual_seed(seed)
        x, y = gaussians(100, generator)
        elbo = ELBO(net, Categorical(), num_data=len(x))
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=1e-3)
        for _ in train(elbo, optimizer, x, y, steps, batch_size=len(x), seed=seed):
            pass
        return net, accuracies(net, [gaussians(250, generator)], samples)


class Band(NamedTuple):
    """A prediction over a grid of inputs: mean of the draws and their 5 % and 95 % quantiles."""

    x: Tensor
    mean: Tensor
    low: Tensor
    high: Tensor


def regression_band(
    steps: int = 2000, samples: int = 500, noise_std: float = 0.1, seed: int = 0
) -> Band:
    """Fit y = sin(3 x) + noise on [-1, 1] with a variance layer, and predict on [-2, 2]."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 200), nn.ReLU())
        net.append(nn.Linear(200, 1))
        convert(net, variance_layer(), where="2")
        x = torch.rand(200, 1) * 2 - 1
        y = torch.sin(3 * x) + noise_std * torch.randn_like(x)
        elbo = ELBO(net, Gaussian(noise_std, learned=True), num_data=len(x))
        optimizer = torch.optim.Adam([p for p in elbo.parameters() if p.requires_grad], lr=3e-3)
        for _ in train(
            elbo, optimizer, x, y, steps, batch_size=len(x),
            rate=lambda step: 1 - step / steps, seed=seed,
        ):  # fmt: skip
            pass
        grid = torch.linspace(-2, 2, 81)
        with torch.no_grad(), sampling(net.eval()):
            draws = torch.stack([net(grid[:, None]).squeeze(1) for _ in range(samples)])
        low, high = draws.quantile(torch.tensor([0.05, 0.95]), dim=0)
        return Band(grid, draws.mean(0), low, high)
