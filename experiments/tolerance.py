"""How much noise a net can take: from Gaussian dropout to the variance-layer limit.

After the absolute value, a zero-mean Gaussian unit s |e| has mean 0.80 s and deviation 0.60 s: it
is a unit under Gaussian dropout with alpha = pi/2 - 1 = 0.57, so N(1, infinity) noise before the
absolute value does what N(1, 0.57) noise does behind it.

Neklyudov, Molchanov, Ashukha & Vetrov 2019, "Variance networks", sec. 3 and 5.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vardrop.conversion import convert
from vardrop.data import Images, load_images
from vardrop.diagnostics import accuracies
from vardrop.estimators import local_reparameterization
from vardrop.objective import ELBO, Categorical
from vardrop.posteriors import MultiplicativeGaussian
from vardrop.recipes import Recipe, variance_layer
from vardrop.training import train

Kind = Literal["relu", "abs", "stand-in"]


class _Abs(nn.Module):
    """|x| of what comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


class _StandIn(nn.Module):
    """x N(0.80, 0.36), also in evaluation: the half-normal's mean and variance, as a Gaussian."""

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = math.sqrt(2 / math.pi), 1 - 2 / math.pi
        return x * (mean + math.sqrt(variance) * torch.randn_like(x))


class _Scale(nn.Module):
    """sqrt(x^2 sigma^2): the deviation of a variance layer, without its noise."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.sigma = nn.Parameter(nn.Linear(inputs, outputs).weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(nn.functional.linear(x.square(), self.sigma.square()) + 1e-8)


def _net(kind: Kind, alpha: float) -> nn.Module:
    """784-300-300-10 whose middle layer has the noise; an infinite alpha is a variance layer."""
    middle: nn.Module = nn.Linear(300, 300, bias=False)
    activation = {"relu": nn.ReLU, "abs": _Abs, "stand-in": _StandIn}[kind]
    if kind == "stand-in":
        middle = _Scale(300, 300)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300, bias=False), nn.BatchNorm1d(300), nn.ReLU(),
        middle, activation(), nn.BatchNorm1d(300), nn.Linear(300, 10),
    )  # fmt: skip
    if kind == "stand-in":
        return net
    if alpha == math.inf:
        return convert(net, variance_layer(), where="4")
    q = MultiplicativeGaussian(alpha, per="layer", learned=False)
    return convert(net, Recipe(q, estimator=local_reparameterization), where="4")


def noise_tolerance(
    seed: int, epochs: int = 10, alphas: tuple[float, ...] = (0.1, 1.0, 10.0, 100.0),
    examples: int = 60_000, samples: int = 20,
) -> dict[str, Any]:  # fmt: skip
    """Ensemble and deterministic accuracy against alpha, with ReLU and with the absolute value."""
    x, y = (t[:examples] for t in load_images("mnist"))
    test = load_images("mnist", "test")
    loader = list(zip(test.x.split(1000), test.y.split(1000), strict=True))
    figures: dict[str, float] = {}
    cases: list[tuple[Kind, float]] = [
        *(("relu", alpha) for alpha in (*alphas, math.inf)),
        *(("abs", alpha) for alpha in (*alphas, math.inf)),
        ("stand-in", math.inf),
    ]
    for kind, alpha in cases:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = _trained(_net(kind, alpha), Images(x, y), epochs, seed)
            if kind == "stand-in":
                accuracy = _stand_in_accuracy(net, loader, samples)
                figures["abs, stand-in N(0.80, 0.36), ensemble %"] = accuracy
                continue
            found = accuracies(net, loader, samples)
        name = f"{kind}, alpha {'infinite' if alpha == math.inf else format(alpha, 'g')}"
        figures[f"{name}, ensemble %"] = 100 * found.ensemble
        figures[f"{name}, deterministic %"] = 100 * found.deterministic
    return {"figures": figures}


def _trained(net: nn.Module, data: Images, epochs: int, seed: int) -> nn.Module:
    elbo = ELBO(net, Categorical(), len(data.x), beta=0.0)
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, fused=True)
    for _ in train(
        elbo, optimizer, *data, epochs, batch_size=200, rate=lambda e: 1 - e / epochs, seed=seed
    ):
        pass
    return net


def _stand_in_accuracy(net: nn.Module, loader: list[tuple[Tensor, Tensor]], samples: int) -> float:
    net.eval()
    with torch.no_grad():
        hits = [
            torch.stack([net(x).softmax(1) for _ in range(samples)]).mean(0).argmax(1) == y
            for x, y in loader
        ]
    return 100 * float(torch.cat(hits).float().mean())
