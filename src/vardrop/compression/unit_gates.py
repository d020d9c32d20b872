"""Gates on the units of a plain model: its cost as a function of them, and the cut to a budget.

Units that can only be removed together have one gate: the channels that a residual sum adds, a
channel and its depthwise filter, and the channels of a grouped convolution that keep its groups
equal. A gate multiplies the inputs that layers read from its units. This is exact for any operation
in between (BatchNorm, a sum, any activation), and finally the gate is folded into their weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from vardrop._core.errors import VardropError
from vardrop.compression.layer_views import AffineView, affine_layers, join_name, unit_modules
from vardrop.compression.modules.pruned_recurrent import Unrolled
from vardrop.compression.probes import Inputs, hooks
from vardrop.compression.trace_units import trace_units
from vardrop.compression.units import TO_THE_OUTPUT, DisjointSets, Place, Unit, UnitGraph
from vardrop.gates import HardConcrete
from vardrop.gates.base import along
from vardrop.noisy import named_modules_of

Quantity = Literal["macs", "bytes"]
# For every module, the number of each unit's gate, counted from 1, or 0 for a unit without a gate.
_GateNumbers = dict[str, Tensor]
_START = 3.0  # the initial logit of a gate: its mean is exactly one, and it is open in 99% of draws
_LEAST = 0.1  # the smallest factor of an open gate


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
        layers, modules = affine_layers(net), unit_modules(net)
        widths = {n: v.outputs for n, v in layers.items()}
        widths |= {n: v.outputs for n, v in modules.items()}
        self._emitters = self._number(widths, lambda u: u.emitters)
        carriers = self._number(widths, lambda u: u.carriers)
        self._readers = self._number({n: v.inputs for n, v in layers.items()}, lambda u: u.readers)
        outputs = {n: self._emitters[n] + carriers[n] for n in widths}
        self._costs = _Costs(net, graph, self._readers, outputs)
        all_open = torch.ones(len(self.units))
        self._full = {q: float(self._costs.total(all_open, q)) for q in ("macs", "bytes")}
        self._factors: Tensor | None = None

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
        open_probability = self.noise.open_probability({"logit": self.logit})
        return self.cost(open_probability, quantity).to(self.logit)

    def cost(self, open_gates: Tensor, quantity: Quantity = "macs") -> Tensor:
        """The cost of a model with open gates (1) or partly open gates, as a fraction."""
        return self._costs.total(open_gates, quantity) / self._full[quantity]

    @contextmanager
    def acting(self, net: nn.Module) -> Iterator[None]:
        """Apply the gates to a model: draws in training mode, means in evaluation mode."""
        handles = [net.register_forward_pre_hook(self._draw)]
        for name, view in affine_layers(net).items():
            if self._multiplies(name, view):
                handles.append(view.layer.register_forward_pre_hook(self._multiply(name, view)))
        with hooks(*handles):
            yield

    def _multiplies(self, name: str, view: AffineView) -> bool:
        """Inputs of a depthwise layer are not multiplied, because other layers read its outputs."""
        return bool(self._readers[name].any()) and not view.is_depthwise

    def _draw(self, net: nn.Module, args: Inputs) -> None:
        """One draw per batch: Adam then slows gates that affect the loss, and closes others."""
        tensors = {"logit": self.logit}
        one = torch.ones(1, device=self.logit.device)  # the factor of units without a gate
        if net.training:
            drawn = self.noise.multiplier(one.expand(len(self.units)), 0, tensors)
        else:
            drawn = self.noise.unit_mean(tensors)
        self._factors = torch.cat([one, drawn])

    def _multiply(self, name: str, view: AffineView) -> Callable[..., Inputs]:
        axis, numbers = view.axis, self._readers[name].to(view.weight.device)

        def before(_: nn.Module, args: Inputs) -> Inputs:
            assert self._factors is not None
            x: Tensor = args[0]
            return (x * along(axis, x, self._factors[numbers].to(x.dtype)), *args[1:])

        return before

    def choose(self, fits: Callable[[Tensor], bool], multiple: int = 1) -> Tensor:
        """The most gates that fit a budget, highest logits first, as a boolean mask.

        Layers keep multiples of `multiple` units if they have enough, and at least one unit. So the
        mask may not fit if even the smallest one does not.
        """
        order = self.logit.detach().argsort(descending=True, stable=True).tolist()
        layers = self._layers(multiple)
        low, high = 0, len(order)  # `low` gates fit, or no number does
        while low < high:
            middle = (low + high + 1) // 2
            if fits(self._mask(order[:middle], layers)):
                low = middle
            else:
                high = middle - 1
        mask = self._mask(order[:low], layers)
        for gates, step, _ in layers if multiple > 1 else ():  # use up the budget
            wider = mask.clone()
            wider[gates[: int(mask[gates].sum()) + step]] = True
            if not bool(wider.equal(mask)) and fits(wider):
                mask = wider
        return mask

    def evenly(self, fraction: float, multiple: int = 1) -> Tensor:
        """A mask that keeps this fraction of the units of every layer, as `choose` rounds them."""
        layers = self._layers(multiple)
        chosen = (gates[: round(fraction * len(gates))] for gates, _, _ in layers)
        return self._mask([gate for gates in chosen for gate in gates], layers)

    def _layers(self, multiple: int) -> list[tuple[list[int], int, int]]:
        """Gates with the same emitters, best first, how many open at a time, and how many stay."""
        order = self.logit.detach().argsort(descending=True, stable=True).tolist()
        paths: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for gate in order:
            paths[tuple(sorted({n for u in self.units[gate] for n, _ in u.emitters}))].append(gate)
        layers = []
        for emitters, gates in paths.items():
            all_gated = any(bool(self._emitters[n].all()) for n in emitters)
            # The smallest number of units of a layer that belong to one gate: a head, or one unit.
            places = (p for u in self.units[gates[0]] for p in (*u.emitters, *u.readers))
            width = min(Counter(name for name, _ in places).values())
            step = multiple // math.gcd(multiple, width)
            least = min(len(gates), step if multiple > 1 else int(all_gated))
            layers.append((gates, step, least))
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
            factors = means if self._multiplies(name, view) else masks
            numbers = self._readers[name].to(mean.device)
            if bool(numbers.any()):
                view.scale_inputs(factors[numbers].to(view.weight))


class _Costs:
    """The cost of a model as a function of its open gates.

    A layer costs its price times the remaining inputs times the remaining outputs. If whole groups
    of a layer are removed, its inputs go with its outputs and count once.
    """

    def __init__(
        self, net: nn.Module, graph: UnitGraph, readers: _GateNumbers, outputs: _GateNumbers
    ) -> None:
        layers, modules = affine_layers(net), unit_modules(net)
        inputs = {
            n: torch.zeros_like(readers[n]) if _removes_groups(v) else readers[n]
            for n, v in layers.items()
        }
        self._inputs, self._outputs = list(inputs.values()), [outputs[n] for n in layers]
        sizes = torch.tensor([v.inputs * v.outputs for v in layers.values()]).clamp_min(1)
        stored = torch.tensor([_bytes(v.weight) for v in layers.values()])
        macs = torch.tensor([graph.costs[n].macs for n in layers])
        self._price = {"macs": macs.double() / sizes, "bytes": stored.double() / sizes}
        # The bytes per unit of all tensors that are no weight of a layer.
        tensors = {n: [] if v.bias is None else [v.bias] for n, v in layers.items()}
        tensors |= {n: [t for _, t in v.tensors()] for n, v in modules.items()}
        units = [(sum(map(_bytes, held)), outputs[n]) for n, held in tensors.items()]
        self._units = torch.cat([numbers for _, numbers in units])
        each = [torch.full((len(n),), size / len(n), dtype=torch.float64) for size, n in units]
        self._unit_bytes = torch.cat(each)
        total = sum(map(_bytes, net.state_dict().values()))
        products = sum(cost.macs for name, cost in graph.costs.items() if name not in layers)
        # The costs that do not depend on gates.
        self._rest = {
            "macs": float(products),
            "bytes": total - float(stored.sum()) - float(self._unit_bytes.sum()),
        }

    def total(self, open_gates: Tensor, quantity: Quantity) -> Tensor:
        """The cost of a model, differentiable with respect to the gates."""
        gates = open_gates.to("cpu", torch.float64)
        factors = torch.cat([torch.ones(1, dtype=torch.float64), gates])
        inputs = torch.stack([factors[numbers].sum() for numbers in self._inputs])
        outputs = torch.stack([factors[numbers].sum() for numbers in self._outputs])
        cost = (self._price[quantity] * inputs * outputs).sum() + self._rest[quantity]
        if quantity == "bytes":
            cost = cost + self._unit_bytes @ factors[self._units]
        return cost


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _removes_groups(view: AffineView) -> bool:
    """Whether a layer loses whole groups, because one of its sides has one unit per group."""
    return view.groups > 1 and view.groups in (view.inputs, view.outputs)


def _join_tied(net: nn.Module, traced: Sequence[Unit]) -> list[tuple[Unit, ...]]:
    """Join units so that all groups of a layer keep equally many units.

    The parts of a recurrent layer that have one size keep equally many outputs.
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


def _with_fixed_groups(layers: dict[str, AffineView], units: Sequence[Unit]) -> list[Unit]:
    """Units of grouped layers that read the input of the model have to stay."""
    depthwise = {name for name, view in layers.items() if view.is_depthwise}
    fed = {p for u in units if any(n not in depthwise for n, _ in u.emitters) for p in u.readers}
    stay = {
        (name, i)
        for name, view in layers.items()
        if view.groups > 1 and not all((name, i) in fed for i in range(view.inputs))
        for i in range(view.outputs)
    }
    why = "its groups read the input of the model"
    return [
        dataclasses.replace(u, reason=u.reason or why) if stay.intersection(u.emitters) else u
        for u in units
    ]


def _ties(view: AffineView) -> Iterator[list[tuple[bool, int]]]:
    """Places of a grouped layer that are removed together: (whether an output, unit)."""
    if view.groups == 1:
        return
    sizes = view.inputs // view.groups, view.outputs // view.groups
    if _removes_groups(view):
        for g in range(view.groups):
            yield [(bool(s), g * n + i) for s, n in enumerate(sizes) for i in range(n)]
        return
    for side, size in enumerate(sizes):
        for i in range(size):
            yield [(bool(side), g * size + i) for g in range(view.groups)]


def _notes(sets: list[tuple[Unit, ...]]) -> tuple[str, ...]:
    """The reasons why units have no gate, by layer, except for outputs of the model."""
    stays: Counter[tuple[str, str]] = Counter()
    for members in sets:
        reasons = [u.reason for u in members if u.reason is not None]
        if reasons and TO_THE_OUTPUT not in reasons:
            stays[members[0].emitters[0][0], reasons[0]] += len(members)
    return tuple(f"{count} units of '{name}' stay: {why}." for (name, why), count in stays.items())
