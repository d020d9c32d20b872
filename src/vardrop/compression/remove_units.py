"""Find dead units, add their constants to biases, and cut them out."""

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
from vardrop._core.modules import hooks
from vardrop._core.torch_private import PlainAttention, TorchDispatchMode, tree_map_only
from vardrop.compression.layer_views import (
    AffineView,
    affine_layers,
    join_name,
    settle_sizes,
    unit_modules,
)
from vardrop.compression.modules.pruned_attention import SlimAttention
from vardrop.compression.modules.pruned_recurrent import RecurrentOutput, Recurring, Unrolled
from vardrop.compression.probes import Inputs, run
from vardrop.compression.trace_units import TO_THE_OUTPUT, Blocks, Place, Unit, equal_places
from vardrop.noisy import named_modules_of

Flow = dict[str, list[Tensor]]  # the input of every layer at each of its calls
_NO_UNITS = torch.empty(0, dtype=torch.long)
_UNIFORM = 1e-6  # rounding difference between positions, relative to the largest value
# These operations also return positions, but their values show a mark at the right place.
_EXTREMES = ("max", "min", "cummax", "cummin", "adaptive_max", "fractional_max")


class _KeepMarks(TorchDispatchMode):
    """Marks the outputs of operations that would lose a mark.

    Integers and booleans cannot be NaN. If they come from the input or from marked numbers, they
    are remembered, and numbers that are computed from them are marked.
    """

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.from_data = {id(t): t for t in tensors_in(inputs) if not t.is_floating_point()}
        self.active = True

    def pause(self, hook: Callable[..., object], *args: object) -> object:
        """Run a hook, whose operations are no operations of the model."""
        self.active = False
        try:
            return hook(*args)
        finally:
            self.active = True

    def __torch_dispatch__(
        self, func: Any, types: object, args: Inputs = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not self.active or name.endswith("_like") or name.startswith("new_"):
            return returned  # of such operations only the shape matters
        created, sources = tensors_in(returned), tensors_in((args, kwargs))
        counted = any(id(t) in self.from_data for t in sources)
        hides = "attention" in name or not all(t.is_floating_point() for t in created)
        marked = (t.is_floating_point() and bool(t.isnan().any()) for t in sources)
        if name in ("mul", "mul_") and len(sources) == 2:  # a constant zero ends marks
            returned.masked_fill_((sources[0] == 0) | (sources[1] == 0), 0)
        elif name in ("sign", "sgn"):  # which return zero for a mark
            returned.masked_fill_(sources[0].isnan(), torch.nan)
        for tensor in created if counted or (hides and any(marked)) else ():
            if not tensor.is_floating_point():
                self.from_data[id(tensor)] = tensor
            elif counted or not name.startswith(_EXTREMES):
                tensor.fill_(torch.nan)
        return returned


def _pass_on(
    arrival: nn.Module, seen: list[Tensor], layer: nn.Module, args: Inputs, _: Tensor
) -> Tensor:
    """Pass marks through the nonzero weights of an affine layer, and record its input.

    `arrival` is the layer with ones instead of nonzero weights.
    """
    seen.append(args[0].detach().clone())
    is_marked = args[0].isnan()
    y: Tensor = layer.forward(args[0].masked_fill(is_marked, 0.0), *args[1:])
    # The result of `arrival` is positive if a mark arrives.
    return y.masked_fill(arrival(is_marked.to(y.dtype), *args[1:]) > 0.5, torch.nan)


def _drop_bias(layer: Any, weight: Tensor) -> nn.Module:
    """A layer with another weight, a zero bias and no hooks."""
    twin, bias = copy.copy(layer), layer.bias
    twin._parameters = {"weight": weight, "bias": None if bias is None else torch.zeros_like(bias)}
    twin._forward_hooks, twin._forward_pre_hooks = {}, {}
    return twin


def _mark_embedding(layer: nn.Embedding, args: Inputs, output: Tensor) -> Tensor:
    """An entry of an embedding depends on the data unless it is the same in all rows."""
    varies = (layer.weight != layer.weight[:1]).any(0)
    return layer.weight[0].masked_fill(varies, torch.nan).expand_as(output).clone()


def _mark_changing(layer: Unrolled, args: Inputs, output: RecurrentOutput) -> RecurrentOutput:
    """A state that changes between steps is not constant, because other sequences are longer."""
    y, state = output
    if isinstance(y, PackedSequence):
        states, steps = y.data, len(y.batch_sizes)
    else:
        states, steps = y, y.shape[1 if layer.batch_first and y.dim() == 3 else 0]
    if steps < 2:
        raise VardropError("a recurrent layer sees one step, so pass an example with two or more")
    rows = states.flatten(0, -2)
    states.masked_fill_(rows.amin(0) != rows.amax(0), torch.nan)
    for tensor in tensors_in(state):
        tensor.masked_fill_(tensor != 0, torch.nan)
    return output


_FLOW: dict[type[nn.Module], Callable[..., object]] = {
    nn.Embedding: _mark_embedding,
    Unrolled: _mark_changing,
}


def data_flow(net: nn.Module, inputs: Inputs) -> Flow:
    """The input of every affine layer at each of its calls, with NaN if it depends on the data.

    The input of the model is all NaN, and an affine layer passes NaN on through nonzero weights.
    Any other number is a constant of the model, with its exact value at every position, also at
    padding borders.
    """
    marked = tree_map_only(
        Tensor, lambda t: torch.full_like(t, torch.nan) if t.is_floating_point() else t, inputs
    )
    mode, handles = _KeepMarks(marked), []
    seen = Flow()
    for name, view in affine_layers(net).items():
        arrival = _drop_bias(view.layer, view.weight.ne(0).to(view.weight.dtype))
        hook = partial(mode.pause, _pass_on, arrival, seen.setdefault(name, []))
        handles.append(view.layer.register_forward_hook(hook))
    handles += [
        module.register_forward_hook(partial(mode.pause, _FLOW[type(module)]))
        for module in net.modules()
        if type(module) in _FLOW
    ]
    with hooks(*handles), PlainAttention(), mode:
        run(net, marked)
    return seen


class Removal:
    """Zeroes the dead units of a plain model in place, without a change of its outputs.

    `removed` are the units that are now zero and can be cut out. `stays` counts the dead units
    that have to stay, by layer and reason.
    """

    @torch.no_grad()
    def __init__(self, net: nn.Module, inputs: Inputs, waiting: list[Unit], flow: Flow) -> None:
        self.layers, self.modules = affine_layers(net), unit_modules(net)
        self.removed: list[Unit] = []
        self.stays: Counter[tuple[str, str]] = Counter()
        self._flow: dict[str, Tensor] = {}
        self._unread: dict[str, Tensor] = {}
        self._constant: dict[str, Tensor] = {}
        while True:  # without a removed unit, earlier units may have no readers
            for name, seen in flow.items():
                view = self.layers[name]
                self._unread[name] = view.unread().cpu()
                self._constant[name] = torch.zeros(view.inputs, dtype=torch.bool)
                if seen:  # other layers that run several times stay whole
                    self._flow[name] = torch.cat(seen) if type(view.layer) is Recurring else seen[0]
                    marked = [s.isnan().movedim(view.axis, 0).flatten(1).any(1) for s in seen]
                    self._constant[name] = ~torch.stack(marked).any(0).cpu()
            for name in (n for n, v in self.layers.items() if type(v.layer) is Recurring):
                self._find_unread_states(name, waiting)
            self.stays.clear()
            start = len(self.removed)
            waiting = [unit for unit in waiting if not self._remove(unit)]
            if len(self.removed) == start:
                return
            read = self._readers(*self.removed[start:])
            fed = _by_module(place for unit in self.removed[start:] for place in unit.emitters)
            for name in fed.keys() & self.modules.keys():
                self.modules[name].fill(fed[name], 0)
            for name in (read.keys() | fed.keys()) & self.layers.keys():
                self.layers[name].zero(read.get(name, _NO_UNITS), fed.get(name, _NO_UNITS))
            flow = data_flow(net, inputs)

    def _find_unread_states(self, name: str, waiting: list[Unit]) -> None:
        """Count units of a state as unread if only such units read them."""
        weight = self.layers[name].weight.ne(0)
        pairs = ((unit, self._readers(unit)) for unit in waiting if unit.reason is None)
        dead = [
            (unit, readers[name])
            for unit, readers in pairs
            if name in readers
            and any(emitter == name for emitter, _ in unit.emitters)
            and all(bool(self._unread[n][at].all()) for n, at in readers.items() if n != name)
        ]
        size = -1
        while len(dead) != size:  # without a unit of the state, others may be read
            size = len(dead)
            rows = [i for unit, _ in dead for n, i in unit.emitters if n == name]
            is_read = weight.index_fill(0, torch.tensor(rows, dtype=torch.long), False).any(0)
            dead = [(unit, at) for unit, at in dead if not bool(is_read[at].any())]
        for _, at in dead:
            self._unread[name][at] = True

    def _remove(self, unit: Unit) -> bool:
        """Whether a unit is removed. A dead unit that has to stay is counted with the reason."""
        readers = self._readers(unit)
        if not readers and unit.reason is not None:
            return False
        obstacle, folds = unit.reason, []
        for name, at in readers.items():
            if not bool((self._unread[name][at] | self._constant[name][at]).all()):
                return False  # it is not dead
            if obstacle is None and not bool(self._unread[name][at].all()):
                view = self.layers[name]
                effect = _constant_effect(view, self._flow[name], at)
                if effect is not None:
                    folds.append((view, effect))
                elif type(view.layer) is Recurring:
                    obstacle = f"its constant changes from step to step in '{name}'"
                else:
                    obstacle = f"its constant meets the padding border of '{name}'"
        if obstacle is None:
            for view, effect in folds:
                view.add_to_bias(effect)
            self.removed.append(unit)
        elif obstacle != TO_THE_OUTPUT:
            self.stays[unit.emitters[0][0], obstacle] += 1
        return obstacle is None

    def _readers(self, *units: Unit) -> dict[str, Tensor]:
        """The inputs where units end. A depthwise layer only passes them on."""
        places = (p for unit in units for p in unit.readers)
        return _by_module(p for p in places if not self.layers[p[0]].is_depthwise)


def _constant_effect(view: AffineView, seen: Tensor, constant: Tensor) -> Tensor | None:
    """The sum that constant inputs add to each output, or None if positions differ."""
    index, axis = constant.to(seen.device), view.axis % seen.dim()
    only = torch.zeros_like(seen).index_copy(axis, index, seen.index_select(axis, index))
    y = _drop_bias(view.layer, view.weight)(only).movedim(view.axis, 0).flatten(1)
    low, high = y.amin(1), y.amax(1)
    return None if bool((high - low > _UNIFORM * y.abs().max()).any()) else (low + high) / 2


def keep_equal_widths(net: nn.Module, removed: list[Unit]) -> list[Unit]:
    """The units that can be cut out, so that every layer keeps one, and groups have equal sizes.

    All of the removed units are zero, so this affects only shapes.
    """
    blocks, gone = equal_places(net), list(removed)
    while gone and (back := _unit_to_return(blocks, gone)) is not None:
        gone.remove(back)
    return gone


def _unit_to_return(blocks: list[Blocks], gone: list[Unit]) -> Unit | None:
    """A unit of a block that keeps fewer places than another block, or none at all."""
    read = {place: unit for unit in gone for place in unit.readers}
    fed = {place: unit for unit in gone for place in unit.emitters}
    for pair in blocks:
        lives = [
            not (all(place in read for place in ins) and all(place in fed for place in outs))
            for ins, outs in zip(*pair, strict=True)
        ]
        if not any(lives):
            return fed[pair[1][0][0]]
        for sides, lost in zip(pair, (read, fed), strict=True):
            living = [places for places, alive in zip(sides, lives, strict=True) if alive]
            left = [sum(place not in lost for place in places) for places in living]
            for places, count in zip(living, left, strict=True):
                if places and count < max(1, *left):
                    return next(lost[place] for place in places if place in lost)
    return None


def cut_out(net: nn.Module, gone: list[Unit]) -> None:
    """Cut units that are zero out of a model, in place."""
    if not gone:
        return
    layers, modules = affine_layers(net), unit_modules(net)
    read = _by_module(place for unit in gone for place in unit.readers)
    emitted = _by_module(place for unit in gone for place in unit.emitters)
    carried = _by_module(place for unit in gone for place in (*unit.carriers, *unit.emitters))

    def mask(name: str, count: int, units: dict[str, Tensor]) -> Tensor:
        return torch.ones(count, dtype=torch.bool).index_fill(0, units.get(name, _NO_UNITS), False)

    for name, attention in named_modules_of(net, SlimAttention).items():
        queries = join_name(name, "q_proj")
        heads = mask(queries, layers[queries].outputs, emitted).view(-1, attention.head_dim).any(1)
        attention.heads = attention.heads[heads.to(attention.heads.device)]
    for name, view in layers.items():
        if name in read or name in emitted:
            view.resize(mask(name, view.inputs, read), mask(name, view.outputs, emitted))
    for name, module in modules.items():
        if name in carried:
            module.resize(mask(name, module.outputs, carried))
    settle_sizes(net, layers)


def _by_module(places: Iterable[Place]) -> dict[str, Tensor]:
    """The units of places by module."""
    units: dict[str, list[int]] = defaultdict(list)
    for name, index in places:
        units[name].append(index)
    return {name: torch.tensor(indices) for name, indices in units.items()}
