"""Follow marked units of a model from the layers that emit them to the layers that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.calls import tensors_in
from vardrop._core.modules import hooks
from vardrop._core.torch_private import PlainAttention, own_tensors
from vardrop.compression import layer_views
from vardrop.compression.probes import Inputs, run

# Marked units by role and module. Readers and carriers distinguish units. A module that takes all
# units together ("whole") and the output of the model ("output") count as one unit.
Marks = dict[tuple[str, str], Tensor]
ROLES = ("readers", "carriers")


class Tracer:
    """Follows marked units of a plain model from the layers that emit them to their readers."""

    def __init__(self, net: nn.Module, inputs: Inputs, advance: Callable[[], None]) -> None:
        self.net, self.inputs, self.advance = net, inputs, advance
        self.layers, modules = layer_views.affine_layers(net), layer_views.unit_modules(net)
        self.carriers = {n: u for n, u in modules.items() if not u.layout.emits and u.outputs > 1}
        bare = layer_views.bare_units(net)
        self.emitters: dict[str, layer_views.AffineView | layer_views.Units] = {
            **self.layers,
            **{n: u for n, u in modules.items() if u.layout.emits and n not in bare},
        }
        self.whole = {  # modules with tensors of an unknown layout
            name: module
            for name, module in net.named_modules()
            if any(own_tensors(module))
            and all(layer_views.layout_of(part) is None for part in module.modules())
        }
        verdicts = {n: list[bool]() for n, m in self.whole.items() if not list(m.children())}
        pairs = ((self.whole[name], partial(_compare, calls)) for name, calls in verdicts.items())
        with hooks(*(module.register_forward_hook(hook) for module, hook in pairs)):
            run(net, inputs)
        # Some treat every unit separately in all calls, such as a `LayerScale`.
        self.whole = {n: m for n, m in self.whole.items() if not all(verdicts.get(n) or [False])}
        # The remaining tensors of no layer by name, and their views by name and axis.
        self.other = {
            layer_views.join_name(name, key): tensor
            for name, module in net.named_modules()
            if layer_views.layout_of(module) is None and name not in self.whole
            for key, tensor in own_tensors(module)
            if tensor.is_floating_point() and tensor.numel() > 1
        }
        self.bare = {n: u for n, u in bare.items() if n.rpartition(":")[0] in self.other}
        self.units = {name: v.outputs for name, v in (self.emitters | self.bare).items()}
        # Gray codes: neighbours differ in one binary digit, and layers that meet are neighbours.
        self.codes = {name: i ^ (i >> 1) for i, name in enumerate(self.units)}

    def follow(
        self, sources: dict[str, Tensor], until_whole: bool = False, tensors: Sequence[Tensor] = ()
    ) -> Marks:
        """Mark units (a mask per layer) and return the places that they reach.

        With `until_whole` a module that takes units together ends all marks that reach it. Every
        entry of `tensors` is marked, too.
        """
        marks: Marks = {}
        handles = [module.register_forward_hook(_keep_in_place) for module in self.whole.values()]
        handles += [
            module.register_forward_pre_hook(partial(_note_whole, name, marks, until_whole))
            for name, module in self.whole.items()
        ]
        for name in self.emitters.keys() & sources.keys():
            mark = partial(_mark, sources[name], self.emitters[name].axis)
            handles.append(self.emitters[name].layer.register_forward_hook(mark))
        for role, modules in (("carriers", self.carriers), ("readers", self.layers)):
            for name, module in modules.items():
                note = partial(_note, (role, name), module.axis, marks, role == "readers")
                handles.append(module.layer.register_forward_pre_hook(note))
        bare = {name: view for name, view in self.bare.items() if name in sources}
        marked = [*tensors, *(t for view in bare.values() for t in view.tensors().values())]
        originals = [tensor.detach().clone() for tensor in marked]
        try:
            for tensor in tensors:
                tensor.detach().fill_(torch.nan)
            for name, view in bare.items():
                view.fill(sources[name].nonzero().flatten(), torch.nan)
            with hooks(*handles), PlainAttention():
                returned = run(self.net, self.inputs)
        finally:
            for tensor, original in zip(marked, originals, strict=True):
                tensor.detach().copy_(original)
        self.advance()
        if any(bool(t.isnan().any()) for t in returned if t.is_floating_point()):
            marks["output", ""] = torch.ones(1, dtype=torch.bool)
        return marks

    def follow_layers(self, names: Iterable[str]) -> Marks:
        """The places that the units of these layers reach."""
        return self.follow({n: torch.ones(self.units[n], dtype=torch.bool) for n in names})

    def number_units(self, codes: dict[str, Tensor], until_whole: bool = False) -> Numbers:
        """The codes of the units that reach every place. Each digit takes two passes."""
        numbers = Numbers()
        largest = max((int(code.max()) for code in codes.values()), default=0)
        for digit in range(max(largest.bit_length(), 1) if codes else 0):
            for bit in (0, 1):
                sources = {n: (code >> digit) % 2 == bit for n, code in codes.items()}
                for place, mask in self.follow(sources, until_whole).items():
                    digits = numbers.setdefault(place, torch.zeros(2, len(mask), dtype=torch.long))
                    digits[bit] |= mask.long() << digit
        return numbers

    def layers_before_whole(self) -> dict[str, str]:
        """The last layers before a module that takes units together, with the name of that module.

        Marks end there, so every such module of a residual stream sees only the layers after the
        module before it.
        """
        names = {code: name for name, code in self.codes.items()}
        targets: dict[str, str] = {}
        norms_of_heads = []
        codes = {n: torch.full((self.units[n],), self.codes[n]) for n in self.emitters}
        for (role, target), (zeros, ones) in self.number_units(codes, until_whole=True).items():
            if role == "whole" and not bool(zeros & ones):
                name = names[int(ones)]
                targets.setdefault(name, target)
                widths = [t.shape[-1] for t in self.whole[target].parameters() if t.dim()]
                if max(widths, default=self.units[name]) < self.units[name]:
                    norms_of_heads.append(target)
        # Marks spread within a head.
        self.whole = {name: m for name, m in self.whole.items() if name not in norms_of_heads}
        return self.layers_before_whole() if norms_of_heads else targets

    def number_blocks(self, layers: dict[str, Marks]) -> dict[str, tuple[Numbers, Tensor]]:
        """Number the units of layers that mix only within blocks of one size.

        Such blocks are heads, and the equal parts that a layer emits (gates of a recurrent layer,
        queries, keys and values in one tensor). No two layers may reach one place.
        """
        origin = self.follow({n: torch.arange(self.units[n]) == 0 for n in layers})
        waiting = {n: _partitions(self.units[n]) for n in layers}
        codes: dict[str, Tensor] = {}
        while waiting:
            attempts = {n: next(partitions, None) for n, partitions in waiting.items()}
            others = self.follow({n: c != 0 for n, c in attempts.items() if c is not None})
            for name, code in attempts.items():
                both = (p for p in layers[name] if p in origin and p in others)
                if code is None:
                    del waiting[name]
                elif not any(bool((origin[p] & others[p]).any()) for p in both):
                    del waiting[name]
                    codes[name] = code
        numbers = self.number_units(codes)
        return {n: (numbers, c) for n, c in codes.items() if numbers.mixed_at(layers[n]) is None}


def _input_of_same_shape(args: Inputs, output: object) -> Tensor | None:
    """The first argument of a call, if it and the returned tensor are numbers of one shape."""
    x = args[0] if args else None
    if isinstance(x, Tensor) and isinstance(output, Tensor) and x.shape == output.shape:
        return x if x.is_floating_point() and output.is_floating_point() else None
    return None


def _compare(verdicts: list[bool], module: nn.Module, args: Inputs, output: object) -> None:
    """Note whether a marked unit along some axis leaves a call of a module as it entered it."""
    x, marked = _input_of_same_shape(args, output), list[Tensor]()
    if x is not None and len(args) == 1:
        sizes = {size for _, tensor in own_tensors(module) for size in tensor.shape} - {1}
        first = torch.zeros(1, dtype=torch.long, device=x.device)
        axes = (axis for axis, size in enumerate(x.shape) if size in sizes)
        marked = [x.index_fill(axis, first, torch.nan) for axis in axes]
    verdicts.append(any(bool((module.forward(m).isnan() == m.isnan()).all()) for m in marked))


def _partitions(units: int) -> Iterator[Tensor]:
    """Numberings of blocks of one size, small blocks first.

    A block is a few consecutive units, or as many of each of two, three or four equal parts.
    """
    for part in (units // n for n in (1, 2, 3, 4) if units % n == 0):
        for size in range(1, part // 2 + 1):
            if part % size == 0:
                yield torch.arange(units) % part // size


class Numbers(dict[tuple[str, str], Tensor]):
    """The digits of the codes that reach every place, as two rows of bits, (2, units).

    The bits of the first row are the digits that were zero, and of the second row one. If a bit
    is in both rows, several codes reach the place.
    """

    def mixed_at(self, marks: Marks) -> str | None:
        """The first module with a marked place that several codes reach."""
        for (role, name), mask in marks.items():
            digits = self.get((role, name))
            if role in ROLES and (digits is None or bool((digits[0] & digits[1])[mask].any())):
                return name
        return None

    def reach(self, codes: dict[str, int]) -> tuple[dict[str, Marks], list[str]]:
        """The places that the code of each layer may reach, and the layers for which it is unclear.

        It is unclear at places that several codes reach, if one of them may be this code.
        """
        names, column = list(codes), torch.tensor([*codes.values()])[:, None]
        reached: dict[str, Marks] = {name: {} for name in names}
        unclear = set[str]()
        for place, (zeros, ones) in self.items():
            several = zeros & ones
            fits = (ones ^ column) & ~several == 0  # (codes, units)
            possible = fits & (zeros | ones).bool()
            for i in possible.any(1).nonzero().flatten().tolist():
                reached[names[i]][place] = possible[i]
                if bool(several[possible[i]].any()):
                    unclear.add(names[i])
        return reached, [name for name in names if name in unclear]


def _mark(mask: Tensor, axis: int, module: nn.Module, args: Inputs, output: Tensor) -> Tensor:
    """Mark units of a module's output."""
    return output.index_fill(axis, mask.nonzero().flatten().to(output.device), torch.nan)


def _note(
    place: tuple[str, str], axis: int, marks: Marks, stop: bool, module: nn.Module, args: Inputs
) -> Inputs:
    """Note the marked units of a module's input, and remove the marks if they stop there."""
    units = args[0].isnan().movedim(axis, 0).flatten(1).any(1).cpu()
    if bool(units.any()):
        marks[place] = units | marks.get(place, torch.zeros_like(units))
    return (args[0].masked_fill(args[0].isnan(), 0.0), *args[1:]) if stop else args


def _note_whole(name: str, marks: Marks, end: bool, module: nn.Module, args: Inputs) -> None:
    """Note whether marks reach a module that takes units together.

    With `end` they stop there, also for other modules that read the same tensor.
    """
    marked = [t for t in tensors_in(args) if t.is_floating_point() and bool(t.isnan().any())]
    if marked:
        marks["whole", name] = torch.ones(1, dtype=torch.bool)
    for tensor in marked if end else ():
        if 0 not in tensor.stride():  # several positions of an expanded tensor are one number
            tensor.masked_fill_(tensor.isnan(), 0.0)


def _keep_in_place(module: nn.Module, args: Inputs, output: Any) -> Tensor | None:
    """Assume that a module which keeps the shape of its input also keeps the order of units."""
    if (x := _input_of_same_shape(args, output)) is None:
        return None
    return torch.where(x.isnan(), torch.nan, output.masked_fill(output.isnan(), 0.0))
