"""Simple alternatives that the library's methods are compared with."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn


class InputNoise(nn.Module):
    """Gaussian noise on the inputs, while training only."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def forward(self, x: Tensor) -> Tensor:
        return x + self.std * torch.randn_like(x) if self.training else x


def prune_magnitudes(net: nn.Module, keep: float, layerwise_scores: bool) -> None:
    """Set the weights with the smallest scores in the whole model to zero, in place.

    Their gradients are zero afterwards, so training leaves them at zero.

    The score is |w| (global magnitude pruning), or LAMP: w^2 over the sum of the squares of all
    weights of the layer that are at least as large.

    Lee, Park, Mo, Ahn & Shin 2021, "Layer-adaptive sparsity for the magnitude-based pruning",
    eq. 4.
    """
    layers = [m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    weights = [layer.weight.detach() for layer in layers]
    scores = [_lamp_scores(w) if layerwise_scores else w.abs() for w in weights]
    ranked = torch.cat([score.flatten() for score in scores]).sort(descending=True).values
    least = ranked[max(1, round(keep * len(ranked))) - 1]
    for layer, score in zip(layers, scores, strict=True):
        mask = score >= least
        layer.weight.data.mul_(mask)
        layer.weight.register_hook(partial(torch.mul, mask))


def _lamp_scores(weight: Tensor) -> Tensor:
    squares = weight.double().square().flatten()
    order = squares.argsort(descending=True)
    scores = torch.empty_like(squares)
    scores[order] = squares[order] / squares[order].cumsum(0)
    return scores.view_as(weight)
