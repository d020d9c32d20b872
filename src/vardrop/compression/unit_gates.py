"""Gates on the units of a plain model: its cost as a function of them, and the cut to a budget.

Units that can only be removed together have one gate: the channels that a residual sum adds, a
channel and its depthwise filter, and the channels of a grouped convolution that keep its groups
equal. A gate multiplies the inputs that layers read from its units. This is exact for any operation
in between (BatchNorm, a sum, any activation), and finally the gate is folded into their weights.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from vardrop._core.errors import VardropError
from vardrop._core.modules import hooks
from vardrop.compression.layer_views import affine_layers, unit_modules
from vardrop.compression.probes import Inputs
from vardrop.compression.trace_units import (
    TO_THE_OUTPUT,
    DisjointSets,
    Place,
    Unit,
    UnitGraph,
    equal_places,
    trace_units,
)
from vardrop.gates import HardConcrete
from vardrop.gates.base import along

Quantity = Literal["macs", "bytes"]
# For every module, the number of each unit's gate, counted from 1, or 0 for a unit without a gate.
_GateNumbers = dict[str, Tensor]
_START = 3.0  # the initial logit of a gate: its mean is exactly one, and it is open in 99% of draws
_LEAST = 0.1  # the smallest factor of an open gate
_BLOCK = 4  # runtimes have fast kernels for convolutions of multiples of so many inputs


class UnitGates(nn.Module):
    """Hard concrete gates on the removable units of a model, which is left unchanged.

    Args:
        net: a plain model.
        example: its arguments, one example.

    `notes` are the reasons why units have no gate.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> gates = UnitGates(net, (torch.zeros(1, 3),))
    >>> float(gates.cost(torch.tensor([1.0, 1.0, 0.0, 0.0])))
    0.5
    """

    _factors: Tensor  # of the gates in the current pass, after a one for units without a gate

    def __init__(self, net: nn.Module, example: Inputs) -> None:
        super().__init__()
        graph = trace_units(net, example)
        if graph.obstacle is not None:
            raise VardropError(
                "Expected the units of `net` to be followed from layer to layer, but got: "
                f"{graph.obstacle}. The code of the model raises an error for NaN."
            )
        sets = _join_tied(net, graph.units)
        self.units = [members for members in sets if all(u.reason is None for u in members)]
        self.notes = _notes(sets)
        if not self.units:
            raise VardropError(
                "Expected `net` to have hidden units that can be removed, but got none. "
                + " ".join(self.notes)
            )
        self.noise = HardConcrete(drop_rate=1 / (1 + math.exp(_START)))
        start = self.noise.initial(len(self.units))["logit"]
        self.logit = nn.Parameter(start.to(next(net.parameters()).device))
        layers = affine_layers(net)
        widths = {n: v.outputs for n, v in (layers | unit_modules(net)).items()}
        self._emitters = self._number(widths, lambda u: u.emitters)
        self._readers = self._number({n: v.inputs for n, v in layers.items()}, lambda u: u.readers)
        outputs = self._number(widths, lambda u: (*u.emitters, *u.carriers))
        self._convolutions = {name for name, view in layers.items() if view.weight.dim() > 2}
        # Inputs of a depthwise layer are not multiplied, because other layers read its outputs.
        inner = {name: numbers for name, numbers in self._readers.items() if bool(numbers.any())}
        self._multiplied = {name for name in inner if not layers[name].is_depthwise}
        self.cost = _Cost(net, graph, self._readers, outputs)

    def _number(
        self, widths: Mapping[str, int], places: Callable[[Unit], Sequence[Place]]
    ) -> _GateNumbers:
        numbers = {name: torch.zeros(width, dtype=torch.long) for name, width in widths.items()}
        for number, members in enumerate(self.units, start=1):
            for name, unit in (place for member in members for place in places(member)):
                numbers[name][unit] = number
        return numbers

    def expected_cost(self, quantity: Quantity) -> Tensor:
        """The expected cost of the model, as a fraction of the full cost. It is differentiable."""
        is_open = self.noise.open_probability({"logit": self.logit})
        return self.cost(is_open, quantity).to(self.logit)

    def acting(self, net: nn.Module) -> AbstractContextManager[None]:
        """Apply the gates to a model: draws in training mode, means in evaluation mode."""
        handles = [net.register_forward_pre_hook(self._draw)]
        for name, view in affine_layers(net).items():
            if name in self._multiplied:
                numbers = self._readers[name].to(view.weight.device)
                hook = partial(self._multiply, view.axis, numbers)
                handles.append(view.layer.register_forward_pre_hook(hook))
        return hooks(*handles)

    def _draw(self, net: nn.Module, args: Inputs) -> None:
        """One draw per batch: Adam then slows gates that affect the loss, and closes others."""
        tensors = {"logit": self.logit}
        means = self.noise.unit_mean(tensors)
        factors = self.noise.multiplier(means, 0, tensors) if net.training else means
        self._factors = torch.cat([means.new_ones(1), factors])

    def _multiply(self, axis: int, numbers: Tensor, layer: nn.Module, args: Inputs) -> Inputs:
        """Multiply the inputs of a layer by the factors of their gates."""
        factors = self._factors[numbers].to(args[0].dtype)
        return (args[0] * along(axis, args[0], factors), *args[1:])

    def choose(self, fits: Callable[[Tensor], bool], multiple: int = 1, least: int = 1) -> Tensor:
        """The most gates that fit a budget, highest logits first, as a boolean mask.

        Layers keep multiples of `multiple` units if they have enough, and at least one unit. With
        `least` above 1, convolutions keep so many inputs if they have enough, and multiples of 4.
        So the mask may not fit if even the smallest one does not.
        """
        order = self.logit.detach().argsort(descending=True, stable=True).tolist()
        layers = self._layers(multiple, least)
        counts = range(1, len(order) + 1)
        most = bisect_left(counts, True, key=lambda n: not fits(self._mask(order[:n], layers)))
        mask = self._mask(order[:most], layers)
        for gates, step, _ in layers if multiple > 1 else ():  # use up the budget
            wider = mask.clone()
            wider[gates[: int(mask[gates].sum()) + step]] = True
            if not bool(wider.equal(mask)) and fits(wider):
                mask = wider
        return mask

    def evenly(self, fraction: float, multiple: int = 1, least: int = 1) -> Tensor:
        """A mask that keeps this fraction of the units of every layer, as `choose` rounds them."""
        layers = self._layers(multiple, least)
        chosen = [g for gates, _, _ in layers for g in gates[: round(fraction * len(gates))]]
        return self._mask(chosen, layers)

    def _layers(self, multiple: int, least: int) -> list[tuple[list[int], int, int]]:
        """Gates with the same emitters, best first, how many open at a time, and how many stay."""
        paths: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for gate in self.logit.detach().argsort(descending=True, stable=True).tolist():
            paths[tuple(sorted({n for u in self.units[gate] for n, _ in u.emitters}))].append(gate)
        layers = []
        for emitters, gates in paths.items():
            all_gated = any(bool(self._emitters[n].all()) for n in emitters)
            # The smallest number of units of a layer that belong to one gate: a head, or one unit.
            places = (p for u in self.units[gates[0]] for p in (*u.emitters, *u.readers))
            width = min(Counter(name for name, _ in places).values())
            feeds = any(n in self._convolutions for u in self.units[gates[0]] for n, _ in u.readers)
            rounding = max(multiple, _BLOCK) if feeds and least > 1 else multiple
            step = rounding // math.gcd(rounding, width)
            stay = max(step if rounding > 1 else int(all_gated), least // width if feeds else 0)
            layers.append((gates, step, min(len(gates), stay)))
        return layers

    def _mask(self, chosen: Sequence[int], layers: list[tuple[list[int], int, int]]) -> Tensor:
        mask, opened = torch.zeros(len(self.units), dtype=torch.bool), set(chosen)
        for gates, step, least in layers:
            count = sum(gate in opened for gate in gates)
            mask[gates[: max(least, count // step * step)]] = True
        return mask

    @torch.no_grad()
    def fold(self, net: nn.Module, open_gates: Tensor) -> None:
        """Multiply the weights of a model by the means of open gates, and by zero if closed.

        The factor of an open gate is at least a tenth, so that its unit can still learn.
        """
        mean = self.noise.unit_mean({"logit": self.logit}).clamp(min=_LEAST)
        is_open = open_gates.to(mean)
        one = torch.ones_like(mean[:1])
        means, masks = torch.cat([one, mean * is_open]), torch.cat([one, is_open])
        for name, view in affine_layers(net).items():
            factors = means if name in self._multiplied else masks
            numbers = self._readers[name].to(mean.device)
            if bool(numbers.any()):
                view.scale_inputs(factors[numbers].to(view.weight))


class _Cost:
    """The cost of a model as a function of its open gates (1) or partly open gates.

    A layer costs its price times the remaining inputs times the remaining outputs. If whole groups
    of a layer are removed, its inputs go with its outputs and count once.
    """

    def __init__(
        self, net: nn.Module, graph: UnitGraph, readers: _GateNumbers, outputs: _GateNumbers
    ) -> None:
        layers, no_gate = affine_layers(net), torch.zeros(1, dtype=torch.long)
        # For every tensor: the gates of its inputs and outputs, its MACs and its bytes.
        entries: list[tuple[Tensor, Tensor, int, int]] = []
        for name, view in layers.items():
            # One unit per group on one side: whole groups are removed.
            by_group = view.groups > 1 and view.groups in (view.inputs, view.outputs)
            inputs = torch.zeros_like(readers[name]) if by_group else readers[name]
            entries.append((inputs, outputs[name], graph.costs[name].macs, view.weight.nbytes))
            if view.bias is not None:
                entries.append((no_gate, outputs[name], 0, view.bias.nbytes))
        for name, module in unit_modules(net).items():
            entries += [(no_gate, outputs[name], 0, t.nbytes) for t in module.tensors().values()]
        self._inputs, self._outputs, macs, stored = zip(*entries, strict=True)
        sizes = [max(1, len(i) * len(o)) for i, o, _, _ in entries]
        prices = torch.tensor([macs, stored], dtype=torch.float64) / torch.tensor(sizes)
        self._price = dict(zip(("macs", "bytes"), prices, strict=True))
        full = sum(cost.macs for cost in graph.costs.values())
        size = sum(t.nbytes for t in net.state_dict().values())
        self._full = {"macs": full, "bytes": size}
        # The costs that do not depend on gates.
        self._rest = {"macs": full - sum(macs), "bytes": size - sum(stored)}

    def __call__(self, open_gates: Tensor, quantity: Quantity = "macs") -> Tensor:
        """The cost as a fraction of the full cost, differentiable with respect to the gates."""
        one = torch.ones(1, dtype=torch.float64)
        factors = torch.cat([one, open_gates.to(one)])
        inputs = torch.stack([factors[numbers].sum() for numbers in self._inputs])
        outputs = torch.stack([factors[numbers].sum() for numbers in self._outputs])
        cost = (self._price[quantity] * inputs * outputs).sum() + self._rest[quantity]
        return cost / self._full[quantity]


def _join_tied(net: nn.Module, traced: Sequence[Unit]) -> list[tuple[Unit, ...]]:
    """Join units so that all groups of a layer keep equally many units.

    The parts of a recurrent layer that have one size keep equally many outputs. Units of grouped
    layers that read the input of the model have to stay.
    """
    layers, why = affine_layers(net), "its groups read the input of the model"
    depthwise = {name for name, view in layers.items() if view.is_depthwise}
    inner = (u for u in traced if any(name not in depthwise for name, _ in u.emitters))
    sources = {place for unit in inner for place in unit.readers}
    stay = {
        (name, i)
        for name, view in layers.items()
        if view.groups > 1 and not all((name, i) in sources for i in range(view.inputs))
        for i in range(view.outputs)
    }
    units = [
        dataclasses.replace(u, reason=u.reason or why) if stay.intersection(u.emitters) else u
        for u in traced
    ]
    reads = {place: unit for unit in units for place in unit.readers}
    emits = {place: unit for unit in units for place in unit.emitters}
    sets = DisjointSets[Unit]()
    for ins, outs in equal_places(net):
        read = [[reads.get(place) for place in block] for block in ins]
        fed = [[emits.get(place) for place in block] for block in outs]
        tied = [*zip(*read, strict=True), *zip(*fed, strict=True)]
        if ins[0] and 1 in (len(ins[0]), len(outs[0])):  # groups go as a whole
            tied = [(*i, *o) for i, o in zip(read, fed, strict=True)]
        for together in tied if len(outs) > 1 else ():
            for one, other in pairwise(filter(None, together)):
                sets.join(one, other)
    joined: dict[Unit, list[Unit]] = defaultdict(list)
    for unit in units:
        joined[sets.root(unit)].append(unit)
    return [tuple(members) for members in joined.values()]


def _notes(sets: list[tuple[Unit, ...]]) -> tuple[str, ...]:
    """The reasons why units have no gate, by layer, except for outputs of the model."""
    stays: Counter[tuple[str, str]] = Counter()
    for members in sets:
        reasons = [u.reason for u in members if u.reason is not None]
        if reasons and TO_THE_OUTPUT not in reasons:
            stays[members[0].emitters[0][0], reasons[0]] += len(members)
    return tuple(f"{count} units of '{name}' stay: {why}." for (name, why), count in stays.items())
