"""One view of every affine layer: weights as (groups, outputs, inputs, *kernel) blocks.

Dense, convolutional, grouped, depthwise and transposed layers differ only in how they lay out that
block, so rows (what an output unit reads) and columns (where an input unit goes) are found, zeroed
and cut out in one way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.compression.parts import Scale
from vardrop.errors import VardropError

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
AFFINE: tuple[type[nn.Module], ...] = (nn.Linear, *_CONV)
# Modules that treat every unit by itself, with the tensors that have one entry a unit.
CARRIERS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.BatchNorm1d: ("weight", "bias", "running_mean", "running_var"),
    nn.BatchNorm2d: ("weight", "bias", "running_mean", "running_var"),
    nn.BatchNorm3d: ("weight", "bias", "running_mean", "running_var"),
    nn.PReLU: ("weight",),
    Scale: ("factor",),
}
_SIZE = {nn.PReLU: "num_parameters"}


def affine_layers(net: nn.Module) -> dict[str, Any]:
    """The plain affine layers of a net by name; subclasses with behaviour of their own are not."""
    return {name: m for name, m in net.named_modules() if type(m) in AFFINE}


def units(layer: Any) -> tuple[int, int]:
    """How many inputs and outputs a layer has."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


def groups(layer: Any) -> int:
    """Blocks of inputs that do not see each other's outputs."""
    return 1 if isinstance(layer, nn.Linear) else layer.groups


def is_depthwise(layer: Any) -> bool:
    """Whether every channel passes by itself."""
    inputs, outputs = units(layer)
    return groups(layer) == inputs == outputs > 1


def channel_axis(layer: Any) -> int:
    """Where the units run in the layer's input and output, counted from the end."""
    return -1 if isinstance(layer, nn.Linear) else 1 - layer.weight.dim()


def blocks(layer: Any, weight: Tensor) -> Tensor:
    """A view (groups, outputs / groups, inputs / groups, *kernel) of a tensor like the weight."""
    inputs, outputs = (n // groups(layer) for n in units(layer))
    if isinstance(layer, _TRANSPOSED):
        shape = (groups(layer), inputs, outputs, *weight.shape[2:])
        return weight.view(shape).transpose(1, 2)
    return weight.view(groups(layer), outputs, inputs, *weight.shape[2:])


def column(layer: Any, weight: Tensor, unit: int) -> Tensor:
    """A view of the weights that read one input unit."""
    block, local = divmod(unit, units(layer)[0] // groups(layer))
    return blocks(layer, weight)[block, :, local]


def row(layer: Any, weight: Tensor, unit: int) -> Tensor:
    """A view of the weights that feed one output unit."""
    block, local = divmod(unit, units(layer)[1] // groups(layer))
    return blocks(layer, weight)[block, local]


def column_is_zero(layer: Any) -> list[bool]:
    """For every input unit, whether no weight reads it."""
    seen = blocks(layer, layer.weight.detach()).ne(0)
    return [not s for s in seen.transpose(1, 2).flatten(2).any(2).flatten().tolist()]


def _by_block(keep: Sequence[int], size: int, count: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    for unit in keep:
        found[unit // size].append(unit % size)
    return found


def cut(layer: Any, weight: Tensor, inputs: Sequence[int], outputs: Sequence[int]) -> Tensor:
    """The part of a tensor like the weight that belongs to the kept inputs and outputs."""
    n_in, n_out = (n // groups(layer) for n in units(layer))
    kept_in = _by_block(inputs, n_in, groups(layer))
    kept_out = _by_block(outputs, n_out, groups(layer))
    whole = blocks(layer, weight)
    parts = [
        whole[g][o][:, i] for g, (i, o) in enumerate(zip(kept_in, kept_out, strict=True)) if i or o
    ]
    if len({p.shape for p in parts}) != 1:
        raise VardropError(
            f"Expected every group of {layer} to keep as many inputs and outputs, "
            f"but got {[tuple(p.shape[:2]) for p in parts]}."
        )
    if isinstance(layer, _TRANSPOSED):
        return torch.cat([p.transpose(0, 1) for p in parts]).contiguous()
    return torch.cat(parts).contiguous()


def resize(layer: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Cut a layer down to the kept inputs and outputs, in place."""
    n_in, n_out = units(layer)
    size_in, size_out = n_in // groups(layer), n_out // groups(layer)
    left = {i // size_in for i in inputs} | {o // size_out for o in outputs}
    weight = cut(layer, layer.weight.detach(), inputs, outputs)
    layer.weight = nn.Parameter(weight, layer.weight.requires_grad)
    if layer.bias is not None:
        layer.bias = nn.Parameter(
            layer.bias.detach()[list(outputs)].clone(), layer.bias.requires_grad
        )
    if isinstance(layer, nn.Linear):
        layer.in_features, layer.out_features = len(inputs), len(outputs)
    else:
        layer.in_channels, layer.out_channels = len(inputs), len(outputs)
        layer.groups = len(left)


def carrier_units(module: Any) -> int:
    """How many units a carrier tells apart; one where they all share its tensor."""
    return max(t.numel() for k in CARRIERS[type(module)] if (t := getattr(module, k)) is not None)


def resize_carrier(module: Any, keep: Sequence[int]) -> None:
    """Cut a module that treats every unit by itself down to the kept units, in place."""
    if carrier_units(module) == 1:
        return
    for name in CARRIERS[type(module)]:
        tensor = getattr(module, name)
        if tensor is not None:
            kept = tensor.detach()[list(keep)].clone()
            parameter = isinstance(tensor, nn.Parameter)
            setattr(module, name, nn.Parameter(kept, tensor.requires_grad) if parameter else kept)
    if not isinstance(module, Scale):
        setattr(module, _SIZE.get(type(module), "num_features"), len(keep))
