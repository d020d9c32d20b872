"""Find the units that do nothing, fold what they still say into biases, and cut them out."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from vardrop._core.calls import tensors_in
from vardrop._core.errors import VardropError
from vardrop.compression.kinds import (
    Affine,
    Scale,
    affine_layers,
    inside,
    is_known,
    settle_sizes,
    unit_modules,
)
from vardrop.compression.modules.attention import SlimAttention
from vardrop.compression.modules.recurrent import Recurring, Unrolled
from vardrop.compression.running import Inputs, Removable, hooks, is_float, run
from vardrop.compression.tracing import TO_THE_OUTPUT, Place, PlainAttention, Unit, unmarked
from vardrop.noisy import modules_of

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
    twin = copy.deepcopy(layer)  # positive exactly where a mark arrives
    with torch.no_grad():
        twin.weight.copy_(layer.weight.ne(0))
        if twin.bias is not None:
            twin.bias.zero_()

    def before(_: nn.Module, args: Inputs) -> Inputs:
        seen.append(args[0].detach().clone())
        return (unmarked(args[0]), *args[1:])

    def after(_: nn.Module, args: Inputs, output: Tensor) -> Tensor:
        arrived = twin(seen[-1].isnan().to(output.dtype), *args[1:])
        return output.masked_fill(arrived > 0.5, torch.nan)

    yield layer.register_forward_pre_hook(mode.aside(before))
    yield layer.register_forward_hook(mode.aside(after))


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
    with hooks(*handles), PlainAttention(), mode:
        run(net, marked)
    return seen


def fixed_layers(net: nn.Module, inputs: Inputs) -> dict[str, str]:
    """Layers that may not change, with the reason: used more than once, or with tied weights."""
    calls: Counter[str] = Counter()

    def count(name: str) -> Callable[..., None]:
        return lambda layer, args: calls.update([name])

    layers = affine_layers(net)
    with hooks(*(v.layer.register_forward_pre_hook(count(n)) for n, v in layers.items())):
        run(net, inputs)
    owners = Counter(id(p) for m in net.modules() for p in m.parameters(recurse=False))
    found = {}
    for name, module in net.named_modules():
        if name in layers and calls[name] != 1 and type(module) is not Recurring:
            found[name] = f"'{name}' runs {calls[name]} times"
        elif is_known(module) and any(owners[id(p)] > 1 for p in module.parameters()):
            found[name] = f"'{name}' shares its weights"
    return found


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
            dead = [u for u in waiting if u.reason is None and self._only_state_reads(u, name)]
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

    def _only_state_reads(self, unit: Unit, name: str) -> bool:
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
    twin = copy.copy(view.layer)
    zero = None if view.bias is None else torch.zeros_like(view.bias)
    twin._parameters = {"weight": view.layer.weight, "bias": zero}
    twin._forward_hooks, twin._forward_pre_hooks = {}, {}
    y = twin(only).movedim(view.axis, 0).flatten(1)
    low, high = y.amin(1), y.amax(1)
    if bool((high - low > _UNIFORM * y.abs().max()).any()):
        return None
    return (low + high) / 2


def rebalanced(net: nn.Module, removed: list[Unit]) -> list[Unit]:
    """Put units back until every layer keeps one, and every group of a layer as many.

    All of them are zero by now, so this changes shapes and nothing else.
    """
    layers, gone = affine_layers(net), list(removed)
    alike = alike_layers(net)
    while (back := _missing(layers, gone) or _uneven(layers, alike, gone)) is not None:
        gone.remove(back)
    return gone


def alike_layers(net: nn.Module) -> list[list[str]]:
    """Layers of recurrent layers that have to keep as many outputs as each other."""
    return [
        [inside(name, part) for part in parts]
        for name, layer in modules_of(net, Unrolled).items()
        for parts in layer.alike()
    ]


def _uneven(layers: dict[str, Affine], alike: list[list[str]], gone: list[Unit]) -> Unit | None:
    """A unit of a layer that keeps fewer outputs than another with which it has one size."""
    emitted = {place: unit for unit in gone for place in unit.emitters}
    for names in alike:
        lost = {n: [i for i in range(layers[n].outputs) if (n, i) in emitted] for n in names}
        least = min((len(units) for units in lost.values()), default=0)
        for name, units in lost.items():
            if len(units) > least:
                return emitted[name, units[0]]
    return None


def _missing(layers: dict[str, Affine], gone: list[Unit]) -> Unit | None:
    emitted = {place: unit for unit in gone for place in unit.emitters}
    read = {place: unit for unit in gone for place in unit.readers}
    for name, view in layers.items():
        sizes = [view.inputs // view.groups, view.outputs // view.groups]
        lost: list[list[list[Place]]] = [
            [
                [(name, g * size + i) for i in range(size) if (name, g * size + i) in places]
                for g in range(view.groups)
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


def cut_out(net: nn.Module, gone: list[Unit], deviations: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take units that are zero by now out of a net, in place; the deviations of what is left."""
    read = {place for unit in gone for place in unit.readers}
    emitted = {place for unit in gone for place in unit.emitters}
    carried = {place for unit in gone for place in unit.carriers} | emitted
    kept = dict(deviations)
    for name, attention in modules_of(net, SlimAttention).items():
        attention.keep(_left(inside(name, "q_proj"), attention.q_proj.out_features, emitted))
    for name, view in affine_layers(net).items():
        left = _left(name, view.inputs, read), _left(name, view.outputs, emitted)
        weight = inside(name, "weight")
        if weight in kept:
            kept[weight] = view.cut(kept[weight], *left)
        view.resize(*left)
    touched = {name for name, _ in carried}
    for name, module in unit_modules(net).items():
        if name in touched:
            units, weight = _left(name, module.outputs, carried), inside(name, "weight")
            if weight in kept:
                kept[weight] = module.cut(kept[weight], units)
            module.resize(units)
    settle_sizes(net)
    return kept


def _left(name: str, count: int, gone: set[Place]) -> list[int]:
    return [i for i in range(count) if (name, i) not in gone]
