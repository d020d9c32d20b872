"""Which units belong together: torch-pruning's dependency graph, checked by marks that flow.

A residual sum ties the channels of several layers, a concatenation shifts them, a flattening
spreads one channel over many features. A `Unit` is everything that must go at once.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import nn

from vardrop.compression.extras import require
from vardrop.compression.flow import Inputs, trace_units
from vardrop.compression.layout import (
    AFFINE,
    CARRIERS,
    affine_layers,
    carrier_units,
    groups,
    is_depthwise,
    units,
)
from vardrop.compression.parts import Scale
from vardrop.errors import VardropError

Place = tuple[str, int]  # a module's name and a unit of it


@dataclass(frozen=True, eq=False)
class Unit:
    """One removable thing: the outputs that emit it, the inputs that read it, what is between.

    `reason` says why it has to stay; empty where it may go.
    """

    emitters: tuple[Place, ...]
    readers: tuple[Place, ...]
    carriers: tuple[Place, ...]
    reason: str = ""

    @property
    def shape(self) -> tuple[tuple[str, ...], ...]:
        """The modules involved; units of one shape take the same way through the net."""
        parts = (self.emitters, self.readers, self.carriers)
        return tuple(tuple(sorted({name for name, _ in p})) for p in parts)


def _graph(net: nn.Module, inputs: Inputs) -> Any:
    pruning = require("torch_pruning", "torch-pruning")
    for parameter in net.parameters():
        parameter.requires_grad_(True)  # the graph is read off autograd's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pruning.DependencyGraph().build_dependency(
            net,
            example_inputs=inputs,
            customized_pruners={Scale: _scale_rule(pruning)},
            verbose=False,
        )


def _scale_rule(pruning: Any) -> Any:
    """Tell the dependency graph that a `Scale` has as many outputs as inputs, one to one."""

    class Rule(pruning.BasePruningFunc):  # type: ignore[misc, name-defined]
        def prune_out_channels(self, layer: Scale, idxs: list[int]) -> Scale:
            return layer

        def get_out_channels(self, layer: Scale) -> int:
            return len(layer.factor)

        prune_in_channels = prune_out_channels
        get_in_channels = get_out_channels

    return Rule()


def _members(graph: Any, root: nn.Module, names: dict[nn.Module, str]) -> list[Unit]:
    """The coupled sets of a root layer, one for each of its outputs."""
    places: dict[int, dict[str, list[Place]]] = defaultdict(lambda: defaultdict(list))
    reason = ""
    prune = graph.get_pruner_of_module(root).prune_out_channels
    count = graph.get_pruner_of_module(root).get_out_channels(root)
    for item in graph.get_pruning_group(root, prune, list(range(count))):
        module, side = item.dep.target.module, item.dep.handler.__name__
        if not isinstance(module, nn.Module):
            reason = "a bare parameter takes part"
        elif module in names:
            roles, why = _roles(module, side)
            reason = reason or (f"'{names[module]}' {why}" if why else "")
            for role in roles:
                for unit, start in zip(item.idxs, item.root_idxs, strict=True):
                    if unit < _count(module, role):
                        places[start][role].append((names[module], unit))
                    else:
                        reason = f"'{names[module]}' is not as the dependency graph sees it"
    return [
        Unit(tuple(p["emitter"]), tuple(p["reader"]), tuple(p["carrier"]), reason)
        for p in (places[i] for i in range(count))
    ]


def _count(module: Any, role: str) -> int:
    if type(module) in CARRIERS:
        shared = carrier_units(module) == 1  # one slope for all units
        return 1 << 31 if shared else carrier_units(module)
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    return units(module)[0 if role == "reader" else 1]


def _roles(module: nn.Module, side: str) -> tuple[tuple[str, ...], str]:
    if type(module) in AFFINE:
        if is_depthwise(module):
            return ("emitter", "reader"), ""
        if groups(module) == units(module)[1] > 1:
            return (), "has one output a group and several inputs"
        return ("emitter" if side == "prune_out_channels" else "reader",), ""
    if type(module) is nn.Embedding:
        return ("emitter",), ""
    if type(module) in CARRIERS:
        return ("carrier",), ""
    return (), f"({type(module).__name__}) takes its units together"


def coupled_units(net: nn.Module, inputs: Inputs, shared: dict[str, str]) -> list[Unit]:
    """All units of a plain net, with the reason where one cannot be taken out.

    `shared` gives a reason for every layer that may not change.
    """
    net = copy.deepcopy(net)
    names = {module: name for name, module in net.named_modules()}
    try:
        found = _all_members(_graph(net, inputs), names)
    except VardropError:
        raise
    except Exception as failure:  # the graph builder stumbles over some nets
        reason = f"torch-pruning cannot follow this net ({failure})"
        return [
            Unit(((name, i),), (), (), reason)
            for name, layer in affine_layers(net).items()
            for i in range(units(layer)[1])
        ]
    return _checked(net, inputs, found, shared)


def _all_members(graph: Any, names: dict[nn.Module, str]) -> list[Unit]:
    found: list[Unit] = []
    known: set[Place] = set()
    for module in graph.module2node:
        if type(module) not in (*AFFINE, nn.Embedding) or module not in names:
            continue
        for unit in _members(graph, module, names):
            if not known.intersection(unit.emitters):
                known.update(unit.emitters)
                found.append(unit)
    return found


def _checked(
    net: nn.Module, inputs: Inputs, found: list[Unit], shared: dict[str, str]
) -> list[Unit]:
    """Follow one unit of every shape through the net and note where the graph was wrong."""
    reasons: dict[tuple[Any, ...], str] = {}
    checked = []
    for unit in found:
        if unit.shape not in reasons:
            named = next((shared[n] for part in unit.shape for n in part if n in shared), "")
            reasons[unit.shape] = unit.reason or named or _trace(net, inputs, unit)
        checked.append(Unit(unit.emitters, unit.readers, unit.carriers, reasons[unit.shape]))
    return checked


def _trace(net: nn.Module, inputs: Inputs, unit: Unit) -> str:
    sources, readers = ({}, {})  # type: tuple[dict[str, list[int]], dict[str, list[int]]]
    for places, found in ((unit.emitters, sources), (unit.readers, readers)):
        for name, index in places:
            found.setdefault(name, []).append(index)
    return trace_units(net, inputs, sources, readers)
