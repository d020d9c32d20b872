"""Find the units that do nothing, fold what they still say into biases, and cut them out."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.compression.coupling import Place, Unit
from vardrop.compression.flow import Inputs, data_flow
from vardrop.compression.layout import (
    affine_layers,
    channel_axis,
    column,
    column_is_zero,
    groups,
    is_depthwise,
    row,
    units,
)

_UNIFORM = 1e-6  # how far positions may differ, relative to the largest, by rounding alone
_OUTPUT = "it reaches the output of the net"


def shared_layers(net: nn.Module, inputs: Inputs) -> dict[str, str]:
    """Layers that may not change, with the reason: used more than once, or with tied weights."""
    calls = {name: len(seen) for name, seen in data_flow(net, inputs).items()}
    owners = Counter(id(p) for m in net.modules() for p in m.parameters(recurse=False))
    found = {}
    for name, layer in affine_layers(net).items():
        if calls[name] != 1:
            found[name] = f"'{name}' runs {calls[name]} times"
        elif any(owners[id(p)] > 1 for p in layer.parameters()):
            found[name] = f"'{name}' shares its weights"
    return found


def _true_readers(unit: Unit, layers: dict[str, Any]) -> dict[str, list[int]]:
    """The inputs behind which a unit ends; a depthwise layer only passes it on."""
    found: dict[str, list[int]] = {}
    for name, index in unit.readers:
        if not is_depthwise(layers[name]):
            found.setdefault(name, []).append(index)
    return found


def _effect(layer: Any, seen: Tensor, constant: list[int]) -> Tensor | None:
    """What constant inputs add to each output, or None where that differs between positions."""
    axis = channel_axis(layer) % seen.dim()
    index = torch.tensor(constant, device=seen.device)
    only = torch.zeros_like(seen).index_copy(axis, index, seen.index_select(axis, index))
    twin = copy.copy(layer)
    twin._parameters = {"weight": layer.weight, "bias": None}
    twin._forward_hooks, twin._forward_pre_hooks = {}, {}
    y = twin(only)
    others = [d for d in range(y.dim()) if d != channel_axis(layer) % y.dim()]
    low, high = y.amin(others), y.amax(others)
    if bool((high - low > _UNIFORM * y.abs().max()).any()):
        return None
    return (low + high) / 2


class Dead:
    """The search for dead units in a plain net, which it changes without changing its outputs."""

    def __init__(self, net: nn.Module, inputs: Inputs, found: list[Unit]) -> None:
        self.net, self.inputs = net, inputs
        self.layers = affine_layers(net)
        self.removed: list[Unit] = []
        self.stays: Counter[tuple[str, str]] = Counter()  # (layer, reason): units
        self._search(found)

    @torch.no_grad()
    def _search(self, waiting: list[Unit]) -> None:
        """Rounds, because a unit without readers leaves the units before it without readers."""
        moved = True
        while moved:
            moved, left = False, []
            self.stays.clear()
            flow = data_flow(self.net, self.inputs)
            zero = {name: column_is_zero(layer) for name, layer in self.layers.items()}
            constant = {name: self._constant(name, seen) for name, seen in flow.items()}
            for unit in waiting:
                reason = self._consider(unit, flow, zero, constant)
                if reason is None:
                    moved = True
                    self.removed.append(unit)
                else:
                    left.append(unit)
                    if reason and reason != _OUTPUT:
                        self.stays[unit.emitters[0][0], reason] += 1
            waiting = left

    def _constant(self, name: str, seen: list[Tensor]) -> list[bool]:
        axis = channel_axis(self.layers[name])
        marked = [torch.isnan(s).movedim(axis, 0).flatten(1).any(1) for s in seen]
        return [not m for m in torch.stack(marked).any(0).tolist()] if marked else []

    def _consider(
        self,
        unit: Unit,
        flow: dict[str, list[Tensor]],
        zero: dict[str, list[bool]],
        constant: dict[str, list[bool]],
    ) -> str | None:
        """None once a unit is taken out, "" where it is alive, else why a dead one stays."""
        folds: list[tuple[Any, Tensor]] = []
        for name, indices in _true_readers(unit, self.layers).items():
            if all(zero[name][i] for i in indices):
                continue
            if not all(zero[name][i] or constant[name][i] for i in indices):
                return ""
            if unit.reason:
                continue
            effect = _effect(self.layers[name], flow[name][0], indices)
            if effect is None:
                return f"its constant meets the padding border of '{name}'"
            folds.append((self.layers[name], effect))
        if unit.reason:
            return unit.reason
        self._take_out(unit, folds)
        return None

    def _take_out(self, unit: Unit, folds: list[tuple[Any, Tensor]]) -> None:
        for layer, effect in folds:
            if layer.bias is None and bool(effect.any()):
                layer.bias = nn.Parameter(torch.zeros_like(effect))
            if layer.bias is not None:
                layer.bias += effect
        for name, indices in _true_readers(unit, self.layers).items():
            for i in indices:
                column(self.layers[name], self.layers[name].weight, i).zero_()
        for name, i in unit.emitters:
            module = self.net.get_submodule(name)
            if isinstance(module, nn.Embedding):
                module.weight[:, i] = 0
                continue
            row(module, module.weight, i).zero_()  # type: ignore[arg-type]
            if module.bias is not None:
                module.bias[i] = 0  # type: ignore[operator, index]


def settle(net: nn.Module, removed: list[Unit]) -> list[Unit]:
    """Put units back until every layer keeps one, and every group of a layer as many.

    All of them are zero by now, so this changes shapes and nothing else.
    """
    layers = affine_layers(net)
    gone = list(removed)
    while (back := _missing(layers, gone)) is not None:
        gone.remove(back)
    return gone


def _missing(layers: dict[str, Any], gone: list[Unit]) -> Unit | None:
    emitted = {place: unit for unit in gone for place in unit.emitters}
    read = {place: unit for unit in gone for place in unit.readers}
    for name, layer in layers.items():
        sizes = [n // groups(layer) for n in units(layer)]
        lost: list[list[list[Place]]] = [
            [
                [(name, g * size + i) for i in range(size) if (name, g * size + i) in places]
                for g in range(groups(layer))
            ]
            for size, places in zip(sizes, (read, emitted), strict=True)
        ]
        place = _unbalanced(lost, sizes)
        if place is not None:
            side, where = place
            return (read, emitted)[side][where]
    return None


def _unbalanced(lost: list[list[list[Place]]], sizes: list[int]) -> tuple[int, Place] | None:
    """A lost place that has to come back: (0 input or 1 output, place)."""
    left = [[size - len(places) for places in side] for side, size in zip(lost, sizes, strict=True)]
    alive = [g for g in range(len(left[0])) if left[0][g] or left[1][g]]
    if not alive:
        return 1, lost[1][0][0]
    for side in (0, 1):
        want = max(1, *(left[side][g] for g in alive))
        for g in alive:
            if left[side][g] < want:
                return side, lost[side][g][0]
    return None
