"""Find the units that can only be removed together, by marking units with NaN.

NaN survives every operation that reads it, so the operations between two layers need no rules.
Marks that are put on the outputs of one layer are looked for at the inputs of the next layers,
which end them. Marking by the binary digits of a layer's number, and of a unit's number, shows
which unit arrives at which input, for all layers at once, with two passes per digit. Layers whose
units meet units of other layers are marked again without these. Whether the model is still equal
after the cut is tested afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vardrop._core.calls import tensors_in
from vardrop._core.errors import VardropError
from vardrop._core.modules import parameter_owners
from vardrop.compression.costs import Costs, CountedPass
from vardrop.compression.layer_views import affine_layers, join_name, layout_of
from vardrop.compression.mark_units import ROLES, Marks, Numbers, Tracer
from vardrop.compression.modules.pruned_recurrent import Recurring, Unrolled
from vardrop.compression.probes import CODE_ERRORS, Inputs
from vardrop.noisy import named_modules_of

Place = tuple[str, int]  # the name of a module and one of its units
TO_THE_OUTPUT = "it reaches the output of the model"


@dataclass(frozen=True, eq=False)
class Unit:
    """A unit that can only be removed at all of its places together.

    Args:
        emitters: the outputs of layers that emit it.
        readers: the inputs of layers that read it.
        carriers: the entries of modules in between, such as norms.
        reason: why it has to stay, or None if it can be removed.
    """

    emitters: tuple[Place, ...]
    readers: tuple[Place, ...]
    carriers: tuple[Place, ...] = ()
    reason: str | None = None

    @property
    def shape(self) -> tuple[tuple[str, ...], ...]:
        """The modules that it passes. Units of one shape take the same way through the model."""
        parts = (self.emitters, self.readers, self.carriers)
        return tuple(tuple(sorted({name for name, _ in p})) for p in parts)


class UnitGraph(NamedTuple):
    """The units of a model and the costs of its modules.

    Args:
        units: all units, in the order of the model.
        costs: the costs of its modules by name.
        obstacle: why no unit could be followed, or None.
    """

    units: tuple[Unit, ...]
    costs: Costs
    obstacle: str | None = None


def trace_units(
    net: nn.Module, example: Inputs, advance: Callable[[], None] = lambda: None
) -> UnitGraph:
    """Find all units of a plain, decomposed model, and the reasons why some have to stay.

    They depend on the architecture and on the example, not on the weights. `advance` is called
    after every pass.
    """
    if scripts := list(named_modules_of(net, torch.jit.ScriptModule)):
        raise VardropError(
            f"TorchScript is not supported by shrink and slim (module '{scripts[0] or '(net)'}'). "
            "Pass the Python model that it was made from."
        )
    if kinds := [t.dtype for t in tensors_in(example) if t.is_complex()]:
        raise VardropError(
            f"Expected `example_input` to be real numbers or integers, but got {kinds[0]}. Pass "
            "torch.view_as_real(x), and call torch.view_as_complex in the model."
        )
    counted = CountedPass(net, example)
    layers, owners, fixed = affine_layers(net), parameter_owners(net), {}
    for name, module in net.named_modules():
        if name in layers and counted.calls[name] != 1 and type(module) is not Recurring:
            fixed[name] = f"'{name}' runs {counted.calls[name]} times"
        elif layout_of(module) and any(owners[id(p)] > 1 for p in module.parameters()):
            fixed[name] = f"'{name}' shares its weights"
    fixed |= {
        join_name(name, part): f"'{name}' projects its state"
        for name, layer in named_modules_of(net, Unrolled).items()
        if layer.proj_size  # torch ties the sizes of its parts
        for part, _ in layer.named_children()
    }
    try:
        units = _Coupling(Tracer(net, example, advance), fixed).units()
    except CODE_ERRORS as failure:  # the model's code raises an error for NaN
        return UnitGraph((), counted.costs(), str(failure))
    return UnitGraph(tuple(units), counted.costs())


_Member = TypeVar("_Member", bound=Hashable)


class DisjointSets(dict[_Member, _Member]):
    """Sets that are merged by joining pairs of members. The values are the parents of members."""

    def root(self, member: _Member) -> _Member:
        """The representative of a member's set. A new member is a set by itself."""
        while self.setdefault(member, member) != member:
            self[member] = self[self[member]]
            member = self[member]
        return member

    def join(self, one: _Member, other: _Member) -> None:
        """Merge the sets of two members."""
        self[self.root(one)] = self.root(other)


_Node = tuple[str, str, int]  # "emitter", "readers" or "carriers", a module, a unit


class _Coupling(DisjointSets[_Node]):
    """Sets of places that can only be removed together: outputs that emit a unit, and its readers.

    Args:
        tracer: the marked passes.
        fixed: layers that must not change, with the reason.
    """

    def __init__(self, tracer: Tracer, fixed: dict[str, str]) -> None:
        super().__init__()
        self.tracer, self.fixed = tracer, fixed
        self.whole = {
            name: f"'{name}' ({type(module).__name__}) takes its units together"
            for name, module in tracer.whole.items()
        }
        self.reasons: dict[_Node, str] = {}
        mixing: dict[str, Marks] = {}  # layers whose units meet other units at some place
        self._join_bare()
        for name, layer in tracer.layers.items():
            for i in range(layer.outputs if layer.is_depthwise else 0):
                self.join(("emitter", name, i), ("readers", name, i))
        numbers = tracer.number_units({n: torch.arange(tracer.units[n]) for n in tracer.emitters})
        targets = tracer.layers_before_whole() if tracer.whole else {}
        before_whole = {name: self.whole[target] for name, target in targets.items()}
        self._join_before_whole(before_whole, numbers)
        others = [name for name in tracer.emitters if name not in before_whole]
        for name, marks in self._arrivals(others).items():
            count, mixed = tracer.units[name], numbers.mixed_at(marks) is not None
            reason = self._obstacle(name, marks, mixed)
            if not mixed:
                self._join_places(name, marks, numbers, torch.arange(count), reason)
            elif reason is None and count > 1:
                mixing[name] = marks
            else:
                self._keep(name, marks, reason or "it is spread over several units")
        for group in _group_disjoint(mixing):
            for name, block in tracer.number_blocks(group).items():
                marks = mixing.pop(name)
                self._join_places(name, marks, *block, self._obstacle(name, marks))
        for name, marks in mixing.items():
            reason = f"it mixes with other units before '{numbers.mixed_at(marks)}'"
            self._keep(name, {} if self._is_broadcast(name, marks) else marks, reason)

    def _join_bare(self) -> None:
        """Join entries of tensors of no layer with the units that they belong to.

        A tensor without an axis of units keeps the places that it reaches.
        """
        tracer, joined = self.tracer, set[str]()
        for group in _group_disjoint(self._arrivals(list(tracer.bare))):
            ids = {name: torch.arange(tracer.units[name]) for name in group}
            numbers = tracer.number_units(ids)
            for name, marks in group.items():
                if marks and numbers.mixed_at(marks) is None:
                    self._join_places(name, marks, numbers, ids[name], self._obstacle(name, marks))
                    joined.add(name.rpartition(":")[0])
        if rest := [t for name, t in tracer.other.items() if name not in joined]:
            nodes = _nodes(tracer.follow({}, tensors=rest))
            self.reasons |= dict.fromkeys(nodes, "a bare parameter takes part")

    def _arrivals(self, names: list[str]) -> dict[str, Marks]:
        """The places that the units of each of these layers reach."""
        codes, units = {name: self.tracer.codes[name] for name in names}, self.tracer.units
        same = {name: torch.full((units[name],), code) for name, code in codes.items()}
        arrivals, unclear = self.tracer.number_units(same).reach(codes)
        for group in _group_disjoint({name: arrivals[name] for name in unclear}):
            marks = self.tracer.follow_layers(group)
            for name, places in group.items():
                arrivals[name] = {place: marks[place] for place in places if place in marks}
        return arrivals

    def _join_before_whole(self, reasons: dict[str, str], numbers: Numbers) -> None:
        """Keep the layers before modules that take units together, and all that they reach.

        Layers of one width are joined by the numbers of their units, as one residual stream.
        """
        widths: dict[int, list[str]] = defaultdict(list)
        for name in reasons:
            widths[self.tracer.units[name]].append(name)
        for width, names in widths.items():
            marks = self.tracer.follow_layers(names)
            for name in names:
                self._join_places(name, marks, numbers, torch.arange(width), reasons[name])
            self.reasons |= dict.fromkeys(_nodes(marks), reasons[names[0]])

    def _join_places(
        self, name: str, marks: Marks, numbers: Numbers, codes: Tensor, reason: str | None
    ) -> None:
        """Join units of a layer with places of the same code. Units of one code are a block."""
        first: dict[int, int] = {}
        for unit, code in enumerate(codes.tolist()):
            self.join(("emitter", name, unit), ("emitter", name, first.setdefault(code, unit)))
            if reason is not None:
                self.reasons["emitter", name, unit] = reason
        for role, target, position in _nodes(marks):
            code = int(numbers[role, target][1, position])
            if code in first:
                self.join(("emitter", name, first[code]), (role, target, position))

    def _keep(self, name: str, marks: Marks, reason: str) -> None:
        """Keep units that cannot be distinguished. They are joined with places for the notes."""
        count = self.tracer.units[name]
        for node in (("emitter", name, i) for i in range(count)):
            self.reasons.setdefault(self.root(node), reason)
        for place, mask in marks.items() if count > 1 else ():
            # Every unit gets equally many places, and the last unit gets the remaining ones.
            nodes = list(_nodes({place: mask}))
            each = max(len(nodes) // count, 1)
            for i, node in enumerate(nodes):
                self.join(("emitter", name, min(i // each, count - 1)), node)

    def _is_broadcast(self, name: str, marks: Marks) -> bool:
        """Whether units of a layer are multiplied with all units of places that other layers emit.

        A unit reaches all of them, or one or none of another place.
        """
        units, places = torch.arange(self.tracer.units[name]), marks.keys()
        probes = {0, (len(units) - 1) // 2, len(units) - 1}
        passes = (self.tracer.follow({name: units == unit}) for unit in probes)
        pairs = ((reached[p], marks[p]) for reached in passes for p in places & reached.keys())
        return all(node in self for node in _nodes(marks)) and all(
            int(mask.sum()) in (1, int(every.sum())) for mask, every in pairs
        )

    def _obstacle(self, name: str, marks: Marks, mixed: bool = False) -> str | None:
        """Why the units of a layer have to stay, or None if they can be removed.

        If they are `mixed` with others, it is not yet clear where they end.
        """
        reasons = [self.whole[target] for role, target in marks if role == "whole"]
        touched = (name, *(target for _, target in marks))
        reasons += [self.fixed[target] for target in touched if target in self.fixed]
        if reasons or mixed:
            return reasons[0] if reasons else None
        if ("output", "") in marks:
            return TO_THE_OUTPUT
        return None if any(role == "readers" for role, _ in marks) else "no layer reads it"

    def units(self) -> list[Unit]:
        """The sets as units, in the order of the model."""
        sets: dict[_Node, dict[str, list[Place]]] = defaultdict(lambda: defaultdict(list))
        for node in sorted(self, key=lambda n: n[2]):
            sets[self.root(node)][node[0]].append((node[1], node[2]))
        # The first reason of a set counts.
        reasons = {self.root(node): reason for node, reason in reversed(self.reasons.items())}
        return [
            Unit(tuple(s["emitter"]), tuple(s["readers"]), tuple(s["carriers"]), reasons.get(root))
            for root, s in sets.items()
            if s["emitter"]
        ]


def _nodes(marks: Marks) -> Iterator[_Node]:
    """The marked units of readers and carriers."""
    for (role, name), mask in marks.items():
        if role in ROLES:
            yield from ((role, name, i) for i in mask.nonzero().flatten().tolist())


def _group_disjoint(layers: dict[str, Marks]) -> list[dict[str, Marks]]:
    """Groups of layers whose marks reach no common place."""
    groups: list[dict[str, Marks]] = []
    for name, places in layers.items():
        fitting = (g for g in groups if places.keys().isdisjoint(chain.from_iterable(g.values())))
        if (chosen := next(fitting, None)) is None:
            groups.append(chosen := {})
        chosen[name] = places
    return groups


# The groups of a layer, or layers of one width: the inputs of every block, and the outputs.
Blocks = tuple[list[list[Place]], list[list[Place]]]


def equal_places(net: nn.Module) -> list[Blocks]:
    """Blocks that have to keep equally many inputs, and equally many outputs.

    The inputs of parts of a recurrent layer are not compared, so such blocks have none.
    """
    layers, blocks = affine_layers(net), list[Blocks]()
    for name, view in layers.items():
        ins, outs = (
            [[(name, group * size + i) for i in range(size)] for group in range(view.groups)]
            for size in (view.inputs // view.groups, view.outputs // view.groups)
        )
        blocks.append((ins, outs))
    for name, layer in named_modules_of(net, Unrolled).items():
        names = [join_name(name, f"ih{end}") for end in layer.suffixes]  # torch has one size
        outs = [[(n, i) for i in range(layers[n].outputs)] for n in names]
        blocks.append(([[] for _ in names], outs))
    return blocks
