"""Find the units that do nothing, fold what they still say into biases, and cut them out."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from vardrop._core.calls import tensors_in
from vardrop._core.errors import VardropError
from vardrop._core.torch_private import TorchDispatchMode, tree_map_only
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
from vardrop.compression.probes import Inputs, PlainAttention, Removable, hooks, run
from vardrop.compression.trace_units import TO_THE_OUTPUT, Place, Unit, remove_marks
from vardrop.noisy import named_modules_of

_UNIFORM = 1e-6  # how far positions may differ, relative to the largest, by rounding alone


class _Data(TorchDispatchMode):
    """Keeps marks where an operation would lose them.

    Integers and truth values have no NaN: those that come from the input or from marked numbers are
    remembered, and numbers that are made with them are marked.
    """

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.known = {id(t): t for t in tensors_in(inputs) if not t.is_floating_point()}
        self.looking = True

    def run_aside(self, hook: Callable[..., Any], *args: Any) -> Any:
        """Run a hook, whose operations are not those of the net."""
        self.looking = False
        try:
            return hook(*args)
        finally:
            self.looking = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Inputs = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.looking:
            made, sources = tensors_in(result), tensors_in((args, kwargs))
            self._look(func.overloadpacket.__name__, made, sources)
        return result

    def _look(self, name: str, made: list[Tensor], sources: list[Tensor]) -> None:
        counted = any(id(t) in self.known for t in sources)
        hides = "attention" in name or not all(t.is_floating_point() for t in made)
        if name.endswith("_like") or name.startswith("new_") or not (counted or hides):
            return  # the shape alone counts, or marks show by themselves
        if not counted and not any(
            t.is_floating_point() and bool(t.isnan().any()) for t in sources
        ):
            return
        for tensor in made:
            if not tensor.is_floating_point():
                self.known[id(tensor)] = tensor
            elif counted or not name.startswith(_EXTREMES):
                tensor.fill_(torch.nan)


# These return the positions of extremes too, but their values show a mark where it arrives.
_EXTREMES = ("max", "min", "cummax", "cummin", "adaptive_max", "fractional_max")


def _pass_on(arrival: Any, seen: list[Tensor], layer: Any, args: Inputs, _: Tensor) -> Tensor:
    """Let marks through an affine layer by its weights that are not zero, and note its input.

    `arrival` is the layer with a one instead of every weight that is not zero.
    """
    seen.append(args[0].detach().clone())
    output = layer.forward(remove_marks(args[0]), *args[1:])
    marks = arrival(args[0].isnan().to(output.dtype), *args[1:])  # positive where one arrives
    return output.masked_fill(marks > 0.5, torch.nan)


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


def _mark_all(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor


def data_flow(net: nn.Module, inputs: Inputs) -> dict[str, list[Tensor]]:
    """The input of every affine layer at each of its calls: NaN where it depends on the data.

    The input of the net is all NaN, and an affine layer passes it on through weights that are not
    zero. A number that arrives is a constant of the net, with its exact value at every position,
    padding borders included.
    """
    seen: dict[str, list[Tensor]] = {}
    handles: list[Removable] = []
    marked = tree_map_only(Tensor, _mark_all, inputs)
    mode = _Data(marked)
    for name, view in affine_layers(net).items():
        arrival = _product(view.layer, view.weight.ne(0).to(view.weight.dtype))
        hook = partial(mode.run_aside, _pass_on, arrival, seen.setdefault(name, []))
        handles.append(view.layer.register_forward_hook(hook))
    for module in net.modules():
        if (flow := _FLOW.get(type(module))) is not None:
            handles.append(module.register_forward_hook(partial(mode.run_aside, flow)))
    with hooks(*handles), PlainAttention(), mode:
        run(net, marked)
    return seen


class Removal:
    """The search for dead units in a plain net, which it changes without changing its outputs.

    `removed` are the units that are zero by now and may be cut out; `stays` counts the dead units
    that have to stay by layer and reason.
    """

    @torch.no_grad()
    def __init__(
        self, net: nn.Module, inputs: Inputs, waiting: list[Unit], flow: dict[str, list[Tensor]]
    ) -> None:
        self.net, self.inputs = net, inputs
        self.layers, self.modules = affine_layers(net), unit_modules(net)
        self.removed: list[Unit] = []
        self.stays: Counter[tuple[str, str]] = Counter()
        self._flow: dict[str, Tensor] = {}
        self._unread: dict[str, Tensor] = {}
        self._constant: dict[str, Tensor] = {}
        recurring = [n for n, view in self.layers.items() if type(view.layer) is Recurring]
        while True:  # a unit without readers leaves the units before it without readers
            self._look(flow)
            for name in recurring:
                self._look_at_state(name, waiting)
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
            never = torch.ones(1, view.inputs, dtype=torch.bool)
            self._constant[name] = ~(torch.stack(marked) if marked else never).any(0).cpu()
            self._unread[name] = view.unread().cpu()
            if seen:
                alike = len({s.shape for s in seen}) == 1
                self._flow[name] = torch.stack(seen) if alike and len(seen) > 1 else seen[0]

    def _look_at_state(self, name: str, waiting: list[Unit]) -> None:
        """Units of a state that only such units read, themselves among them, are unread."""
        weight = self.layers[name].weight.ne(0)
        dead = [u for u in waiting if u.reason is None and self._feeds_itself_only(u, name)]
        while dead:
            outputs = [i for u in dead for n, i in u.emitters if n == name]
            others = weight.index_fill(0, torch.tensor(outputs, dtype=torch.long), False).any(0)
            left = [u for u in dead if not any(others[i] for n, i in u.readers if n == name)]
            if len(left) == len(dead):
                break
            dead = left
        for unit in dead:
            self._unread[name][self._readers(unit)[name]] = True

    def _feeds_itself_only(self, unit: Unit, name: str) -> bool:
        """Whether a layer reads a unit of the state that it feeds, and no other layer does."""
        readers = self._readers(unit)
        fed = any(n == name for n, _ in unit.emitters)
        reads = readers.pop(name, None) is not None
        return fed and reads and all(self._unread[n][at].all() for n, at in readers.items())

    def _remove(self, unit: Unit) -> bool:
        """Whether a unit goes; a dead one that has to stay is counted with the reason."""
        readers = self._readers(unit)
        if not readers and unit.reason is not None:  # nothing is known about it
            return False
        obstacle, folds = unit.reason, []
        for name, at in readers.items():
            if not bool((self._unread[name][at] | self._constant[name][at]).all()):
                return False  # it is not dead
            if obstacle is None and not bool(self._unread[name][at].all()):
                effect = _effect(self.layers[name], self._flow[name], at)
                if effect is None:
                    step = type(self.layers[name].layer) is Recurring
                    how = "changes from step to step in" if step else "meets the padding border of"
                    obstacle = f"its constant {how} '{name}'"
                else:
                    folds.append((self.layers[name], effect))
        if obstacle is None:
            for view, effect in folds:
                view.add_to_bias(effect)
            self.removed.append(unit)
        elif obstacle != TO_THE_OUTPUT:
            self.stays[unit.emitters[0][0], obstacle] += 1
        return obstacle is None

    def _readers(self, unit: Unit) -> dict[str, list[int]]:
        """The inputs where a unit ends; a depthwise layer only passes it on."""
        return _places(p for p in unit.readers if not self.layers[p[0]].is_depthwise)

    def _zero(self, gone: list[Unit]) -> None:
        """Zero what reads units and what feeds them."""
        read = _places(p for u in gone for p in u.readers if not self.layers[p[0]].is_depthwise)
        fed = _places(place for unit in gone for place in unit.emitters)
        for name, indices in fed.items():
            if name in self.modules:
                self.modules[name].zero(indices)
        for name, view in self.layers.items():
            if read[name] or fed[name]:
                view.zero(read[name], fed[name])


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
            full_name = join_name(name, part)
            unread = [place for place in read if place[0] == full_name]
            width = layers[full_name].outputs - sum(place[0] == full_name for place in fed)
            if unread and layers[full_name].inputs - len(unread) <= width:
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
    read = _places(place for unit in gone for place in unit.readers)
    emitted = _places(place for unit in gone for place in unit.emitters)
    carried = _places(place for unit in gone for place in (*unit.carriers, *unit.emitters))
    for name, attention in named_modules_of(net, SlimAttention).items():
        projection = attention.q_proj
        attention.keep(_mask(projection.out_features, emitted[join_name(name, "q_proj")]))
    for name, view in affine_layers(net).items():
        if read[name] or emitted[name]:
            view.resize(_mask(view.inputs, read[name]), _mask(view.outputs, emitted[name]))
    for name, module in unit_modules(net).items():
        if carried[name]:
            module.resize(_mask(module.outputs, carried[name]))
    settle_sizes(net)


def _places(places: Iterable[Place]) -> dict[str, list[int]]:
    by_name: dict[str, list[int]] = defaultdict(list)
    for name, index in places:
        by_name[name].append(index)
    return by_name


def _mask(count: int, gone: list[int]) -> Tensor:
    """True for all but these units."""
    mask = torch.ones(count, dtype=torch.bool)
    mask[gone] = False
    return mask
