"""Which units belong together: passes through a net in which NaN marks the units of a layer.

NaN survives every operation that reads it, so whatever lies between two layers needs no rule of
its own: what is marked at the outputs of one layer is looked for at the inputs of the next, where
it ends. Marks by the binary digits of a layer's number, and of a unit's, tell what arrives where,
so that two passes per digit tell it for all layers at once; layers whose units meet those of others
are looked at again, together with those that they do not meet. It always ends. Whether a net
survives the cut is tried afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vardrop._core.calls import tensors_in
from vardrop.compression.costs import CountedPass, LayerCost
from vardrop.compression.layer_views import LAYOUTS, Affine, Units, affine_layers, unit_modules
from vardrop.compression.mask import parameter_owners
from vardrop.compression.modules.recurrent import Recurring
from vardrop.compression.probes import CODE_ERRORS, Inputs, PlainAttention, Removable, hooks, run

Place = tuple[str, int]  # a module's name and a unit of it
# The units of a module that marks came to, by role and module. As a reader or a carrier it tells
# units apart; a module that takes them together, and the output of the net, count as one unit.
_Marks = dict[tuple[str, str], Tensor]
TO_THE_OUTPUT = "it reaches the output of the net"


@dataclass(frozen=True, eq=False)
class Unit:
    """One removable thing: the outputs that emit it, the inputs that read it, what is between.

    `reason` says why it has to stay; None where it may go.
    """

    emitters: tuple[Place, ...]
    readers: tuple[Place, ...]
    carriers: tuple[Place, ...] = ()
    reason: str | None = None

    @property
    def shape(self) -> tuple[tuple[str, ...], ...]:
        """The modules involved; units of one shape take the same way through the net."""
        parts = (self.emitters, self.readers, self.carriers)
        return tuple(tuple(sorted({name for name, _ in p})) for p in parts)


class _Tracer:
    """Follows marked units of a plain net from the layers that emit them to their readers."""

    def __init__(self, net: nn.Module, inputs: Inputs) -> None:
        self.net, self.inputs = net, inputs
        self.layers = affine_layers(net)
        modules = unit_modules(net)
        self.carriers = {n: u for n, u in modules.items() if not u.layout.emits and u.outputs > 1}
        tables = {n: u for n, u in modules.items() if u.layout.emits}
        self.emitters: dict[str, Affine | Units] = {**self.layers, **tables}
        self.units = {name: view.outputs for name, view in self.emitters.items()}
        # Gray codes: neighbours differ in one binary digit, and layers that meet are neighbours.
        self.codes = {name: i ^ (i >> 1) for i, name in enumerate(self.emitters)}
        # Modules with tensors of their own whose layout is not in the table, nor of any part.
        self.whole: dict[str, nn.Module] = {}
        self.bare: list[Tensor] = []  # tensors of modules that hold layers beside them
        for name, module in net.named_modules():
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if tensors and all(LAYOUTS.get(type(part)) is None for part in module.modules()):
                self.whole[name] = module
            elif LAYOUTS.get(type(module)) is None:
                self.bare += [t for t in tensors if t.is_floating_point() and t.numel() > 1]

    def follow(self, sources: dict[str, Tensor], until_whole: bool = False) -> _Marks:
        """Mark these units (a mask by layer) and see where they come before the next layers.

        With `until_whole` a module that takes units together ends all marks that come to it.
        """
        marks: _Marks = {}
        handles: list[Removable] = []
        for name, module in self.whole.items():
            handles += _keep_in_place(("whole", name), module, marks, until_whole)
        for name, mask in sources.items():
            view = self.emitters[name]
            handles.append(view.layer.register_forward_hook(partial(_mark, mask, view.axis)))
        for name, carrier in self.carriers.items():
            note = partial(_note, ("carriers", name), carrier.axis, marks, False)
            handles.append(carrier.layer.register_forward_pre_hook(note))
        for name, layer in self.layers.items():
            note = partial(_note, ("readers", name), layer.axis, marks, True)
            handles.append(layer.layer.register_forward_pre_hook(note))
        with hooks(*handles), PlainAttention():
            results = run(self.net, self.inputs)
        if any(bool(r.isnan().any()) for r in results if r.is_floating_point()):
            marks["output", ""] = torch.ones(1, dtype=torch.bool)
        return marks

    def all_of(self, *names: str) -> _Marks:
        """Where the units of layers come."""
        return self.follow({n: torch.ones(self.units[n], dtype=torch.bool) for n in names})

    def layer_numbers(self, names: Iterable[str], until_whole: bool = False) -> _Numbers:
        """Which of these layers comes to every place, by its code."""
        codes = {name: torch.full((self.units[name],), self.codes[name]) for name in names}
        return self.numbers(codes, until_whole)

    def layers_before_whole(self) -> dict[str, str]:
        """Layers that are the last ones before a module that takes units together, by that module.

        As marks end there, every module of a residual stream sees the layers since the one before.
        """
        alone, targets_by_layer = (
            self.layer_numbers(self.emitters, until_whole=True).unique_places(),
            {},
        )
        for name, code in self.codes.items():
            targets = (target for role, target in alone.get(code, {}) if role == "whole")
            if (target := next(targets, None)) is not None:
                targets_by_layer[name] = target
        return targets_by_layer

    def numbers(self, codes: dict[str, Tensor], until_whole: bool = False) -> _Numbers:
        """Which of the codes of these layers' units comes to every place, two passes per digit."""
        numbers = _Numbers()
        largest = max((int(code.max()) for code in codes.values()), default=0)
        for digit in range(max(largest.bit_length(), 1) if codes else 0):
            bits = {n: (code >> digit) % 2 == 1 for n, code in codes.items()}
            ones = self.follow(bits, until_whole)
            zeros = self.follow({n: ~bit for n, bit in bits.items()}, until_whole)
            numbers.add(digit, zeros, ones)
        return numbers

    def blocks(self, layers: dict[str, _Marks]) -> dict[str, tuple[_Numbers, Tensor]]:
        """Layers whose units mix only in blocks of one size: numbers of places and of units.

        Such are heads, and what a layer emits as several parts of equal size (gates of a recurrent
        layer; queries, keys and values at once). No two layers may come to one place.
        """
        first = {n: torch.arange(self.units[n]) == 0 for n in layers}
        origin = self.follow(first)
        waiting = {n: _partitions(self.units[n]) for n in layers}
        codes: dict[str, Tensor] = {}
        while waiting:
            tried = {n: next(candidates, None) for n, candidates in waiting.items()}
            others = self.follow({n: c != 0 for n, c in tried.items() if c is not None})
            for name, code in tried.items():
                both = (p for p in layers[name] if p in origin and p in others)
                if code is None or not any(bool((origin[p] & others[p]).any()) for p in both):
                    del waiting[name]
                    codes |= {} if code is None else {name: code}
        numbers = self.numbers(codes)
        return {n: (numbers, c) for n, c in codes.items() if numbers.meeting(layers[n]) is None}

    @torch.no_grad()
    def bare_places(self) -> _Marks:
        """The places that a parameter of no layer takes part in."""
        values = [t.detach().clone() for t in self.bare]
        try:
            for tensor in self.bare:
                tensor.fill_(torch.nan)
            return self.follow({})
        finally:
            for tensor, value in zip(self.bare, values, strict=True):
                tensor.copy_(value)


def _partitions(units: int) -> Iterator[Tensor]:
    """Ways to number blocks of units of one size, small blocks first.

    A block is a few units in a row, or as many in a row of each of two, three or four equal parts.
    """
    for parts in (n for n in (1, 2, 3, 4) if units % n == 0):
        size_of_part = units // parts
        for size in range(1, size_of_part // 2 + 1):
            if size_of_part % size == 0:
                yield torch.arange(units) % size_of_part // size


@dataclass(frozen=True)
class _Numbers:
    """The number that marks gave to every place, and its digits that are both zero and one."""

    reached: _Marks = field(default_factory=dict)
    numbers: _Marks = field(default_factory=dict)
    unclear: _Marks = field(default_factory=dict)

    def add(self, digit: int, zeros: _Marks, ones: _Marks) -> None:
        """Take one binary digit in."""
        for place in {**zeros, **ones}:
            none = torch.zeros_like(zeros[place] if place in zeros else ones[place])
            zero, one = zeros.get(place, none), ones.get(place, none)
            for table, bits in (
                (self.reached, (zero | one).long()),
                (self.numbers, one.long() << digit),
                (self.unclear, (zero & one).long() << digit),
            ):
                table[place] = table.get(place, none.long()) | bits

    def meeting(self, marks: _Marks) -> str | None:
        """The first module where several numbers come to one of these places."""
        for (role, name), mask in marks.items():
            unclear = self.unclear.get((role, name))
            if role in _ROLES and (unclear is None or bool(unclear[mask].any())):
                return name
        return None

    def unique_places(self) -> dict[int, _Marks]:
        """The places that only one number came to, by that number."""
        places: dict[int, _Marks] = defaultdict(dict)
        for place, reached in self.reached.items():
            clear = reached.bool() & (self.unclear[place] == 0)
            for number in self.numbers[place][clear].unique().tolist():
                places[number][place] = clear & (self.numbers[place] == number)
        return places

    def candidates(self, numbers: list[int]) -> list[dict[tuple[str, str], bool]]:
        """Where each of these numbers may have come, and whether with others."""
        candidates: list[dict[tuple[str, str], bool]] = [{} for _ in numbers]
        for place, reached in self.reached.items():
            at = reached.bool()
            pairs = torch.stack([self.numbers[place][at], self.unclear[place][at]]).unique(dim=1)
            for value, mask in pairs.t().tolist():
                for places, number in zip(candidates, numbers, strict=True):
                    if not (value ^ number) & ~mask:
                        places[place] = places.get(place, False) or mask > 0
        return candidates


_ROLES = ("readers", "carriers")


def remove_marks(value: Tensor) -> Tensor:
    """A tensor with zeros in place of its marks."""
    return value.masked_fill(value.isnan(), 0.0)


def _mark(mask: Tensor, axis: int, module: nn.Module, args: Inputs, output: Tensor) -> Tensor:
    """Mark units of a module's output."""
    index = mask.nonzero().flatten().to(output.device)
    return output.index_fill(axis, index, torch.nan)


def _note(
    place: tuple[str, str], axis: int, marks: _Marks, stop: bool, module: nn.Module, args: Inputs
) -> Inputs:
    """Note the marked units of a module's input; take the marks off where the module ends them."""
    units = args[0].isnan().movedim(axis, 0).flatten(1).any(1).cpu()
    if bool(units.any()):
        marks[place] = units | marks.get(place, torch.zeros_like(units))
    return (remove_marks(args[0]), *args[1:]) if stop else args


def _keep_in_place(
    place: tuple[str, str], module: nn.Module, marks: _Marks, end: bool
) -> Iterator[Removable]:
    """Take a module that keeps the shape of its input for one that keeps units where they are.

    With `end` marks stop here, for whatever else reads the same tensor too.
    """

    def before(_: nn.Module, args: Inputs) -> None:
        marked = [t for t in tensors_in(args) if t.is_floating_point() and bool(t.isnan().any())]
        if marked:
            marks[place] = torch.ones(1, dtype=torch.bool)
        for tensor in marked if end else ():
            if 0 not in tensor.stride():  # several positions of an expanded one are one number
                tensor.copy_(remove_marks(tensor))

    def after(_: nn.Module, args: Inputs, output: Any) -> Any:
        same = all(isinstance(t, Tensor) and t.is_floating_point() for t in (*args[:1], output))
        if args and same and output.shape == args[0].shape and bool(args[0].isnan().any()):
            return remove_marks(output).masked_fill(args[0].isnan(), torch.nan)
        return output

    yield module.register_forward_pre_hook(before)
    yield module.register_forward_hook(after)


class UnitGraph(NamedTuple):
    """The units of a net and what its modules cost; `obstacle` says why no unit could be found."""

    units: tuple[Unit, ...]
    costs: Mapping[str, LayerCost]
    obstacle: str | None = None


def trace_units(net: nn.Module, example: Inputs) -> UnitGraph:
    """All units of a plain, decomposed net, with the reason where one cannot be taken out.

    They depend on the architecture and on the example, not on the weights.
    """
    counted = CountedPass(net, example)
    try:
        units = _Coupling(_Tracer(net, example), _find_fixed_layers(net, counted.calls)).units()
    except CODE_ERRORS as failure:  # the code of the net lets no mark through
        return UnitGraph((), counted.costs(), str(failure))
    return UnitGraph(tuple(units), counted.costs())


def _find_fixed_layers(net: nn.Module, calls: Mapping[str, int]) -> dict[str, str]:
    """Layers that may not change, with the reason: used more than once, or with tied weights."""
    layers, owners, reasons = affine_layers(net), parameter_owners(net), {}
    for name, module in net.named_modules():
        if name in layers and calls[name] != 1 and type(module) is not Recurring:
            reasons[name] = f"'{name}' runs {calls[name]} times"
        elif LAYOUTS.get(type(module)) and any(owners[id(p)] > 1 for p in module.parameters()):
            reasons[name] = f"'{name}' shares its weights"
    return reasons


_Places = TypeVar("_Places", bound=Mapping[tuple[str, str], Any])
_Node = tuple[str, str, int]  # emitter, readers or carriers; a module; a unit


_Member = TypeVar("_Member", bound=Hashable)


class DisjointSets(Generic[_Member]):
    """Sets that are joined one pair of members after the other."""

    def __init__(self) -> None:
        self.parents: dict[_Member, _Member] = {}

    def root(self, member: _Member) -> _Member:
        """The member that stands for the set of another, which is new if it was in none."""
        while self.parents.setdefault(member, member) != member:
            self.parents[member] = self.parents[self.parents[member]]
            member = self.parents[member]
        return member

    def join(self, one: _Member, other: _Member) -> None:
        """Make one set of the sets of two members."""
        self.parents[self.root(one)] = self.root(other)


class _Coupling(DisjointSets[_Node]):
    """Sets of places that can only go at once: what emits a unit and what is given it."""

    def __init__(self, tracer: _Tracer, fixed: dict[str, str]) -> None:
        super().__init__()
        self.tracer, self.fixed = tracer, fixed
        self.reasons: dict[_Node, str] = {}
        self.mixing: dict[str, _Marks] = {}  # layers whose units meet before a place
        for (role, name), taken in (tracer.bare_places() if tracer.bare else {}).items():
            for i in taken.nonzero().flatten().tolist():
                self.reasons[role, name, i] = "a bare parameter takes part"
        for name, layer in tracer.layers.items():
            for i in range(layer.outputs if layer.is_depthwise else 0):
                self.join(("emitter", name, i), ("readers", name, i))
        together = tracer.layers_before_whole() if tracer.whole else {}
        units = tracer.numbers({name: torch.arange(n) for name, n in tracer.units.items()})
        if together:
            self._place_together(together, units)
        rest = [name for name in tracer.emitters if name not in together]
        for name, marks in self._arrivals(rest).items():
            self._place(name, marks, units)
        if self.mixing:
            self._place_mixing(units)

    def _arrivals(self, names: list[str]) -> dict[str, _Marks]:
        """Where the units of every one of these layers come."""
        numbers, codes = self.tracer.layer_numbers(names), [self.tracer.codes[n] for n in names]
        alone = numbers.unique_places()
        maybe = zip(names, numbers.candidates(codes), strict=True)
        arrivals = {name: alone.get(code, {}) for name, code in zip(names, codes, strict=True)}
        doubtful = {name: places for name, places in maybe if any(places.values())}
        for group in _group_disjoint(doubtful) if doubtful else ():
            marks = self.tracer.all_of(*group)
            for name, places in group.items():
                arrivals[name] = {place: marks[place] for place in places if place in marks}
        return arrivals

    def _place_together(self, layers: dict[str, str], numbers: _Numbers) -> None:
        """Layers before modules that take units together: they stay, and so does what they reach.

        Those of one width are joined by the numbers of their units, as one residual stream.
        """
        widths: dict[int, list[str]] = defaultdict(list)
        for name, target in layers.items():
            widths[self.tracer.units[name]].append(name)
            kind = type(self.tracer.whole[target]).__name__
            for i in range(self.tracer.units[name]):
                self.reasons["emitter", name, i] = f"'{target}' ({kind}) takes its units together"
        for names in widths.values():
            marks = {p: m for p, m in self.tracer.all_of(*names).items() if p[0] in _ROLES}
            for place, mask in marks.items():
                why = self.reasons["emitter", names[0], 0]
                self.reasons |= {(*place, i): why for i in mask.nonzero().flatten().tolist()}
            for name in names:
                for i in range(self.tracer.units[name]):
                    self.join(("emitter", name, i), ("emitter", names[0], i))
            self._join_places(names[0], marks, numbers, torch.arange(self.tracer.units[names[0]]))

    def _place(self, name: str, marks: _Marks, numbers: _Numbers) -> None:
        """Join every unit of a layer with the places where it arrives."""
        mixed = numbers.meeting(marks)
        reason = self._obstacle(name, marks, mixed is not None)
        if mixed is not None and reason is None and self.tracer.units[name] > 1:
            self.mixing[name] = marks  # its units meet others: look at it without them
        elif mixed is not None:
            self._stay(name, marks, reason or "it is spread over several units")
        else:
            codes = torch.arange(self.tracer.units[name])
            self._join_places(name, marks, numbers, codes, reason)

    def _place_mixing(self, numbers: _Numbers) -> None:
        """The same for layers with units that meet others, by blocks that do not."""
        for group in _group_disjoint(self.mixing):
            blocks = self.tracer.blocks(group)
            for name, marks in group.items():
                if name in blocks:
                    self._join_places(name, marks, *blocks[name], self._obstacle(name, marks))
                else:
                    where = numbers.meeting(marks)
                    self._stay(name, marks, f"it mixes with other units before '{where}'")

    def _join_places(
        self, name: str, marks: _Marks, numbers: _Numbers, codes: Tensor, reason: str | None = None
    ) -> None:
        """Join units with places by their numbers, or blocks of units by the numbers of these."""
        first: dict[int, int] = {}
        for unit, code in enumerate(codes.tolist()):
            self.join(("emitter", name, unit), ("emitter", name, first.setdefault(code, unit)))
            if reason is not None:
                self.reasons["emitter", name, unit] = reason
        for (role, target), mask in marks.items():
            if role in _ROLES:
                at = mask.nonzero().flatten()
                codes_at = numbers.numbers[role, target][at].tolist()
                for position, code in zip(at.tolist(), codes_at, strict=True):
                    if code in first:
                        self.join(("emitter", name, first[code]), (role, target, position))

    def _stay(self, name: str, marks: _Marks, reason: str) -> None:
        """Units that nothing tells apart, or that have to stay: joined for the notes alone."""
        count = self.tracer.units[name]
        for i in range(count):
            self.root(("emitter", name, i))
            self.reasons["emitter", name, i] = reason
        for (role, target), mask in marks.items():
            if role in _ROLES and count > 1:
                # As notes name them: as many places each, and the last unit gets the others.
                at = mask.nonzero().flatten().tolist()
                each = max(len(at) // count, 1)
                for i, position in enumerate(at):
                    unit = min(i // each, count - 1)
                    self.join(("emitter", name, unit), (role, target, position))

    def _obstacle(self, name: str, marks: _Marks, mixed: bool = False) -> str | None:
        """Why the units of a layer have to stay; None if they may go.

        If they are `mixed` with others, where they end is not known yet.
        """
        for role, target in marks:
            if role == "whole":
                kind = type(self.tracer.whole[target]).__name__
                return f"'{target}' ({kind}) takes its units together"
        touched = (name, *(target for _, target in marks))
        fixed = next((self.fixed[t] for t in touched if t in self.fixed), None)
        if fixed is not None or mixed:
            return fixed
        if ("output", "") in marks:
            return TO_THE_OUTPUT
        return None if any(role == "readers" for role, _ in marks) else "nothing is seen to read it"

    def units(self) -> list[Unit]:
        """The sets, in the order of the net."""
        sets: dict[_Node, dict[str, list[Place]]] = defaultdict(lambda: defaultdict(list))
        reasons: dict[_Node, str] = {}
        for node in sorted(self.parents, key=lambda n: n[2]):
            sets[self.root(node)][node[0]].append((node[1], node[2]))
        for node, reason in self.reasons.items():
            reasons.setdefault(self.root(node), reason)
        return [
            Unit(tuple(s["emitter"]), tuple(s["readers"]), tuple(s["carriers"]), reasons.get(root))
            for root, s in sets.items()
            if s["emitter"]
        ]


def _group_disjoint(layers: Mapping[str, _Places]) -> list[dict[str, _Places]]:
    """Layers in groups that share no place where their marks come."""
    groups: list[tuple[dict[str, _Places], set[tuple[str, str]]]] = []
    for name, places in layers.items():
        fitting = (group for group in groups if group[1].isdisjoint(places))
        if (chosen := next(fitting, None)) is None:
            groups.append(chosen := ({}, set()))
        chosen[0][name] = places
        chosen[1].update(places)
    return [group for group, _ in groups]
