"""Gates on the units of a plain net: what the net costs by them, and the cut to a budget.

Units that can only go together have one gate: the channels that a residual sum adds up, a channel
and its depthwise filter, and the channels of a grouped convolution that keep its groups alike. A
gate multiplies what the layers read of its units, which is exact whatever lies between (BatchNorm,
a sum, any activation), and in the end is folded into their weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vardrop._core.errors import VardropError
from vardrop.compression.layer_views import Affine, affine_layers, join_name, unit_modules
from vardrop.compression.modules.recurrent import Unrolled
from vardrop.compression.probes import Inputs, hooks
from vardrop.compression.trace_units import (
    TO_THE_OUTPUT,
    DisjointSets,
    Unit,
    UnitGraph,
    trace_units,
)
from vardrop.gates import HardConcrete
from vardrop.gates.base import along
from vardrop.noisy import named_modules_of

Quantity = Literal["macs", "bytes"]
_Gates = dict[str, dict[int, int]]  # the gate of every place, by module
_START = 3.0  # the logit at which a gate begins: its mean is exactly one, and it is open in 99 %
_LEAST = 0.1  # of a gate that is kept


class UnitGates(nn.Module):
    """Hard concrete gates on the units of a net that can be taken out; the net stays as it is.

    Args:
        net: a plain net.
        example: its arguments, one row.

    `notes` says which units have no gate, and why.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> gates = UnitGates(net, (torch.zeros(1, 3),))
    >>> float(gates.cost(torch.tensor([1.0, 1.0, 0.0, 0.0])))
    0.5
    """

    def __init__(self, net: nn.Module, example: Inputs) -> None:
        super().__init__()
        graph = trace_units(net, example)
        if graph.obstacle is not None:
            raise VardropError(
                "Expected the units of `net` to be followed from layer to layer, but got: "
                f"{graph.obstacle}. Its own code lets no mark through."
            )
        sets = _sets(net, graph.units)
        self.units = [members for members in sets if all(u.reason is None for u in members)]
        self.notes = _notes(sets)
        if not self.units:
            raise VardropError(
                "Expected `net` to have hidden units that can be taken out, but got none. "
                + " ".join(self.notes)
            )
        self.noise = HardConcrete(drop_rate=1 / (1 + math.exp(_START)))
        start = self.noise.initial(len(self.units))["logit"]
        self.logit = nn.Parameter(start.to(next(net.parameters()).device))
        self._emitters = _by_module(self.units, lambda u: u.emitters)
        self._readers = _by_module(self.units, lambda u: u.readers)
        self._prices = _Prices(net, graph, self.units, self._emitters, self._readers)
        self._factors: Tensor | None = None

    def expected_cost(self, quantity: Quantity) -> Tensor:
        """The expected cost of the net, as a fraction of that of the whole one; differentiable."""
        open_probability = self.noise.open_probability({"logit": self.logit})
        return self.cost(open_probability, quantity).to(self.logit)

    def cost(self, open_gates: Tensor, quantity: Quantity = "macs") -> Tensor:
        """The cost of a net with these gates (1) or parts of them, as a fraction of the whole."""
        return self._prices.total(open_gates, quantity) / self._prices.whole[quantity]

    @contextmanager
    def acting(self, net: nn.Module) -> Iterator[None]:
        """Let the gates act on a net: by draws in training mode, by their means otherwise."""
        layers = affine_layers(net)
        handles: list[Any] = [net.register_forward_pre_hook(self._draw)]
        for name, places in self._places_to_gate(layers).items():
            hook = self._multiply(layers[name], places)
            handles.append(layers[name].layer.register_forward_pre_hook(hook))
        with hooks(*handles):
            yield

    def _places_to_gate(self, layers: dict[str, Affine]) -> dict[str, dict[int, int]]:
        """What to multiply: not what a depthwise layer reads, which others read after it."""
        return {n: p for n, p in self._readers.items() if not layers[n].is_depthwise}

    def _draw(self, net: nn.Module, args: Inputs) -> None:
        """One draw per batch: Adam then slows the gates that the loss feels, and closes others."""
        tensors = {"logit": self.logit}
        one = torch.ones(1, device=self.logit.device)  # for what has no gate
        if net.training:
            drawn = self.noise.multiplier(one.expand(len(self.units)), 0, tensors)
        else:
            drawn = self.noise.unit_mean(tensors)
        self._factors = torch.cat([one, drawn])

    def _multiply(self, view: Affine, places: dict[int, int]) -> Callable[..., Inputs]:
        index = torch.zeros(view.inputs, dtype=torch.long)
        for place, gate in places.items():
            index[place] = gate + 1
        axis, column = view.axis, index.to(view.weight.device)

        def before(_: nn.Module, args: Inputs) -> Inputs:
            assert self._factors is not None
            x: Tensor = args[0]
            return (x * along(axis, x, self._factors[column].to(x.dtype)), *args[1:])

        return before

    def choose(self, fits: Callable[[Tensor], bool], multiple: int = 1) -> Tensor:
        """The most gates that fit a budget, the most willing ones first; a bool per gate.

        Layers keep multiples of `multiple` units, as far as that fits them, and one at least, so
        that what fits no more than that comes back too.
        """
        order = self.logit.detach().argsort(descending=True, stable=True).tolist()
        ways: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for gate in order:  # gates of one way through the net go by their order
            ways[tuple(sorted({n for u in self.units[gate] for n, _ in u.emitters}))].append(gate)
        low, high = 0, len(order)  # as many as `low` fit, or nothing does
        while low < high:
            middle = (low + high + 1) // 2
            if fits(self._mask(set(order[:middle]), ways, multiple)):
                low = middle
            else:
                high = middle - 1
        return self._mask(set(order[:low]), ways, multiple)

    def _mask(
        self, chosen: set[int], ways: dict[tuple[str, ...], list[int]], multiple: int
    ) -> Tensor:
        mask = torch.zeros(len(self.units), dtype=torch.bool)
        for emitters, gates in ways.items():
            all_gated = any(len(self._emitters[n]) == self._prices.outputs[n] for n in emitters)
            # How many units of a layer a gate has at least: those of a head, or one.
            places = (p for u in self.units[gates[0]] for p in (*u.emitters, *u.readers))
            width = min(Counter(name for name, _ in places).values())
            step = multiple // math.gcd(multiple, width)
            least = min(len(gates), step if multiple > 1 else int(all_gated))
            count = sum(gate in chosen for gate in gates)
            mask[gates[: max(least, count // step * step)]] = True
        return mask

    def evenly(self, fraction: float) -> Tensor:
        """A mask that keeps this fraction of the units of every layer, and one at least."""
        mask = torch.zeros(len(self.units), dtype=torch.bool)
        for places in self._emitters.values():
            gates = sorted(set(places.values()))
            mask[gates[: max(1, round(fraction * len(gates)))]] = True
        return mask

    @torch.no_grad()
    def fold(self, net: nn.Module, open_gates: Tensor) -> None:
        """Multiply the weights of a net by the gates' means, and by zero where one is not kept.

        A gate that is kept passes a tenth at least, so that its unit can still learn.
        """
        mean = self.noise.unit_mean({"logit": self.logit}).clamp(min=_LEAST)
        layers = affine_layers(net)
        gated, keep = self._places_to_gate(layers), open_gates.tolist()
        for name, places in self._readers.items():
            view = layers[name]
            factors = view.weight.new_ones(view.inputs)
            for place, gate in places.items():
                open_mean = float(mean[gate]) if name in gated else 1.0
                factors[place] = open_mean if keep[gate] else 0.0
            view.scale_inputs(factors)


class _Prices:
    """What the layers of a net cost by the units that they keep.

    A layer costs its price times the inputs times the outputs that are left. Where a layer's groups
    go as a whole, its inputs go with its outputs and count once.
    """

    def __init__(
        self,
        net: nn.Module,
        graph: UnitGraph,
        units: list[tuple[Unit, ...]],
        emitters: _Gates,
        readers: _Gates,
    ) -> None:
        layers, modules, gates = affine_layers(net), unit_modules(net), len(units)
        self.outputs = {n: v.outputs for n, v in layers.items()}
        self.outputs |= {n: v.outputs for n, v in modules.items()}
        inputs, outputs, macs, stored, by_group = torch.tensor(
            [
                (v.inputs, v.outputs, graph.costs[n].macs, _bytes(v.weight), _by_group(v))
                for n, v in layers.items()
            ],
            dtype=torch.float64,
        ).t()
        self._in = _counts(layers, readers, gates) * (1 - by_group.unsqueeze(1))
        self._out = _counts(layers, emitters, gates)
        self._fixed_in, self._fixed_out = inputs - self._in.sum(1), outputs - self._out.sum(1)
        pairs = (inputs * outputs).clamp_min(1)
        self._price = {"macs": macs / pairs, "bytes": stored / pairs}
        # The bytes per unit of all that is no weight of a layer.
        tensors = {n: [v.bias] for n, v in layers.items() if v.bias is not None}
        tensors |= {n: [t for _, t in v.tensors()] for n, v in modules.items()}
        per_unit = {n: sum(map(_bytes, held)) / self.outputs[n] for n, held in tensors.items()}
        each = [
            sum(per_unit.get(n, 0.0) for u in members for n, _ in (*u.emitters, *u.carriers))
            for members in units
        ]
        self._each = {"macs": torch.zeros(gates), "bytes": torch.tensor(each)}
        rest = sum(map(_bytes, net.state_dict().values())) - float(stored.sum()) - sum(each)
        products = sum(cost.macs for name, cost in graph.costs.items() if name not in layers)
        self._rest = {"macs": products, "bytes": rest}  # what no gate changes
        self.whole = {q: float(self.total(torch.ones(gates), q)) for q in ("macs", "bytes")}

    def total(self, open_gates: Tensor, quantity: str) -> Tensor:
        """The cost, differentiable by what is kept."""
        part = open_gates.to(self._in)
        inputs, outputs = self._fixed_in + self._in @ part, self._fixed_out + self._out @ part
        pairs = self._price[quantity] * inputs * outputs
        return pairs.sum() + self._each[quantity].to(part) @ part + self._rest[quantity]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _counts(layers: dict[str, Affine], places: _Gates, gates: int) -> Tensor:
    """How many places of each layer belong to each gate, (layers, gates)."""
    counts = torch.zeros(len(layers), gates, dtype=torch.float64)
    for row, name in enumerate(layers):
        for gate in places.get(name, {}).values():
            counts[row, gate] += 1
    return counts


def _by_module(units: list[tuple[Unit, ...]], places: Callable[[Unit], Any]) -> _Gates:
    """The gate of every place, by module."""
    gates_by_module: _Gates = defaultdict(dict)
    for gate, members in enumerate(units):
        for unit in members:
            for name, place in places(unit):
                gates_by_module[name][place] = gate
    return dict(gates_by_module)


def _by_group(view: Affine) -> bool:
    """Whether the groups of a layer go as a whole: one of its sides has one unit per group."""
    return view.groups > 1 and view.groups in (view.inputs, view.outputs)


def _sets(net: nn.Module, traced: Sequence[Unit]) -> list[tuple[Unit, ...]]:
    """Units joined so that every grouped layer keeps as many units in each of its groups.

    Layers of a recurrent layer that have one size keep as many outputs each.
    """
    layers = affine_layers(net)
    units = _with_fixed_groups(layers, traced)
    emits = {place: i for i, u in enumerate(units) for place in u.emitters}
    reads = {place: i for i, u in enumerate(units) for place in u.readers}
    tied = [
        [(emits if out else reads).get((name, i)) for out, i in together]
        for name, view in layers.items()
        for together in _ties(view)
    ]
    for name, layer in named_modules_of(net, Unrolled).items():
        for parts in layer.equal_widths():
            names = [join_name(name, part) for part in parts]
            width = layers[names[0]].outputs if names else 0
            tied += [[emits.get((n, i)) for n in names] for i in range(width)]
    sets = DisjointSets[int]()
    for together in tied:
        for one, other in pairwise(i for i in together if i is not None):
            sets.join(one, other)
    joined: dict[int, list[Unit]] = defaultdict(list)
    for i, unit in enumerate(units):
        joined[sets.root(i)].append(unit)
    return [tuple(members) for members in joined.values()]


def _with_fixed_groups(layers: dict[str, Affine], units: Sequence[Unit]) -> list[Unit]:
    """Units of grouped layers that read the input of the net, which stays, have to stay too."""
    depthwise = {name for name, view in layers.items() if view.is_depthwise}
    fed = {p for u in units if any(n not in depthwise for n, _ in u.emitters) for p in u.readers}
    stay = {
        (name, i)
        for name, view in layers.items()
        if view.groups > 1 and not all((name, i) in fed for i in range(view.inputs))
        for i in range(view.outputs)
    }
    why = "its groups read the input of the net"
    return [
        dataclasses.replace(u, reason=u.reason or why) if stay.intersection(u.emitters) else u
        for u in units
    ]


def _ties(view: Affine) -> Iterator[list[tuple[bool, int]]]:
    """Places of a grouped layer that go together: (is it an output, where)."""
    if view.groups == 1:
        return
    sizes = view.inputs // view.groups, view.outputs // view.groups
    if _by_group(view):
        for g in range(view.groups):
            yield [(bool(s), g * n + i) for s, n in enumerate(sizes) for i in range(n)]
        return
    for side, size in enumerate(sizes):
        for i in range(size):
            yield [(bool(side), g * size + i) for g in range(view.groups)]


def _notes(sets: list[tuple[Unit, ...]]) -> tuple[str, ...]:
    """Why units have no gate, by layer; not those that the net returns."""
    stays: Counter[tuple[str, str]] = Counter()
    for members in sets:
        reasons = [u.reason for u in members if u.reason is not None]
        if reasons and TO_THE_OUTPUT not in reasons:
            stays[members[0].emitters[0][0], reasons[0]] += len(members)
    return tuple(f"{count} units of '{name}' stay: {why}." for (name, why), count in stays.items())
