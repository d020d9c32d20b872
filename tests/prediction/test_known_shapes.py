"""Shapes that are worked out from the modules are those of a pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vardrop as vd
from tests.prediction.nets import Wrapped
from vardrop.prediction.cost import calls
from vardrop.prediction.shapes import output_shape


@pytest.mark.parametrize(
    "net, shape",
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3)), (3, 4)),
        (nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 2))), (3, 4)),
        (
            nn.Sequential(
                nn.Conv2d(2, 4, (3, 2), (2, 1), (0, 1), (1, 2), groups=2), nn.ReLU(),
                nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(42, 2),
            ),
            (2, 14, 15),
        ),
    ],
)  # fmt: skip
def test_shapes_from_the_modules_are_those_of_a_pass(
    net: nn.Module, shape: tuple[int, ...]
) -> None:
    vd.convert(net, vd.sparse_vd())
    x = torch.zeros(2, *shape)
    known, seen = calls(net, x), calls(Wrapped(net), x)
    for a, b in zip(known, seen, strict=True):
        assert (a.module, a.elements, a.noisy) == (b.module, b.elements, b.noisy)
        assert (a.products, a.weights) == (b.products, b.weights)


@pytest.mark.parametrize(
    "module, shape",
    [
        (nn.Linear(3, 2), (4,)),
        (nn.Flatten(0), (4,)),
        (nn.Conv2d(2, 2, 3, padding="same"), (2, 5, 5)),
        (nn.Conv2d(2, 2, 7), (2, 5, 5)),
        (nn.Conv2d(3, 2, 3), (2, 5, 5)),
        (nn.MaxPool2d(2, ceil_mode=True), (2, 5, 5)),
        (nn.LSTM(2, 2), (5, 2)),
    ],
)
def test_what_is_not_known_is_left_to_a_pass(module: nn.Module, shape: tuple[int, ...]) -> None:
    assert output_shape(module, shape) is None
