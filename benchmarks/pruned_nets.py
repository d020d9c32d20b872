"""LeNets pruned as far as training has pruned them, without the training.

Latency depends on shapes and on how many weights are left, not on their values. Both are read from
the trained nets' figures in results/louizos (units, channels and weights that were left in each
layer); which units and weights these are, and the weights, is drawn here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vardrop as vd
from nets import lenet5, mlp

FIGURES = Path(__file__).parents[1] / "results" / "louizos"
# name: (the figures of training, the dense net)
NETS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "LeNet-300-100": ("lenet300", lambda: mlp(784, 300, 100, 10)),
    "LeNet-5": ("lenet5-channels", lenet5),
}
DEAD, ALIVE = 10.0, -24.0  # log sigma^2


def left(name: str) -> list[dict[str, int]]:
    """What training has left in each layer: counts of inputs, outputs and weights."""
    result = json.loads((FIGURES / f"{NETS[name][0]}.json").read_text())
    return list(result["runs"][0]["layers"]["small"].values())


def _chosen(count: int, among: Tensor, generator: torch.Generator) -> Tensor:
    return among[torch.randperm(len(among), generator=generator)[:count]]


def _inputs(fan_in: int, count: int, before: Tensor, units: int, draw: torch.Generator) -> Tensor:
    """Inputs that are left: those fed by what is left before; of a flattened channel, one or more.

    `before` are the units, of `units`, that are left in the layer before.
    """
    each = fan_in // units
    features = before[:, None] * each + torch.arange(each)
    sure = features[:, 0]
    others = _chosen(count - len(sure), features[:, 1:].flatten(), draw)
    return torch.cat([sure, others])


def _kept(
    weight: Tensor, rows: Tensor, columns: Tensor, count: int, draw: torch.Generator
) -> Tensor:
    """A mask with `count` weights in the given rows and columns, and at least one in each."""
    block = torch.zeros(len(rows), len(columns), weight[0, 0].numel(), dtype=torch.bool)
    ends = torch.arange(max(len(rows), len(columns)))
    where = torch.randint(block.shape[2], ends.shape, generator=draw)
    block[ends % len(rows), ends % len(columns), where] = True
    free = (~block).flatten().nonzero().flatten()
    block.view(-1)[_chosen(count - int(block.sum()), free, draw)] = True
    mask = torch.zeros(weight.shape[:2] + block.shape[2:], dtype=torch.bool)
    mask[rows[:, None], columns] = block
    return mask.view_as(weight)


@torch.no_grad()
def pruned(name: str) -> nn.Module:
    """A noisy net whose dead weights leave what training has left."""
    noisy: Any = vd.convert(NETS[name][1](), vd.sparse_vd(log_sigma2=ALIVE))
    layers = [m for m in noisy.modules() if type(m) in (vd.Linear, vd.Conv2d)]
    draw = torch.Generator().manual_seed(0)
    rows, units = torch.zeros(1, dtype=torch.long), 1
    for layer, counts in zip(layers, left(name), strict=True):
        columns = _inputs(layer.weight.shape[1], counts["inputs"], rows, units, draw)
        units = len(layer.weight)
        rows = _chosen(counts["outputs"], torch.arange(units), draw)
        kept = _kept(layer.weight, rows, columns, counts["weights"], draw)
        layer.log_sigma2[~kept] = DEAD
    return noisy
