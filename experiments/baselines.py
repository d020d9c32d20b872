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


class FeatureDistance:
    """The squared Mahalanobis distance of a model's last features to the nearest class mean.

    The covariance is shared by all classes. A large distance marks an out-of-distribution input.

    Lee, Lee, Lee & Shin 2018, "A simple unified framework for detecting out-of-distribution
    samples and adversarial attacks", eq. 2.
    """

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor) -> None:
        self.net = net
        features = self.features(x)
        self.means = torch.stack([features[y == k].mean(0) for k in y.unique()])
        centred = features - self.means[y]
        covariance = centred.T @ centred / len(y)
        ridge = 1e-6 * covariance.diagonal().mean() * torch.eye(len(covariance))
        self.precision = torch.linalg.inv(covariance + ridge)

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """The inputs of the last dense layer, in double precision."""
        outputs: list[Tensor] = []
        last = [module for module in self.net.modules() if isinstance(module, nn.Linear)][-1]
        handle = last.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
        for part in x.split(1000):
            self.net(part)
        handle.remove()
        return torch.cat(outputs).double()

    def __call__(self, x: Tensor) -> Tensor:
        """One distance per input."""
        gaps = self.features(x).unsqueeze(1) - self.means
        return torch.einsum("nki,ij,nkj->nk", gaps, self.precision, gaps).amin(1)


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
