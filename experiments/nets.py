"""The architectures of the papers, as plain torch nets; convolutions in the faster layout."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


def mlp(*widths: int) -> nn.Sequential:
    """A dense ReLU net on flattened inputs: `mlp(784, 300, 100, 10)` is LeNet-300-100."""
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (n, m) in enumerate(pairwise(widths)):
        layers += [nn.Linear(n, m)] if i == len(widths) - 2 else [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers)


def lenet5(classes: int = 10) -> nn.Sequential:
    """LeNet-5-Caffe: conv 20@5, pool, conv 50@5, pool, 800-500-classes."""
    net = nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, classes),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def lenet5_batchnorm(classes: int = 10) -> nn.Sequential:
    """The LeNet-5 of the variance-network paper: BatchNorm after every layer, no biases."""
    net = nn.Sequential(
        nn.Conv2d(1, 20, 5, bias=False), nn.BatchNorm2d(20), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5, bias=False), nn.BatchNorm2d(50), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500, bias=False), nn.BatchNorm1d(500), nn.ReLU(),
        nn.Linear(500, classes, bias=False),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
