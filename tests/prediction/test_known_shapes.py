"""Shapes that are worked out from the modules are those of a pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vardrop as vd
from vardrop.prediction.preparation import Size, measured, prepared
from vardrop.prediction.ways import chain


@pytest.mark.parametrize(
    "net, shape",
    [
        (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), (3, 4)),
        (nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 2))), (3, 4)),
        (
            nn.Sequential(
                nn.Conv2d(2, 4, (3, 2), (2, 1), (0, 1), (1, 2), groups=2), nn.ReLU(),
                nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(42, 200),
            ),
            (2, 14, 15),
        ),
        (nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.AvgPool2d(2)), (2, 6, 6)),
        (nn.Sequential(nn.Conv1d(2, 3, 3, padding="valid"), nn.MaxPool1d(2)), (2, 7)),
        (nn.Sequential(nn.Conv1d(2, 3, 3, 2), nn.AvgPool1d(2), nn.Softmax(1)), (2, 9)),
    ],
)  # fmt: skip
def test_shapes_from_the_modules_are_those_of_a_pass(
    net: nn.Module, shape: tuple[int, ...]
) -> None:
    vd.convert(net, vd.sparse_vd())
    x = torch.zeros(2, *shape)
    found = chain(net, x)
    assert found is not None
    assert found.size == measured(prepared(net, noise=True), x)


@pytest.mark.parametrize(
    "module, shape",
    [
        (nn.Linear(3, 2), (4,)),
        (nn.Flatten(0), (4,)),
        (nn.Conv2d(2, 2, 7), (2, 5, 5)),
        (nn.Conv2d(3, 2, 3), (2, 5, 5)),
        (nn.MaxPool2d(2, ceil_mode=True), (2, 5, 5)),
        (nn.BatchNorm1d(4, track_running_stats=False), (4,)),
        (nn.LSTM(2, 2), (5, 2)),
    ],
)
def test_what_is_not_known_is_left_to_a_pass(module: nn.Module, shape: tuple[int, ...]) -> None:
    first = nn.Linear(shape[-1], shape[-1])
    net = vd.convert(nn.Sequential(first, module), vd.sparse_vd(), include="0")
    assert chain(net, torch.zeros(1, *shape)) is None


def test_only_what_comes_after_noise_is_counted_once_per_draw() -> None:
    net = nn.Sequential(nn.Linear(3, 500), nn.Linear(500, 7), nn.Linear(7, 2))
    x = torch.zeros(2, 3)
    for where, largest in (("0", 500), ("1", 7), ("2", 2)):
        copied = vd.convert(nn.Sequential(*net), vd.sparse_vd(), include=where)
        assert measured(prepared(copied, noise=True), x) == Size(largest)
        assert chain(copied, x).size == Size(largest)
        vd.revert(copied)


def test_layers_that_draw_weights_count_them() -> None:
    x = torch.zeros(2, 50)
    sizes = {}
    for name in ("weight_sample", "flipout", "per_example", "local_reparameterization"):
        recipe = vd.Recipe(vd.AdditiveGaussian(), estimator=getattr(vd, name))
        net = vd.convert(nn.Linear(50, 4), recipe)
        sizes[name] = measured(prepared(net, noise=True), x)
    assert sizes["weight_sample"] == sizes["flipout"] == Size(4, 200)
    assert sizes["per_example"] == Size(200)
    assert sizes["local_reparameterization"] == Size(4)
