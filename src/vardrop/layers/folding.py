"""Fold the mean of a gate into the weights of its layer."""

from __future__ import annotations

import torch
from torch import Tensor

from vardrop.gates import Gate, Side
from vardrop.posteriors import Axes


@torch.no_grad()
def fold(gate: Gate, weight: Tensor, bias: Tensor | None, axes: Axes) -> None:
    """Scale a weight (and, for a gate on outputs, the bias) by the gate's mean, in place."""
    mean = gate.unit_mean()
    if mean is None:
        return
    scale(weight, mean, gate.side, axes)
    if gate.side == "output" and bias is not None:
        bias.mul_(mean)


@torch.no_grad()
def scale(weight: Tensor, per_unit: Tensor, side: Side, axes: Axes) -> None:
    """Multiply a tensor like the weight by one number per input or output unit, in place."""
    weight.mul_(_as_weight(per_unit, weight, axes.input[0] if side == "input" else axes.output[0]))


def _as_weight(per_unit: Tensor, weight: Tensor, axis: int) -> Tensor:
    shape = [1] * weight.dim()
    shape[axis] = weight.shape[axis]
    if per_unit.numel() == shape[axis]:
        return per_unit.view(shape)
    # Grouped convolution: the rows of the kernel (axis 0) see the units of their own group only.
    groups = per_unit.numel() // shape[axis]
    shape[0] = weight.shape[0]
    rows = per_unit.view(groups, -1).repeat_interleave(shape[0] // groups, 0)
    return rows.view(shape)
