"""One table of layer kinds: where the units of a layer are, and how some of them are taken out.

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
from vardrop.compression.modules.select import Scale


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


_DENSE = AffineKind("in_features", "out_features", groups=None)
_CONV, _TRANSPOSED = AffineKind(), AffineKind(transposed=True)
_NORM = UnitKind(("num_features",), ("weight", "bias", "running_mean", "running_var"))
# By type, or by the full name of a class of a package that need not be installed.
_KINDS: dict[type[nn.Module] | str, AffineKind | UnitKind] = {
    nn.Linear: _DENSE,
    Recurring: _DENSE,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONV),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _TRANSPOSED),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _NORM),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _NORM),
    nn.Embedding: UnitKind(("num_embeddings", "embedding_dim"), ("weight",), axis=1, emits=True),
    nn.PReLU: UnitKind(("num_parameters",), ("weight",)),
    Scale: UnitKind((), ("factor",)),
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


def replace_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put another tensor in place of a parameter or a buffer."""
    old = getattr(module, name)
    buffer = name in dict(module.named_buffers(recurse=False))
    trained = old is None or old.requires_grad
    setattr(module, name, tensor if buffer else nn.Parameter(tensor, trained))


class Affine:
    """A view of an affine layer, by the units that it reads and those that it feeds.

    `inputs` and `outputs` count them, `groups` the blocks of inputs that do not see each other's
    outputs; `axis` is where units run in the layer's input and output, counted from the end.
    """

    def __init__(self, layer: Any, kind: AffineKind) -> None:
        self.layer, self.kind = layer, kind
        self.inputs: int = getattr(layer, kind.inputs)
        self.outputs: int = getattr(layer, kind.outputs)
        self.groups: int = getattr(layer, kind.groups) if kind.groups else 1
        self.axis = 1 - layer.weight.dim() if kind.groups else -1
        self.is_depthwise = self.groups == self.inputs == self.outputs > 1

    @property
    def weight(self) -> Tensor:
        """The weight of the layer, without its graph."""
        return self.layer.weight.detach()

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer, without its graph."""
        return None if self.layer.bias is None else self.layer.bias.detach()

    def blocks(self, tensor: Tensor) -> Tensor:
        """A view (groups, outputs / groups, inputs / groups, *kernel) of a tensor like W."""
        inputs, outputs = self.inputs // self.groups, self.outputs // self.groups
        if self.kind.transposed:
            return tensor.view(self.groups, inputs, outputs, *tensor.shape[2:]).transpose(1, 2)
        return tensor.view(self.groups, outputs, inputs, *tensor.shape[2:])

    def scale_inputs(self, factors: Tensor) -> None:
        """Multiply what reads each input by a number, in place."""
        blocks = self.blocks(self.weight)
        blocks.mul_(factors.view(self.groups, 1, -1, *(1 for _ in blocks.shape[3:])))

    def zero(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Zero what reads these inputs and what feeds these outputs, in place."""
        if inputs:
            index = torch.tensor(inputs, device=self.weight.device)
            self.scale_inputs(self.weight.new_ones(self.inputs).index_fill(0, index, 0))
        if outputs:
            index = torch.tensor(outputs, device=self.weight.device)
            kept = self.weight.new_ones(self.outputs).index_fill(0, index, 0)
            blocks = self.blocks(self.weight)
            blocks.mul_(kept.view(self.groups, -1, *(1 for _ in blocks.shape[2:])))
            if self.bias is not None:
                self.bias[outputs] = 0

    def unread(self) -> list[bool]:
        """For every input unit, whether no weight reads it."""
        seen = self.blocks(self.weight).ne(0)
        return [not s for s in seen.transpose(1, 2).flatten(2).any(2).flatten().tolist()]

    def resize(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Cut the layer down to the kept inputs and outputs, in place."""
        kept_in = _by_block(inputs, self.inputs, self.groups)
        kept_out = _by_block(outputs, self.outputs, self.groups)
        whole, kept = self.blocks(self.weight), enumerate(zip(kept_in, kept_out, strict=True))
        parts = [whole[g][o][:, i] for g, (i, o) in kept if i or o]
        if len({p.shape for p in parts}) != 1:
            raise VardropError(
                f"Expected every group of {self.layer} to keep as many inputs and outputs, "
                f"but got {[tuple(p.shape[:2]) for p in parts]}."
            )
        rows = [p.transpose(0, 1) if self.kind.transposed else p for p in parts]
        replace_tensor(self.layer, "weight", torch.cat(rows).contiguous())
        if self.bias is not None:
            replace_tensor(self.layer, "bias", self.bias[list(outputs)].clone())
        sizes = len(inputs), len(outputs), len(parts)
        for name, size in zip(self.kind.sizes, sizes, strict=False):
            setattr(self.layer, name, size)

    def shapes(self, bias: bool) -> dict[str, tuple[int, ...] | None]:
        """The shapes of its tensors by its sizes."""
        pair = (self.inputs, self.outputs) if self.kind.transposed else (self.outputs, self.inputs)
        kernel = self.layer.kernel_size if self.kind.groups else ()
        weight = (pair[0], pair[1] // self.groups, *kernel)
        return {"weight": weight, "bias": (self.outputs,) if bias else None}


class Units:
    """A view of a module that treats every unit by itself.

    `outputs` counts the units that it tells apart: one where they all have the same tensor. `axis`
    is where they run in what it is given or gives, counted from the start or the end.
    """

    def __init__(self, layer: Any, kind: UnitKind) -> None:
        self.layer, self.kind = layer, kind
        sizes = [t.shape[kind.axis] for _, t in self.tensors()]
        self.outputs: int = max(sizes) if sizes else getattr(layer, kind.sizes[-1])
        self.axis: int = -1 if kind.emits else getattr(layer, "axis", 1)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Its tensors with one entry per unit."""
        for name in self.kind.tensors:
            if (tensor := getattr(self.layer, name)) is not None:
                yield name, tensor.detach()

    def zero(self, units: Sequence[int]) -> None:
        """Zero what it has for these units, in place."""
        for _, tensor in self.tensors():
            tensor.index_fill_(self.kind.axis, torch.tensor(units, device=tensor.device), 0.0)

    def resize(self, keep: Sequence[int]) -> None:
        """Cut it down to the kept units, in place."""
        if self.outputs == 1:
            return
        for name, tensor in self.tensors():
            index = torch.tensor(list(keep), device=tensor.device)
            replace_tensor(self.layer, name, tensor.index_select(self.kind.axis, index))
        if self.kind.sizes:
            setattr(self.layer, self.kind.sizes[-1], len(keep))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors by its sizes."""
        shape = tuple(getattr(self.layer, name) for name in self.kind.sizes)
        return {name: shape for name, _ in self.tensors()}


def _by_block(keep: Sequence[int], count: int, groups: int) -> list[list[int]]:
    blocks: list[list[int]] = [[] for _ in range(groups)]
    for unit in keep:
        blocks[unit * groups // count].append(unit % (count // groups))
    return blocks


def _full_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def kind_of(module: nn.Module) -> AffineKind | UnitKind | None:
    """The kind of a module by its exact type; None where the table has none."""
    return _KINDS.get(type(module)) or _KINDS.get(_full_name(module))


def settle_sizes(net: nn.Module) -> None:
    """Set the sizes that modules keep beside their layers to those of the layers."""
    for module in net.modules():
        for name, size in _DERIVED.get(_full_name(module), {}).items():
            setattr(module, name, size(module))


def affine(module: nn.Module) -> Affine | None:
    """The view of an affine layer; None for others, subclasses with their own behaviour too."""
    return Affine(module, kind) if isinstance(kind := kind_of(module), AffineKind) else None


def affine_layers(net: nn.Module) -> dict[str, Affine]:
    """The plain affine layers of a net by name."""
    return {name: view for name, m in net.named_modules() if (view := affine(m)) is not None}


def unit_modules(net: nn.Module) -> dict[str, Units]:
    """The modules of a net that treat every unit by themselves, by name."""
    named = ((name, m, kind_of(m)) for name, m in net.named_modules())
    return {name: Units(m, kind) for name, m, kind in named if isinstance(kind, UnitKind)}


def join_name(name: str, tensor: str) -> str:
    """The name of a tensor or a part of a module in its net."""
    return f"{name}.{tensor}" if name else tensor


def replace_module(net: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The net with one module put in place of another."""
    if not name:
        return module
    net.set_submodule(name, module)
    return net
