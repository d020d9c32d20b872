"""What a library computes, asked before it is timed.

The KL is a sum: it doubles with the outputs of a layer, and it doubles with the layers.
The gradients of several draws are exact: one backward pass over the sum of S losses gives what S
passes over one loss each give with the same noise. Noise that is kept in a buffer and refilled
before the backward pass fails this.
"""

from __future__ import annotations

from typing import Any

import torch
from peer_layers import Build, Model
from torch import Tensor, nn

DRAWS = 10
AVERAGED = 20  # calls over which a sampled KL is averaged


def _kl(build: Build, *widths: tuple[int, int]) -> float:
    torch.manual_seed(0)
    x = torch.rand(4, widths[0][0])
    model = build(nn.Sequential(*(nn.Linear(*w) for w in widths)), x)
    values = []
    for _ in range(AVERAGED):
        model.forward(x)
        values.append(float(model.kl().detach()))
    return sum(values) / AVERAGED


def kl_growth(build: Build) -> dict[str, float]:
    """KL of a layer twice as wide, and of two layers, over that of one."""
    one = _kl(build, (200, 200))
    return {
        "outputs": _kl(build, (200, 400)) / one,
        "layers": _kl(build, (200, 200), (200, 200)) / one,
    }


def _losses(model: Model, x: Tensor) -> list[Tensor]:
    return [model.forward(x).square().mean() for _ in range(DRAWS)]


def draws_cosine(build: Build) -> float:
    """Cosine of the gradient of a sum of draws with the sum of their gradients, at its worst."""
    torch.manual_seed(0)
    x = torch.rand(8, 30)
    model = build(nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 5)), x)
    parameters = list(model.parameters())
    gradients: list[list[Tensor]] = []
    for together in (True, False):
        for p in parameters:
            p.grad = None
        torch.manual_seed(1)
        if together:
            torch.stack(_losses(model, x)).sum().backward()  # type: ignore[no-untyped-call]
        else:
            for _ in range(DRAWS):
                model.forward(x).square().mean().backward()  # type: ignore[no-untyped-call]
        gradients.append([p.grad.flatten() for p in parameters if p.grad is not None])
    pairs = [(a, b) for a, b in zip(*gradients, strict=True) if len(a) > 1 and b.norm() > 0]
    return min(float(nn.functional.cosine_similarity(a, b, dim=0)) for a, b in pairs)


def check(build: Build) -> dict[str, Any]:
    """The figures, and the marks that a table shows."""
    growth, cosine = kl_growth(build), draws_cosine(build)
    marks = []
    if not 1.8 < growth["outputs"] < 2.2:
        marks.append(f"KL is no sum over weights (x{growth['outputs']:.2f} for 2x the weights)")
    elif not 1.8 < growth["layers"] < 2.2:
        marks.append(f"KL is no sum over layers (x{growth['layers']:.2f} for 2 layers)")
    if not cosine > 0.999:
        marks.append(f"gradients of {DRAWS} draws are wrong (cosine {cosine:.2f})")
    return {"kl_growth": growth, "draws_cosine": cosine, "marks": marks}
