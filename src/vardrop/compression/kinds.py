"""One table of layer kinds: where the units of a layer lie, and how some of them are taken out.

Dense, convolutional, grouped, depthwise and transposed layers differ only in how they lay out the
block (groups, outputs, inputs, *kernel), so rows (what an output unit reads) and columns (where an
input unit goes) are found, zeroed and cut out in one way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.errors import VardropError
from vardrop.compression.modules.recurrent import Recurring


class Select(nn.Module):
    """Keep the units `index` along one axis.

    Args:
        index: which units, (K,) integers.
        axis: where they run, counted from the end.

    >>> import torch
    >>> Select(torch.tensor([0, 2]), axis=-1)(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[1., 3.]])
    """

    index: Tensor

    def __init__(self, index: Tensor, axis: int) -> None:
        super().__init__()
        self.register_buffer("index", index)
        self.axis = axis

    def forward(self, input: Tensor) -> Tensor:
        """The kept units."""
        return input.index_select(self.axis, self.index)

    def extra_repr(self) -> str:
        return f"units={len(self.index)}, axis={self.axis}"


class Lookup(nn.Module):
    """Number the entries of a vocabulary anew: the ones that are left, and one for all others.

    Args:
        index: the new number of every entry, (entries,) integers.

    >>> import torch
    >>> Lookup(torch.tensor([1, 0, 1]))(torch.tensor([[2, 1]]))
    tensor([[1, 0]])
    """

    index: Tensor

    def __init__(self, index: Tensor) -> None:
        super().__init__()
        self.register_buffer("index", index)

    def forward(self, input: Tensor) -> Tensor:
        """The new numbers."""
        return self.index.index_select(0, input.flatten()).view(input.shape)

    def extra_repr(self) -> str:
        return f"entries={len(self.index)}"


class Scale(nn.Module):
    """Multiply every unit along one axis by a constant: what is left of a gate on its own.

    Args:
        factor: one number per unit, (K,).
        axis: where the units run, counted from the end.

    >>> import torch
    >>> Scale(torch.tensor([1.0, 0.5]), axis=-1)(torch.tensor([[4.0, 4.0]]))
    tensor([[4., 2.]])
    """

    factor: Tensor

    def __init__(self, factor: Tensor, axis: int) -> None:
        super().__init__()
        self.register_buffer("factor", factor)
        self.axis = axis

    def forward(self, input: Tensor) -> Tensor:
        """The scaled units."""
        shape = [1] * input.dim()
        shape[self.axis] = len(self.factor)
        return input * self.factor.view(shape)

    def extra_repr(self) -> str:
        return f"units={len(self.factor)}, axis={self.axis}"


@dataclass(frozen=True)
class AffineKind:
    """A layer W x + b: the attributes that give its sizes, and how its weight is laid out."""

    inputs: str = "in_channels"
    outputs: str = "out_channels"
    groups: str | None = "groups"
    transposed: bool = False

    @property
    def sizes(self) -> tuple[str, ...]:
        """The attributes that give its sizes, in the order of a file."""
        return (self.inputs, self.outputs, *((self.groups,) if self.groups else ()))


@dataclass(frozen=True)
class UnitKind:
    """A module that treats every unit by itself: its tensors with one entry per unit.

    An embedding emits units (`emits`); the others pass on what they are given.
    """

    sizes: tuple[str, ...]  # the last one counts the units
    tensors: tuple[str, ...]
    axis: int = 0
    emits: bool = False


_NORM = UnitKind(("num_features",), ("weight", "bias", "running_mean", "running_var"))
_AFFINE: dict[type[nn.Module], AffineKind] = {
    nn.Linear: AffineKind("in_features", "out_features", groups=None),
    Recurring: AffineKind("in_features", "out_features", groups=None),
    nn.Conv1d: AffineKind(),
    nn.Conv2d: AffineKind(),
    nn.Conv3d: AffineKind(),
    nn.ConvTranspose1d: AffineKind(transposed=True),
    nn.ConvTranspose2d: AffineKind(transposed=True),
    nn.ConvTranspose3d: AffineKind(transposed=True),
}
_UNITS: dict[type[nn.Module], UnitKind] = {
    nn.Embedding: UnitKind(("num_embeddings", "embedding_dim"), ("weight",), axis=1, emits=True),
    nn.BatchNorm1d: _NORM,
    nn.BatchNorm2d: _NORM,
    nn.BatchNorm3d: _NORM,
    nn.InstanceNorm1d: _NORM,
    nn.InstanceNorm2d: _NORM,
    nn.InstanceNorm3d: _NORM,
    nn.PReLU: UnitKind(("num_parameters",), ("weight",)),
    Scale: UnitKind((), ("factor",)),
}
# Layers of packages that need not be installed, by their full name.
_ELSEWHERE = {
    "transformers.pytorch_utils.Conv1D": AffineKind("nx", "nf", groups=None, transposed=True),
}
# Sizes that a module keeps beside its layers, and reads in its forward.
_DERIVED: dict[str, dict[str, Callable[[Any], int]]] = {
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention": {
        "split_size": lambda module: module.c_proj.nx,
        "num_heads": lambda module: module.c_proj.nx // module.head_dim,
    },
    "transformers.models.t5.modeling_t5.T5Attention": {
        "inner_dim": lambda module: module.o.in_features,
        "n_heads": lambda module: module.o.in_features // module.key_value_proj_dim,
    },
}


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    """Put another tensor in place of a parameter or a buffer."""
    old = getattr(module, name)
    trained = old is None or old.requires_grad
    buffer = name in dict(module.named_buffers(recurse=False))
    setattr(module, name, value if buffer else nn.Parameter(value, trained))


class Affine:
    """A view of an affine layer, by the units that it reads and those that it feeds."""

    def __init__(self, layer: Any, kind: AffineKind) -> None:
        self.layer, self.kind = layer, kind

    @property
    def weight(self) -> Tensor:
        """The weight of the layer, without its graph."""
        return self.layer.weight.detach()

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer, without its graph."""
        return None if self.layer.bias is None else self.layer.bias.detach()

    @property
    def inputs(self) -> int:
        """How many units it reads."""
        return getattr(self.layer, self.kind.inputs)

    @property
    def outputs(self) -> int:
        """How many units it feeds."""
        return getattr(self.layer, self.kind.outputs)

    @property
    def groups(self) -> int:
        """Blocks of inputs that do not see each other's outputs."""
        return getattr(self.layer, self.kind.groups) if self.kind.groups else 1

    @property
    def is_depthwise(self) -> bool:
        """Whether every channel passes by itself."""
        return self.groups == self.inputs == self.outputs > 1

    @property
    def axis(self) -> int:
        """Where the units run in the layer's input and output, counted from the end."""
        return 1 - self.layer.weight.dim() if self.kind.groups else -1

    def blocks(self, tensor: Tensor) -> Tensor:
        """A view (groups, outputs / groups, inputs / groups, *kernel) of a tensor like W."""
        inputs, outputs = self.inputs // self.groups, self.outputs // self.groups
        if self.kind.transposed:
            return tensor.view(self.groups, inputs, outputs, *tensor.shape[2:]).transpose(1, 2)
        return tensor.view(self.groups, outputs, inputs, *tensor.shape[2:])

    def zero(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Zero what reads these inputs and what feeds these outputs, in place."""
        blocks = self.blocks(self.weight)
        for units, count, axis in ((inputs, self.inputs, 2), (outputs, self.outputs, 1)):
            if units:
                kept = blocks.new_ones(count)
                kept[list(units)] = 0
                shape = [self.groups, *(1 for _ in blocks.shape[1:])]
                shape[axis] = count // self.groups
                blocks.mul_(kept.view(shape))
        if outputs and self.bias is not None:
            self.bias[list(outputs)] = 0

    def unread(self) -> list[bool]:
        """For every input unit, whether no weight reads it."""
        seen = self.blocks(self.weight).ne(0)
        return [not s for s in seen.transpose(1, 2).flatten(2).any(2).flatten().tolist()]

    def cut(self, tensor: Tensor, inputs: Sequence[int], outputs: Sequence[int]) -> Tensor:
        """The part of a tensor like W that belongs to the kept inputs and outputs."""
        kept_in = _by_block(inputs, self.inputs, self.groups)
        kept_out = _by_block(outputs, self.outputs, self.groups)
        whole = self.blocks(tensor)
        kept = enumerate(zip(kept_in, kept_out, strict=True))
        parts = [whole[g][o][:, i] for g, (i, o) in kept if i or o]
        if len({p.shape for p in parts}) != 1:
            raise VardropError(
                f"Expected every group of {self.layer} to keep as many inputs and outputs, "
                f"but got {[tuple(p.shape[:2]) for p in parts]}."
            )
        if self.kind.transposed:
            parts = [p.transpose(0, 1) for p in parts]
        return torch.cat(parts).contiguous()

    def resize(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Cut the layer down to the kept inputs and outputs, in place."""
        size_in, size_out = self.inputs // self.groups, self.outputs // self.groups
        left = {i // size_in for i in inputs} | {o // size_out for o in outputs}
        _replace(self.layer, "weight", self.cut(self.weight, inputs, outputs))
        if self.bias is not None:
            _replace(self.layer, "bias", self.bias[list(outputs)].clone())
        self.set_sizes([len(inputs), len(outputs), len(left)])

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """Set the attributes, and leave the tensors."""
        for name, size in zip(self.kind.sizes, sizes, strict=False):
            setattr(self.layer, name, size)

    def shapes(self, bias: bool) -> dict[str, tuple[int, ...] | None]:
        """The shapes of its tensors by its sizes."""
        pair = (self.inputs, self.outputs) if self.kind.transposed else (self.outputs, self.inputs)
        kernel = self.layer.kernel_size if self.kind.groups else ()
        weight = (pair[0], pair[1] // self.groups, *kernel)
        return {"weight": weight, "bias": (self.outputs,) if bias else None}


class Units:
    """A view of a module that treats every unit by itself."""

    def __init__(self, layer: Any, kind: UnitKind) -> None:
        self.layer, self.kind = layer, kind

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.kind.tensors:
            if (tensor := getattr(self.layer, name)) is not None:
                yield name, tensor.detach()

    @property
    def outputs(self) -> int:
        """How many units it tells apart; one where they all have the same tensor."""
        sizes = [t.shape[self.kind.axis] for _, t in self._tensors()]
        return max(sizes) if sizes else getattr(self.layer, self.kind.sizes[-1])

    @property
    def axis(self) -> int:
        """Where the units run in what it is given or gives, counted from the start or the end."""
        return -1 if self.kind.emits else getattr(self.layer, "axis", 1)

    def zero(self, units: Sequence[int]) -> None:
        """Zero what it has for these units, in place."""
        for _, tensor in self._tensors():
            tensor.index_fill_(self.kind.axis, torch.tensor(units, device=tensor.device), 0.0)

    def cut(self, tensor: Tensor, keep: Sequence[int]) -> Tensor:
        """The part of one of its tensors, or of one like it, that belongs to the kept units."""
        index = torch.tensor(list(keep), device=tensor.device)
        return tensor.index_select(self.kind.axis, index)

    def resize(self, keep: Sequence[int]) -> None:
        """Cut it down to the kept units, in place."""
        if self.outputs == 1:
            return
        for name, tensor in self._tensors():
            _replace(self.layer, name, self.cut(tensor, keep))
        if self.kind.sizes:
            setattr(self.layer, self.kind.sizes[-1], len(keep))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors by its sizes."""
        shape = tuple(getattr(self.layer, name) for name in self.kind.sizes)
        return {name: shape for name, _ in self._tensors()}


def _by_block(keep: Sequence[int], count: int, groups: int) -> list[list[int]]:
    size = count // groups
    found: list[list[int]] = [[] for _ in range(groups)]
    for unit in keep:
        found[unit // size].append(unit % size)
    return found


def _full_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def kind_of(module: nn.Module) -> AffineKind | UnitKind | None:
    """The kind of a module by its exact type; None where the table has none."""
    return _affine_kind(module) or _UNITS.get(type(module))


def _affine_kind(module: nn.Module) -> AffineKind | None:
    return _AFFINE.get(type(module)) or _ELSEWHERE.get(_full_name(module))


def is_known(module: nn.Module) -> bool:
    """Whether a module is of a kind that the table has, by its exact type."""
    return kind_of(module) is not None


def settle_sizes(net: nn.Module) -> None:
    """Set the sizes that modules keep beside their layers to those of the layers."""
    for module in net.modules():
        for name, size in _DERIVED.get(_full_name(module), {}).items():
            setattr(module, name, size(module))


def affine(module: nn.Module) -> Affine | None:
    """The view of an affine layer; None for others, subclasses with their own behaviour too."""
    kind = _affine_kind(module)
    return None if kind is None else Affine(module, kind)


def units(module: nn.Module) -> Units | None:
    """The view of a module that treats every unit by itself; None for others."""
    kind = _UNITS.get(type(module))
    return None if kind is None else Units(module, kind)


def affine_layers(net: nn.Module) -> dict[str, Affine]:
    """The plain affine layers of a net by name."""
    return {name: view for name, m in net.named_modules() if (view := affine(m)) is not None}


def unit_modules(net: nn.Module) -> dict[str, Units]:
    """The modules of a net that treat every unit by themselves, by name."""
    return {name: view for name, m in net.named_modules() if (view := units(m)) is not None}


def selected(module: nn.Module) -> tuple[Select, nn.Module] | None:
    """A `Select` and the layer that it feeds, where a module is made of the two."""
    if type(module) is nn.Sequential and len(module) == 2 and type(module[0]) is Select:
        return module[0], module[1]
    return None


def looked_up(module: nn.Module) -> Lookup | None:
    """The `Lookup` before an embedding, where a module is made of the two."""
    if type(module) is nn.Sequential and len(module) == 2 and type(module[0]) is Lookup:
        return module[0]
    return None


def inside(name: str, tensor: str) -> str:
    """The name of a tensor of a module in the state of its net."""
    return f"{name}.{tensor}" if name else tensor


def replaced(net: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The net with one module put in place of another."""
    if not name:
        return module
    net.set_submodule(name, module)
    return net
