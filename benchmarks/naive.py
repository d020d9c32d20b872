"""Local reparameterisation as it is usually written: what a layer costs without care."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def sigmoid_kl(weight: Tensor, log_sigma2: Tensor) -> Tensor:
    """The approximation as it is usually written. Molchanov et al. 2017, eq. 14."""
    log_alpha = log_sigma2 - torch.log(weight.square() + 1e-8)
    k1, k2, k3 = 0.63576, 1.87320, 1.48695
    negative = k1 * torch.sigmoid(k2 + k3 * log_alpha) - 0.5 * torch.log1p(torch.exp(-log_alpha))
    return (k1 - negative).sum()


class Naive(nn.Module):
    """A layer whose outputs have the mean and the variance of noisy weights."""

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer
        self.log_sigma2 = nn.Parameter(torch.full_like(layer.weight, -10.0))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.layer(x), torch.exp(self.log_sigma2)
        if isinstance(self.layer, nn.Linear):
            variance = F.linear(x.square(), variance)
        else:
            variance = F.conv2d(x.square(), variance, None, self.layer.stride, self.layer.padding)
        return mean + torch.sqrt(variance + 1e-8) * torch.randn_like(mean)

    def kl(self) -> Tensor:
        return sigmoid_kl(self.layer.weight, self.log_sigma2)


def naive(net: nn.Module) -> nn.Module:
    """The net with every dense and convolutional layer replaced, in place."""
    for name, module in list(net.named_modules()):
        if isinstance(module, nn.Linear | nn.Conv2d):
            net.set_submodule(name, Naive(module))
    return net
