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
from vardrop.data import load_images
from vardrop.diagnostics import accuracies
from vardrop.estimators import local_reparameterization
from vardrop.objective import ELBO, Categorical
from vardrop.posteriors import MultiplicativeGaussian
from vardrop.recipes import Recipe, variance_layer
from vardrop.training import train


class _Activation(nn.Module):
    """ReLU or |x|; `stand_in` replaces |x| by |x| N(0.80, 0.36) / 0.80 of a net without noise."""

    def __init__(self, kind: Literal["relu", "abs"], stand_in: bool = False) -> None:
        super().__init__()
        self.kind, self.stand_in = kind, stand_in

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "relu":
            return torch.relu(x)
        if not self.stand_in:
            return x.abs()
        mean, variance = math.sqrt(2 / math.pi), 1 - 2 / math.pi
        return x * (mean + math.sqrt(variance) * torch.randn_like(x))


class _Scale(nn.Module):
    """sqrt(x^2 sigma^2): the deviation of a variance layer, without its noise."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.sigma = nn.Parameter(nn.Linear(inputs, outputs).weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(nn.functional.linear(x.square(), self.sigma.square()) + 1e-8)


def _net(kind: Literal["relu", "abs"], alpha: float, stand_in: bool) -> nn.Module:
    middle: nn.Module = nn.Linear(300, 300, bias=False)
    if stand_in:
        middle = _Scale(300, 300)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300, bias=False), nn.BatchNorm1d(300), nn.ReLU(),
        middle, _Activation(kind, stand_in), nn.BatchNorm1d(300), nn.Linear(300, 10),
    )  # fmt: skip
    if alpha == math.inf and not stand_in:
        convert(net, variance_layer(), where="4")
    elif not stand_in:
        q = MultiplicativeGaussian(alpha, per="layer", learned=False)
        convert(net, Recipe(q, estimator=local_reparameterization), where="4")
    return net


def noise_tolerance(
    seed: int, epochs: int = 10, alphas: tuple[float, ...] = (0.1, 1.0, 10.0, 100.0),
    examples: int = 60_000, samples: int = 20,
) -> dict[str, Any]:  # fmt: skip
    """Ensemble and deterministic accuracy against alpha, with ReLU and with the absolute value."""
    x, y = (t[:examples] for t in load_images("mnist"))
    test = load_images("mnist", "test")
    loader = list(zip(test.x.split(1000), test.y.split(1000), strict=True))
    figures: dict[str, float] = {}
    cases = [(k, a, False) for k in ("relu", "abs") for a in (*alphas, math.inf)]
    for kind, alpha, stand_in in [*cases, ("abs", math.inf, True)]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = _net(kind, alpha, stand_in)  # type: ignore[arg-type]
            elbo = ELBO(net, Categorical(), len(x), beta=0.0)
            parameters = [p for p in net.parameters() if p.requires_grad]
            optimizer = torch.optim.Adam(parameters, lr=1e-3, fused=True)
            for _ in train(
                elbo,
                optimizer,
                x,
                y,
                epochs,
                batch_size=200,
                rate=lambda e: 1 - e / epochs,
                seed=seed,
            ):
                pass
            name = f"{kind}, alpha {'infinite' if alpha == math.inf else format(alpha, 'g')}"
            if stand_in:
                figures["abs, stand-in N(0.80, 0.36), ensemble %"] = _stand_in_accuracy(
                    net, loader, samples
                )
                continue
            found = accuracies(net, loader, samples)
        figures[f"{name}, ensemble %"] = 100 * found.ensemble
        figures[f"{name}, deterministic %"] = 100 * found.deterministic
    return {"figures": figures}


def _stand_in_accuracy(net: nn.Module, loader: list[tuple[Tensor, Tensor]], samples: int) -> float:
    net.eval()
    with torch.no_grad():
        hits = [
            torch.stack([net(x).softmax(1) for _ in range(samples)]).mean(0).argmax(1) == y
            for x, y in loader
        ]
    return 100 * float(torch.cat(hits).float().mean())
