"""One table of layer types: where the units of a layer are, and how some of them are removed.

Dense, convolutional, grouped, depthwise and transposed layers differ only in the layout of the
block (groups, outputs, inputs, *kernel). Rows (the weights of an output unit) and columns (the
weights that read an input unit) are found, zeroed and cut out in one way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.integrations import package_of
from vardrop._core.torch_private import own_tensors
from vardrop.compression.modules.pruned_recurrent import Recurring
from vardrop.compression.modules.select import Scale
from vardrop.layers import NOISY_TYPES, LinearLike


@dataclass(frozen=True)
class AffineLayout:
    """A layer W x + b: the attributes that hold its sizes, and how its weight is laid out.

    Args:
        sizes: the attributes that count inputs and outputs, and groups if it has any, in
            this order.
        transposed: whether the weight is (inputs, outputs, ...) instead of (outputs, inputs, ...).
    """

    sizes: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class UnitLayout:
    """A module that treats every unit separately: its tensors with one entry per unit.

    An embedding emits units (`emits`). The other modules pass their inputs on. If the module joins
    units in blocks of equal size, which can only be removed as a whole, `blocks` counts them.
    """

    sizes: tuple[str, ...]  # the last one counts the units
    tensors: tuple[str, ...]
    axis: int = 0
    emits: bool = False
    blocks: str = ""


_DENSE = AffineLayout(("in_features", "out_features"))
_CONV = AffineLayout(("in_channels", "out_channels", "groups"))
_TRANSPOSED = AffineLayout(_CONV.sizes, transposed=True)
_NORM = UnitLayout(("num_features",), ("weight", "bias", "running_mean", "running_var"))
_GROUPS = UnitLayout(("num_channels",), ("weight", "bias"), blocks="num_groups")
# By exact type. `layout_of` adds norms, and their subclasses such as a norm with its activation.
LAYOUTS: dict[type[nn.Module], AffineLayout | UnitLayout] = {
    nn.Linear: _DENSE,
    Recurring: _DENSE,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONV),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _TRANSPOSED),
    nn.Embedding: UnitLayout(("num_embeddings", "embedding_dim"), ("weight",), axis=1, emits=True),
    nn.PReLU: UnitLayout(("num_parameters",), ("weight",)),
    Scale: UnitLayout((), ("factor",)),
}
# Sizes that a module keeps in addition to its layers, and reads in its forward.
_SIZES: dict[type[nn.Module], dict[str, Callable[[Any], int]]] = {}


def layout_of(module: nn.Module) -> AffineLayout | UnitLayout | None:
    """The layout of a module, or None if its units are not known."""
    if (layout := LAYOUTS.get(type(module))) is not None:
        return layout
    noisy = NOISY_TYPES.get(type(module))
    if noisy is not None and issubclass(noisy, LinearLike):
        return AffineLayout(noisy.sizes)
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return _NORM
    return _GROUPS if isinstance(module, nn.GroupNorm) and module.num_groups > 1 else None


def register_affine(kind: type[nn.Module], layout: AffineLayout) -> None:
    """Let `shrink` and `slim` remove units of a dense or convolutional layer of another library.

    Args:
        kind: the class, by exact type, with a `weight` and a `bias` that may be None.
        layout: its sizes and the layout of its weight.

    >>> class Transposed(nn.Linear):
    ...     pass
    >>> register_affine(Transposed, AffineLayout(("in_features", "out_features")))
    >>> list(affine_layers(nn.Sequential(Transposed(2, 1))))
    ['0']
    """
    LAYOUTS[kind] = layout


def register_sizes(kind: type[nn.Module], **sizes: Callable[[Any], int]) -> None:
    """Register the sizes that a class keeps in addition to the sizes of its layers.

    Args:
        kind: the class, by exact type.
        sizes: by attribute, a function that computes the size from the module.
    """
    _SIZES[kind] = sizes


def replace_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or a buffer. A kernel in channels-last stays in that memory format."""
    old = getattr(module, name)
    if tensor.dim() == 4 and old.stride(1) == 1 and old.stride(3) == old.shape[1]:
        # Kernels of 1 x 1 or of one channel are contiguous in both formats, and their strides say
        # which one a convolution uses.
        tensor = tensor.to(memory_format=torch.channels_last)
    is_parameter = isinstance(old, nn.Parameter)
    setattr(module, name, nn.Parameter(tensor, old.requires_grad) if is_parameter else tensor)


class AffineView:
    """A view of an affine layer by its input and output units.

    `inputs` and `outputs` are their numbers, and `groups` is the number of independent blocks.
    `axis` is the axis of units in the layer's input and output, counted from the end. `weight` and
    `bias` are the tensors of the layer without their graph.
    """

    def __init__(self, layer: Any, layout: AffineLayout) -> None:
        self.layer, self.layout = layer, layout
        sizes = [getattr(layer, name) for name in layout.sizes]
        self.inputs, self.outputs, self.groups = sizes if len(sizes) == 3 else (*sizes, 1)
        self.weight: Tensor = layer.weight.detach()
        self.bias: Tensor | None = None if layer.bias is None else layer.bias.detach()
        self.axis = 1 - self.weight.dim() if len(sizes) == 3 else -1
        self.is_depthwise = self.groups == self.inputs == self.outputs > 1

    def blocks(self) -> Tensor:
        """A view (groups, outputs / groups, inputs / groups, *kernel) of the weight."""
        sides = self.inputs // self.groups, self.outputs // self.groups
        kernel = self.weight.shape[2:]
        if self.layout.transposed:
            return self.weight.view(self.groups, *sides, *kernel).transpose(1, 2)
        return self.weight.view(self.groups, *reversed(sides), *kernel)

    def scale_inputs(self, factors: Tensor) -> None:
        """Multiply the weights of each input by a number, in place."""
        blocks = self.blocks()
        blocks.mul_(factors.view(self.groups, 1, -1, *(1 for _ in blocks.shape[3:])))

    def zero(self, inputs: Tensor, outputs: Tensor) -> None:
        """Zero the weights of these inputs and of these outputs, in place."""
        blocks = self.blocks()
        columns, rows = self.inputs // self.groups, self.outputs // self.groups
        blocks[inputs // columns, :, inputs % columns] *= 0
        blocks[outputs // rows, outputs % rows] *= 0
        if self.bias is not None:
            self.bias[outputs] = 0

    def add_to_bias(self, effect: Tensor) -> None:
        """Add to the bias, in place. A layer without a bias gets one if the effect is not zero."""
        if self.bias is None and bool(effect.any()):
            self.layer.bias = nn.Parameter(torch.zeros_like(effect))
            self.bias = self.layer.bias.detach()
        if self.bias is not None:
            self.bias.add_(effect)

    def unread(self) -> Tensor:
        """For every input unit, whether no weight reads it."""
        return ~self.blocks().ne(0).transpose(1, 2).flatten(2).any(2).flatten()

    def resize(self, inputs: Tensor, outputs: Tensor) -> None:
        """Cut the layer down to the inputs and outputs that are True, in place.

        Its groups have to keep equally many of them.
        """
        inputs, outputs = inputs.to(self.weight.device), outputs.to(self.weight.device)
        groups = inputs.view(self.groups, -1), outputs.view(self.groups, -1)
        blocks = zip(self.blocks(), *groups, strict=True)
        parts = [block[o][:, i] for block, i, o in blocks if bool(i.any() | o.any())]
        rows = [p.transpose(0, 1) if self.layout.transposed else p for p in parts]
        replace_tensor(self.layer, "weight", torch.cat(rows).contiguous())
        if self.bias is not None:
            replace_tensor(self.layer, "bias", self.bias[outputs].clone())
        sizes = int(inputs.sum()), int(outputs.sum()), len(parts)
        for name, size in zip(self.layout.sizes, sizes, strict=False):
            setattr(self.layer, name, size)


class Units:
    """A view of a module that treats every unit separately.

    `outputs` is the number of units that it distinguishes, which is one if they share a tensor.
    `axis` is the axis of units in its input or output, counted from the start or the end.
    """

    def __init__(self, layer: Any, layout: UnitLayout) -> None:
        self.layer, self.layout = layer, layout
        sizes = [tensor.shape[layout.axis] for tensor in self.tensors().values()]
        self.outputs: int = max(sizes) if sizes else getattr(layer, layout.sizes[-1])
        self.axis: int = -1 if layout.emits else getattr(layer, "axis", 1)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors with one entry per unit, by name."""
        tensors = {name: getattr(self.layer, name) for name in self.layout.tensors}
        return {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}

    def fill(self, units: Tensor, number: float) -> None:
        """Write a number into the entries of these units, in place."""
        for tensor in self.tensors().values():
            tensor.index_fill_(self.layout.axis, units.to(tensor.device), number)

    def resize(self, keep: Tensor) -> None:
        """Cut it down to the units that are True, in place."""
        if self.outputs == 1:
            return
        for name, tensor in self.tensors().items():
            index = keep.nonzero().flatten().to(tensor.device)
            replace_tensor(self.layer, name, tensor.index_select(self.layout.axis, index))
        if self.layout.sizes:
            self.set_size(int(keep.sum()))

    def set_size(self, units: int) -> None:
        """Set the attributes that count its units and their blocks."""
        setattr(self.layer, self.layout.sizes[-1], units)
        if name := self.layout.blocks:
            setattr(self.layer, name, getattr(self.layer, name) * units // self.outputs)


def bare_units(net: nn.Module) -> dict[str, Units]:
    """Tensors of modules without a layout, by name and axis, that may have an entry per unit."""
    widths = {n for view in affine_layers(net).values() for n in (view.inputs, view.outputs)} - {1}
    return {
        f"{join_name(name, key)}:{axis}": Units(module, UnitLayout((), (key,), axis, emits=True))
        for name, module in net.named_modules()
        if layout_of(module) is None
        for key, tensor in own_tensors(module)
        if tensor.is_floating_point()
        for axis, size in enumerate(tensor.shape)
        if size in widths
    }


def settle_sizes(net: nn.Module, before: Mapping[str, AffineView]) -> None:
    """Update the sizes that modules keep in addition to the sizes of their layers.

    An integer of a module is such a size if only layers that changed had it. A number of heads
    changes in proportion to them. `before` are views of the layers from before the change.
    """
    pairs: dict[str, set[tuple[int, int]]] = defaultdict(set)  # old and new sizes by owner
    for name, view in affine_layers(net).items():
        if (old_view := before.get(name)) is not None:
            sizes = (old_view.inputs, view.inputs), (old_view.outputs, view.outputs)
            pairs[name.rpartition(".")[0]].update(sizes)
    for owner, old_and_new in pairs.items():
        module, same = net.get_submodule(owner), {old for old, new in old_and_new if old == new}
        changed = {(old, new) for old, new in old_and_new if old != new}
        if type(module) in _SIZES or package_of(type(module)) == "torch":
            continue
        for name, number in [(n, v) for n, v in vars(module).items() if type(v) is int]:
            candidates = {new for old, new in changed if old == number and old not in same}
            if name in _HEADS:
                heads = ((number * new, old) for old, new in changed)
                candidates = {size // old for size, old in heads if size % old == 0}
            if len(candidates) == 1:
                setattr(module, name, candidates.pop())
    for module in net.modules():
        for name, size in _SIZES.get(type(module), {}).items():
            setattr(module, name, size(module))


_HEADS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads")


def view_of(module: nn.Module) -> AffineView | Units | None:
    """The view of a module, or None if its units are not known."""
    layout = layout_of(module)
    if isinstance(layout, AffineLayout):
        return AffineView(module, layout)
    return None if layout is None else Units(module, layout)


def affine_layers(net: nn.Module) -> dict[str, AffineView]:
    """The plain affine layers of a model by name."""
    return {n: v for n, m in net.named_modules() if isinstance(v := view_of(m), AffineView)}


def unit_modules(net: nn.Module) -> dict[str, Units]:
    """The modules and bare tensors of a model that treat every unit separately, by name."""
    units = {n: v for n, m in net.named_modules() if isinstance(v := view_of(m), Units)}
    return units | bare_units(net)


def join_name(name: str, tensor: str) -> str:
    """The full name of a tensor or a part of a module."""
    return f"{name}.{tensor}" if name else tensor


def replace_module(net: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The model with one module replaced, in place unless it is the model itself."""
    if not name:
        return module
    net.set_submodule(name, module)
    return net
