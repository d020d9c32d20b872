"""Find the units that do nothing, fold what they still say into biases, and cut them out."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from vardrop._core.calls import tensors_in
from vardrop._core.errors import VardropError
from vardrop._core.torch_private import TorchDispatchMode, tree_map
from vardrop.compression.layer_views import (
    Affine,
    affine_layers,
    join_name,
    settle_sizes,
    unit_modules,
)
from vardrop.compression.modules.attention import SlimAttention
from vardrop.compression.modules.recurrent import Recurring, Unrolled
from vardrop.compression.modules.select import Scale
from vardrop.compression.probes import Inputs, PlainAttention, Removable, hooks, is_float, run
from vardrop.compression.trace_units import TO_THE_OUTPUT, Place, Unit, unmarked
from vardrop.noisy import named_modules_of

_UNIFORM = 1e-6  # how far positions may differ, relative to the largest, by rounding alone


class _Data(TorchDispatchMode):
    """Keeps marks where an operation would lose them.

    Integers and truth values have no NaN: those that come from the input or from marked numbers are
    remembered, and numbers that are made with them are marked.
    """

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.known = {id(t): t for t in tensors_in(inputs) if not is_float(t)}
        self.looking = True

    def aside(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook whose own operations are not those of the net."""

        def quiet(*args: Any) -> Any:
            self.looking = False
            try:
                return hook(*args)
            finally:
                self.looking = True

        return quiet

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Inputs = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.looking:
            made, given = tensors_in(result), tensors_in((args, kwargs))
            self._look(func.overloadpacket.__name__, made, given)
        return result

    def _look(self, name: str, made: list[Tensor], given: list[Tensor]) -> None:
        counted = any(id(t) in self.known for t in given)
        hides = "attention" in name or not all(map(is_float, made))
        if name.endswith("_like") or name.startswith("new_") or not (counted or hides):
            return  # the shape alone counts, or marks show by themselves
        if not counted and not any(is_float(t) and bool(t.isnan().any()) for t in given):
            return
        for tensor in made:
            if not is_float(tensor):
                self.known[id(tensor)] = tensor
            elif counted or not name.startswith(_EXTREMES):
                tensor.fill_(torch.nan)


# These return the positions of extremes too, but their values show a mark where it arrives.
_EXTREMES = ("max", "min", "cummax", "cummin", "adaptive_max", "fractional_max")


def _pass_on(layer: Any, seen: list[Tensor], mode: _Data) -> Iterator[Removable]:
    """Let marks through an affine layer by its weights that are not zero, and note its input."""
    arrival = _product(layer, layer.weight.detach().ne(0).to(layer.weight.dtype))

    def before(_: nn.Module, args: Inputs) -> Inputs:
        seen.append(args[0].detach().clone())
        return (unmarked(args[0]), *args[1:])

    def after(_: nn.Module, args: Inputs, output: Tensor) -> Tensor:
        marks = arrival(seen[-1].isnan().to(output.dtype), *args[1:])  # positive where one arrives
        return output.masked_fill(marks > 0.5, torch.nan)

    yield layer.register_forward_pre_hook(mode.aside(before))
    yield layer.register_forward_hook(mode.aside(after))


def _product(layer: Any, weight: Tensor) -> Any:
    """A layer that multiplies by another weight and adds nothing, without hooks."""
    twin, bias = copy.copy(layer), layer.bias
    twin._parameters = {"weight": weight, "bias": None if bias is None else torch.zeros_like(bias)}
    twin._forward_hooks, twin._forward_pre_hooks = {}, {}
    return twin


def _mark_embedding(layer: Any, args: Inputs, output: Tensor) -> Tensor:
    """An entry of an embedding depends on the data unless all rows agree on it."""
    varies = (layer.weight != layer.weight[:1]).any(0)
    return layer.weight[0].masked_fill(varies, torch.nan).expand_as(output).clone()


def _stop_at_zero(layer: Any, args: Inputs, output: Tensor) -> Tensor:
    """A factor of zero lets nothing through."""
    closed = (layer.factor == 0).nonzero().flatten()
    return output.index_fill(layer.axis, closed, 0.0)


def _mark_moving(layer: Any, args: Inputs, output: Any) -> Any:
    """A state that changes from step to step is no constant: other sequences are longer."""
    y, state = output
    values = y.data if isinstance(y, PackedSequence) else y
    if layer.steps(y) < 2:
        raise VardropError("a recurrent layer sees one step: give an example with two or more")
    rows = values.flatten(0, -2)
    values.masked_fill_(rows.amin(0) != rows.amax(0), torch.nan)
    for tensor in tensors_in(state):
        tensor.masked_fill_(tensor != 0, torch.nan)
    return output


_FLOW: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Embedding: _mark_embedding,
    Scale: _stop_at_zero,
    Unrolled: _mark_moving,
}


def data_flow(net: nn.Module, inputs: Inputs) -> dict[str, list[Tensor]]:
    """The input of every affine layer at each of its calls: NaN where it depends on the data.

    The input of the net is all NaN, and an affine layer passes it on through weights that are not
    zero. A number that arrives is a constant of the net, with its exact value at every position,
    padding borders included.
    """
    seen: dict[str, list[Tensor]] = {}
    handles: list[Removable] = []
    marked = tree_map(lambda t: torch.full_like(t, torch.nan) if is_float(t) else t, inputs)
    mode = _Data(marked)
    for name, view in affine_layers(net).items():
        handles += _pass_on(view.layer, seen.setdefault(name, []), mode)
    for module in net.modules():
        if (flow := _FLOW.get(type(module))) is not None:
            handles.append(module.register_forward_hook(mode.aside(flow)))
    try:
        with hooks(*handles), PlainAttention(), mode:
            run(net, marked)
    except Exception as failure:
        raise VardropError(str(failure)) from failure
    return seen


class Removal:
    """The search for dead units in a plain net, which it changes without changing its outputs.

    `removed` are the units that are zero by now and may be cut out; `stays` counts the dead units
    that have to stay by layer and reason.
    """

    def __init__(
        self, net: nn.Module, inputs: Inputs, found: list[Unit], flow: dict[str, list[Tensor]]
    ) -> None:
        self.net, self.inputs = net, inputs
        self.layers, self.modules = affine_layers(net), unit_modules(net)
        self.removed: list[Unit] = []
        self.stays: Counter[tuple[str, str]] = Counter()
        self._flow: dict[str, Tensor] = {}
        self._unread: dict[str, list[bool]] = {}
        self._constant: dict[str, list[bool]] = {}
        with torch.no_grad():
            self._search(found, flow)

    def _search(self, waiting: list[Unit], flow: dict[str, list[Tensor]]) -> None:
        """Rounds, because a unit without readers leaves the units before it without readers."""
        while True:
            self._look(flow)
            self._look_at_states(waiting)
            self.stays.clear()
            start = len(self.removed)
            waiting = [unit for unit in waiting if not self._remove(unit)]
            if len(self.removed) == start:
                return
            self._zero(self.removed[start:])
            flow = data_flow(self.net, self.inputs)

    def _look(self, flow: dict[str, list[Tensor]]) -> None:
        for name, seen in flow.items():
            view = self.layers[name]
            marked = [s.isnan().movedim(view.axis, 0).flatten(1).any(1) for s in seen]
            never = torch.zeros(view.inputs, dtype=torch.bool)
            self._constant[name] = (~torch.stack(marked).any(0) if marked else never).tolist()
            self._unread[name] = view.unread()
            if seen:
                alike = len({s.shape for s in seen}) == 1
                self._flow[name] = torch.stack(seen) if alike and len(seen) > 1 else seen[0]

    def _look_at_states(self, waiting: list[Unit]) -> None:
        """Units of a state that only such units read, themselves among them, are unread."""
        recurring = [n for n, view in self.layers.items() if type(view.layer) is Recurring]
        for name in recurring:
            weight = self.layers[name].weight.ne(0)
            dead = [u for u in waiting if u.reason is None and self._feeds_itself_only(u, name)]
            while dead:
                own = [i for u in dead for n, i in u.emitters if n == name]
                others = weight.index_fill(0, torch.tensor(own, dtype=torch.long), False).any(0)
                left = [u for u in dead if not any(others[i] for n, i in u.readers if n == name)]
                if len(left) == len(dead):
                    break
                dead = left
            for unit in dead:
                for i in self._readers(unit)[name]:
                    self._unread[name][i] = True

    def _feeds_itself_only(self, unit: Unit, name: str) -> bool:
        """Whether a layer reads a unit of the state that it feeds, and no other layer does."""
        readers = self._readers(unit)
        fed = any(n == name for n, _ in unit.emitters)
        own = readers.pop(name, None) is not None
        return fed and own and all(self._unread[n][i] for n, at in readers.items() for i in at)

    def _remove(self, unit: Unit) -> bool:
        """Whether a unit goes; a dead one that has to stay is counted with the reason."""
        readers = self._readers(unit)
        unseen = not readers and unit.reason is not None  # nothing is known about it
        if unseen or not self._is_dead(readers):
            return False
        obstacle, folds = unit.reason, []
        for name, indices in readers.items():
            if obstacle is None and not all(self._unread[name][i] for i in indices):
                effect = _effect(self.layers[name], self._flow[name], indices)
                if effect is None:
                    step = type(self.layers[name].layer) is Recurring
                    how = "changes from step to step in" if step else "meets the padding border of"
                    obstacle = f"its constant {how} '{name}'"
                else:
                    folds.append((self.layers[name], effect))
        if obstacle is None:
            self._fold(folds)
            self.removed.append(unit)
        elif obstacle != TO_THE_OUTPUT:
            self.stays[unit.emitters[0][0], obstacle] += 1
        return obstacle is None

    def _readers(self, unit: Unit) -> dict[str, list[int]]:
        """The inputs where a unit ends; a depthwise layer only passes it on."""
        found: dict[str, list[int]] = {}
        for name, index in unit.readers:
            if not self.layers[name].is_depthwise:
                found.setdefault(name, []).append(index)
        return found

    def _is_dead(self, readers: dict[str, list[int]]) -> bool:
        """Whether nothing reads a unit, or only what does not depend on the data."""
        return all(
            self._unread[name][i] or self._constant[name][i]
            for name, indices in readers.items()
            for i in indices
        )

    def _fold(self, folds: list[tuple[Affine, Tensor]]) -> None:
        """Add what constant inputs say to the biases."""
        for view, effect in folds:
            if view.bias is None and bool(effect.any()):
                view.layer.bias = nn.Parameter(torch.zeros_like(effect))
            if view.bias is not None:
                view.bias.add_(effect)

    def _zero(self, gone: list[Unit]) -> None:
        """Zero what reads units and what feeds them."""
        read: dict[str, list[int]] = defaultdict(list)
        fed: dict[str, list[int]] = defaultdict(list)
        for unit in gone:
            for name, indices in self._readers(unit).items():
                read[name] += indices
            for name, i in unit.emitters:
                fed[name].append(i)
        for name, indices in fed.items():
            if name in self.modules:
                self.modules[name].zero(indices)
        for name, view in self.layers.items():
            view.zero(read.get(name, []), fed.get(name, []))


def _effect(view: Affine, seen: Tensor, constant: list[int]) -> Tensor | None:
    """What constant inputs add to each output, or None where that differs between positions."""
    index = torch.tensor(constant, device=seen.device)
    only = torch.zeros_like(seen).index_copy(
        view.axis % seen.dim(), index, seen.index_select(view.axis, index)
    )
    y = _product(view.layer, view.weight)(only).movedim(view.axis, 0).flatten(1)
    low, high = y.amin(1), y.amax(1)
    if bool((high - low > _UNIFORM * y.abs().max()).any()):
        return None
    return (low + high) / 2


def keep_equal_widths(net: nn.Module, removed: list[Unit]) -> list[Unit]:
    """Put units back until every layer keeps one, and all that has one size keeps as many.

    All of them are zero by now, so this changes shapes and nothing else.
    """
    layers, unrolled, gone = affine_layers(net), named_modules_of(net, Unrolled), list(removed)
    while (back := _unit_to_return(layers, unrolled, gone)) is not None:
        gone.remove(back)
    return gone


def _unit_to_return(
    layers: dict[str, Affine], unrolled: dict[str, Unrolled], gone: list[Unit]
) -> Unit | None:
    read = {place: unit for unit in gone for place in unit.readers}
    fed = {place: unit for unit in gone for place in unit.emitters}
    for name, view in layers.items():
        inputs, outputs = (_group_places(name, n, view.groups) for n in (view.inputs, view.outputs))
        pairs = zip(inputs, outputs, strict=True)
        alive = [not (all(p in read for p in i) and all(p in fed for p in o)) for i, o in pairs]
        if not any(alive):
            return fed[outputs[0][0]]
        for groups, lost in ((inputs, read), (outputs, fed)):
            living = [places for places, lives in zip(groups, alive, strict=True) if lives]
            if (back := _first_missing(living, lost)) is not None:
                return back
    for name, layer in unrolled.items():
        for parts in layer.equal_widths():
            names = [join_name(name, part) for part in parts]
            widths = [[(n, i) for i in range(layers[n].outputs)] for n in names]
            if (back := _first_missing(widths, fed)) is not None:
                return back
        for part in layer.projections():  # torch wants fewer outputs of these than inputs
            own = join_name(name, part)
            unread = [place for place in read if place[0] == own]
            width = layers[own].outputs - sum(place[0] == own for place in fed)
            if unread and layers[own].inputs - len(unread) <= width:
                return read[unread[0]]
    return None


def _group_places(name: str, count: int, groups: int) -> list[list[Place]]:
    size = count // groups
    return [[(name, g * size + i) for i in range(size)] for g in range(groups)]


def _first_missing(sets: list[list[Place]], lost: dict[Place, Unit]) -> Unit | None:
    """A unit of a set of places that keeps fewer than another does, or none at all."""
    left = [sum(place not in lost for place in places) for places in sets]
    for places, count in zip(sets, left, strict=True):
        if count < max(1, *left):
            return next(lost[place] for place in places if place in lost)
    return None


def cut_out(net: nn.Module, gone: list[Unit]) -> None:
    """Take units that are zero by now out of a net, in place."""
    read = {place for unit in gone for place in unit.readers}
    emitted = {place for unit in gone for place in unit.emitters}
    carried = {place for unit in gone for place in unit.carriers} | emitted
    for name, attention in named_modules_of(net, SlimAttention).items():
        attention.keep(_left(join_name(name, "q_proj"), attention.q_proj.out_features, emitted))
    for name, view in affine_layers(net).items():
        view.resize(_left(name, view.inputs, read), _left(name, view.outputs, emitted))
    touched = {name for name, _ in carried}
    for name, module in unit_modules(net).items():
        if name in touched:
            module.resize(_left(name, module.outputs, carried))
    settle_sizes(net)


def _left(name: str, count: int, gone: set[Place]) -> list[int]:
    return [i for i in range(count) if (name, i) not in gone]
