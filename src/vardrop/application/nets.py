"""Nets by name, sized for the data."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod

import torch
from torch import nn

from vardrop.data.splits import Kind
from vardrop.errors import VardropError
from vardrop.training.settings import FEW

Shape = tuple[int, ...]


def _dense(shape: Shape, widths: tuple[int, ...]) -> nn.Sequential:
    sizes = (prod(shape), *widths)
    layers: list[nn.Module] = [nn.Flatten()]
    for n, m in pairwise(sizes):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _lenet5(shape: Shape, outputs: int) -> nn.Sequential:
    """LeNet-5-Caffe; images below 20 pixels are padded so that two poolings leave something."""
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise VardropError(
            "Expected images of at least 4 x 4 for the net lenet5, but got inputs of shape "
            f"{shape}. Use the net mlp."
        )
    padding = 0 if min(shape[1:]) >= 20 else 2
    features = nn.Sequential(
        nn.Conv2d(shape[0], 20, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    with torch.no_grad():
        found = features(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(*features, nn.Linear(found, 500), nn.ReLU(), nn.Linear(500, outputs))


NETS: dict[str, tuple[str, Callable[[Shape, int], nn.Sequential]]] = {
    "mlp50": ("dense, two hidden layers of 50", lambda s, n: _dense(s, (50, 50, n))),
    "mlp": ("dense, two hidden layers of 100", lambda s, n: _dense(s, (100, 100, n))),
    "lenet300": ("dense, hidden layers of 300 and 100", lambda s, n: _dense(s, (300, 100, n))),
    "lenet5": ("two convolutions and a hidden layer of 500; for images", _lenet5),
}


def usual_net(kind: Kind, rows: int) -> str:
    """The net where none is given: smaller for a table of few rows."""
    return "mlp50" if kind == "table" and rows < FEW else "mlp"


def build_net(name: str, shape: Shape, outputs: int) -> nn.Sequential:
    """A fresh plain net by its name.

    >>> build_net("lenet5", (1, 8, 8), 10)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    if name not in NETS:
        raise VardropError(f"Expected a net among {', '.join(NETS)}, but got {name!r}.")
    return NETS[name][1](shape, outputs)
