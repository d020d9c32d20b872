"""Save a small model as safetensors and JSON, without pickle.

The description of a saved model contains only numbers and names. `resize_to` sets these sizes in a
copy of the user's model, so that loading runs no code from a file.
"""

from __future__ import annotations

import copy
import math
import os
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core import encoder
from vardrop._core.checks import check_net, check_type
from vardrop._core.errors import VardropError, report_errors
from vardrop._core.files import check_readable, read_tensors, write_tensors
from vardrop._core.integrations import load_integration
from vardrop.compression import layer_views
from vardrop.compression.layer_views import AffineView, replace_module, view_of
from vardrop.compression.modules.pruned_attention import SlimAttention
from vardrop.compression.modules.pruned_recurrent import recurrent_like
from vardrop.compression.modules.select import Scale, Select, selection_of
from vardrop.layers import NOISY_TYPES
from vardrop.likelihoods import check_model
from vardrop.noisy import Noisy, named_modules_of

PACKED = b"VDP"  # the first bytes of a packed file; the version of its format comes next
_FORMAT = "vardrop net 1"


def save(net: nn.Module, path: str | PathLike[str]) -> int:
    """Write a plain model as safetensors, with the sizes of its layers in the metadata.

    Weights are written unchanged. An existing file is replaced only by a complete one, and equal
    models give equal bytes.

    Args:
        net: a plain model, such as the result of `shrink`.
        path: the file, which ends in .safetensors by convention.

    Returns:
        The bytes on disk.

    >>> import tempfile, torch, vardrop as vd
    >>> net = torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     size = save(net, folder + "/net.safetensors")
    ...     same = load(folder + "/net.safetensors", into=torch.nn.Linear(2, 1))
    >>> bool((same.weight == net.weight).all())
    True
    """
    check_model(net)
    target = as_path(path)
    write_tensors(target, net.state_dict(), {"format": _FORMAT, **layer_sizes(net)})
    return target.stat().st_size


def load(path: str | PathLike[str], into: nn.Module) -> nn.Module:
    """Read a model that `save` wrote.

    Args:
        path: the file.
        into: a plain model of the class that was shrunk, at its full size. It is left unchanged.

    Returns:
        A copy of `into` with the saved sizes and tensors, in evaluation mode. A file that is
        corrupted, of another format or of another version raises an error.
    """
    check_net(into, "into")
    source = as_path(path)
    check_readable(source)
    with open(source, "rb") as file:
        if file.read(len(PACKED)) == PACKED:
            raise VardropError(
                f"{path} was written by vardrop.pack. Read it with vardrop.unpack(path, into=net)."
            )
    tensors, plan = read_tensors(source)
    if not isinstance(plan, dict) or plan.get("format") != _FORMAT:
        raise VardropError(
            f"Expected {path} to be written by vardrop.save, but got another file. "
            "Read files of vardrop.save_noisy with vardrop.load_noisy."
        )
    with report_malformed_file(str(path)):
        net = resize_to(into, plan)
        load_tensors(net, tensors)
    return net


def as_path(path: str | PathLike[str]) -> Path:
    """The path of a file."""
    check_type("path", path, (str, os.PathLike), "a path")
    return Path(path)


def report_malformed_file(path: str) -> AbstractContextManager[None]:
    """Report any error of a forged description as a `VardropError`."""
    return report_errors(
        lambda e: (
            f"Expected a valid description in {path}, but got: {e!r}. "
            "The file was not written by vardrop, or belongs to another model."
        )
    )


def layer_sizes(net: nn.Module) -> dict[str, Any]:
    """The sizes of a plain model, and the modules that `shrink` added."""
    always: dict[str, Any] = {"sizes": {}, "select": {}, "scale": {}, "identity": []}
    plan = always | {"attention": [], "unfused": [], "recurrent": {}, "tensors": {}}
    for name, module in net.named_modules():
        layout = layer_views.layout_of(module)
        if layout is not None and layout.sizes:
            plan["sizes"][name] = [getattr(module, key) for key in layout.sizes]
            if isinstance(layout, layer_views.AffineLayout):
                plan["sizes"][name].append(int(module.bias is not None))
        elif (select := selection_of(module)) is not None:
            plan["select"][name] = [len(select.index), select.axis]
        elif isinstance(module, Scale):
            plan["scale"][name] = [len(module.factor), module.axis]
        elif isinstance(module, nn.RNNBase):
            plan["recurrent"][name] = [module.input_size, module.hidden_size, int(module.bias)]
        elif isinstance(module, SlimAttention):
            plan["attention"].append(name)
        elif type(module) is nn.Identity:
            plan["identity"].append(name)
        if encoder.is_encoder_fastpath_disabled(module):
            plan["unfused"].append(name)
    for name, bare in layer_views.bare_units(net).items():
        (tensor,) = bare.tensors().values()
        plan["tensors"][name.rpartition(":")[0]] = list(tensor.shape)
    return {key: entries for key, entries in plan.items() if entries or key in always}


def resize_to(into: nn.Module, plan: dict[str, Any]) -> nn.Module:
    """A copy of `into` in evaluation mode with the sizes of a description, without its tensors.

    No size can exceed the size in `into`, so a forged file cannot allocate memory.
    """
    net = copy.deepcopy(into)
    for module in net.modules():
        load_integration(type(module))
    before = layer_views.affine_layers(net)
    widest = max((max(view.inputs, view.outputs) for view in before.values()), default=0)
    dtype = next((p.dtype for p in net.parameters()), None)
    for name in plan.get("attention", []):
        attention = _find(net, name)
        if type(attention) is not SlimAttention:
            _check_kind(name, attention, nn.MultiheadAttention)
            net = replace_module(net, name, SlimAttention(attention))
    for name, (count, axis) in plan["select"].items():
        net = replace_module(net, name, _prepend_select(name, _find(net, name), count, int(axis)))
    for name, (count, axis) in plan["scale"].items():
        most = getattr(_find(net, name), "units", widest)
        factor = torch.zeros(_count(name, count, most), dtype=dtype)
        net = replace_module(net, name, Scale(factor, int(axis)))
    for name in plan["identity"]:
        _find(net, name)
        net = replace_module(net, name, nn.Identity())
    for name, sizes in plan["sizes"].items():
        _resize(name, _find(net, name), list(sizes))
    for name, sizes in plan.get("recurrent", {}).items():
        net = replace_module(net, name, _resize_recurrent(name, _find(net, name), sizes))
    for layer in named_modules_of(net, SlimAttention).values():
        layer.heads = layer.heads[: layer.num_heads]
    for name, shape in plan.get("tensors", {}).items():
        owner, _, key = name.rpartition(".")
        _shorten(name, _find(net, owner), key, list(shape))
    layer_views.settle_sizes(net, before)
    encoder.update_encoder_fastpath(net, Noisy)
    for name in plan.get("unfused", []):
        encoder.disable_encoder_fastpath(_find(net, name))
    return net.eval()


def _check_kind(name: str, module: nn.Module, *kinds: type[nn.Module]) -> None:
    if type(module) not in kinds or getattr(module, "bias_k", None) is not None:
        words = " or ".join(f"nn.{kind.__name__}" for kind in kinds) or "a plain torch layer"
        raise VardropError(
            f"Expected '{name}' of `into` to be {words}, but got {type(module).__name__}. "
            "Pass a model of the class that was saved."
        )


def _resize_recurrent(name: str, layer: nn.RNNBase, sizes: list[object]) -> nn.Module:
    """A recurrent layer with these sizes, which cannot be larger than before."""
    _check_kind(name, layer, nn.RNN, nn.LSTM, nn.GRU)
    inputs, units, bias = sizes
    counts = _count(name, inputs, layer.input_size), _count(name, units, layer.hidden_size)
    smaller = recurrent_like(layer)(*counts, bias=bool(bias))
    weight = next(layer.parameters())
    return smaller.to_empty(device=weight.device).to(weight.dtype)


def _prepend_select(name: str, module: Any, count: object, axis: int) -> nn.Module:
    """A layer after a `Select` of so many inputs, fewer than before if it has one already."""
    select, most = selection_of(module), 0
    if select is not None:
        module, most = module[1], len(select.index)
    elif isinstance(view := view_of(module), AffineView):
        most = view.inputs
    return nn.Sequential(Select(torch.zeros(_count(name, count, most)).long(), axis), module)


def _find(net: nn.Module, name: str) -> Any:
    try:
        return net.get_submodule(name)
    except AttributeError as missing:
        raise VardropError(
            f"Expected `into` to have the module '{name}', but it does not. "
            "Pass a model of the class that was saved."
        ) from missing


def _count(name: str, value: object, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise VardropError(
            f"Expected a size of '{name}' to be an integer from 1 to {most}, but got {value!r}. "
            "The file belongs to another model."
        )
    return value


def _resize(name: str, module: nn.Module, sizes: list[object]) -> None:
    """Set the sizes of a layer, which cannot be larger than before, and shorten its tensors."""
    view = view_of(module)
    if view is None or not view.layout.sizes:
        _check_kind(name, module)
        return
    keys: tuple[str, ...] = view.layout.sizes
    counts = [_count(name, n, getattr(module, k)) for k, n in zip(keys, sizes, strict=False)]
    if isinstance(view, layer_views.Units):
        view.set_size(counts[-1])
        shapes: dict[str, list[object]] = {key: [*counts] for key in view.tensors()}
    else:
        inputs, outputs, *groups = counts
        first, second = (inputs, outputs) if view.layout.transposed else (outputs, inputs)
        shapes = {"weight": [first, second // math.prod(groups)], "bias": [outputs]}
        if sizes[len(keys) :] != [1]:
            view.layer.bias = None
        elif view.bias is None:
            view.layer.bias = nn.Parameter(view.weight.new_zeros(view.outputs))
    for key, count in zip(keys, counts, strict=True):
        setattr(module, key, count)
    for key, shape in shapes.items():
        _shorten(name, module, key, shape)


def _shorten(name: str, module: nn.Module, key: str, shape: list[object]) -> None:
    """Give a tensor a shape along its first axes, which cannot be larger than before."""
    tensor: Tensor | None = getattr(module, key)
    if tensor is not None and list(tensor.shape[: len(shape)]) != shape:
        sizes = [_count(name, size, most) for size, most in zip(shape, tensor.shape, strict=False)]
        sizes += tensor.shape[len(shape) :]
        layer_views.replace_tensor(module, key, tensor.detach().new_empty(sizes))


def load_tensors(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load the tensors of a file into a resized model. The names have to be the same."""
    try:
        net.load_state_dict(tensors)
    except RuntimeError as mismatch:
        layers = {name for name, m in net.named_modules() if type(m) in NOISY_TYPES}
        hints = [
            f" It contains a noisy model ({key!r}): call vardrop.convert(into, recipe) with its "
            "recipe before loading, or write it with vardrop.save_noisy."
            for key in sorted(set(tensors) - set(net.state_dict()))
            if key.rpartition(".")[0].removesuffix(".gate") in layers
        ]
        raise VardropError(
            f"Expected the tensors of the file to fit `into`, but got: {mismatch}"
            f"{''.join(hints[:1])}"
        ) from mismatch
