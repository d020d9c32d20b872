"""A small net as a file: safetensors and JSON without pickle.

The description of a saved net holds numbers and names only. `rebuild` gives a copy of the user's
own net those sizes, so that loading needs no code from a file.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.checks import check_net, check_type
from vardrop._core.encoder import (
    disable_encoder_fastpath,
    is_encoder_fastpath_disabled,
    update_encoder_fastpath,
)
from vardrop._core.errors import VardropError, needed
from vardrop._core.files import digest, tensor_bytes, write_atomically
from vardrop.compression.layer_views import (
    Affine,
    UnitKind,
    Units,
    affine,
    affine_layers,
    kind_of,
    replace_module,
    replace_tensor,
    settle_sizes,
)
from vardrop.compression.modules.attention import SlimAttention
from vardrop.compression.modules.recurrent import resized
from vardrop.compression.modules.select import Lookup, Scale, Select, selecting
from vardrop.compression.sparse import SparseLinear
from vardrop.layers import NOISY_TYPES
from vardrop.noisy import Noisy, named_modules_of

PACKED = b"VDP"  # the first bytes of a packed file; the version of its format comes next
_FORMAT = "1"


def save(net: nn.Module, path: str | PathLike[str]) -> int:
    """Write a plain net as safetensors, with the sizes of its layers in the metadata.

    Weights are written as they are, whatever they hold. The file is there whole or not at all, and
    equal nets give equal bytes.

    Args:
        net: a plain net, such as the result of `shrink` or `sparsify`.
        path: the file; conventionally it ends in .safetensors.

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
    needed("safetensors.torch", "compress")
    check_net(net)
    target = as_path(path)
    dense, sparse = densify(net)
    tensors = dense.state_dict()
    plan = json.dumps({**describe(dense), "sparse": sparse})
    metadata = {"vardrop": _FORMAT, "plan": plan, "sha256": digest(plan, tensors)}
    raw = tensor_bytes(tensors, metadata)
    write_atomically(target, raw)
    return len(raw)


def load(path: str | PathLike[str], into: nn.Module) -> nn.Module:
    """Read a net that `save` wrote, given a net of the user's own class.

    Args:
        path: the file.
        into: a plain net of the class that was shrunken, at its full size; left as it is.

    Returns:
        A copy of `into` with the saved sizes and tensors, in evaluation mode. A file that is
        damaged, from elsewhere or of another version is an error.
    """
    check_net(into, "into")
    plan, tensors = _read(as_path(path))
    with malformed_file(str(path)):
        net = rebuild(into, plan)
        load_tensors(net, tensors)
        for name in plan["sparse"]:
            layer: Any = net.get_submodule(name)
            net = replace_module(net, name, SparseLinear(layer))
    return net.eval()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    library = needed("safetensors", "compress")
    needed("safetensors.torch", "compress")
    check_file(path)
    with open(path, "rb") as file:
        packed = file.read(len(PACKED)) == PACKED
    if packed:
        raise VardropError(
            f"Expected {path} to be written by vardrop.save, but it was packed. "
            "Read it with vardrop.unpack(path, into=net)."
        )
    try:
        with library.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as broken:
        raise VardropError(
            f"Expected {path} to be a safetensors file, but got: {broken}. "
            "It is damaged, or it comes from elsewhere."
        ) from broken
    if metadata.get("vardrop") != _FORMAT or "plan" not in metadata:
        raise VardropError(
            f"Expected {path} to be written by vardrop.save in format {_FORMAT}, but got "
            f"{metadata.get('vardrop', 'no such mark')!r}."
        )
    if digest(metadata["plan"], tensors) != metadata.get("sha256"):
        raise VardropError(
            f"Expected the checksum of {path} to match, but got another. The file is damaged."
        )
    with malformed_file(str(path)):
        return json.loads(metadata["plan"]), tensors


def as_path(path: Any) -> Path:
    """The path of a file; an error names what is none."""
    check_type("path", path, (str, os.PathLike), "a path")
    return Path(path)


def check_file(path: Path) -> None:
    """Refuse a path where there is no file."""
    if not path.is_file():
        raise VardropError(f"Expected the file {path}, but it is not there.")


@contextmanager
def malformed_file(path: str) -> Iterator[None]:
    """Turn what a forged description stumbles over into the library's error."""
    try:
        yield
    except VardropError:
        raise
    except Exception as failure:
        raise VardropError(
            f"Expected the description in {path} to be sound, but got: {failure!r}. "
            "The file was not written by vardrop."
        ) from failure


def densify(net: nn.Module) -> tuple[nn.Module, list[str]]:
    """The net with its CSR layers dense again (a copy, if there are any), and their names."""
    names = list(named_modules_of(net, SparseLinear))
    if names:
        net = copy.deepcopy(net)
        for name, sparse in named_modules_of(net, SparseLinear).items():
            net = replace_module(net, name, sparse.dense())
    return net, names


def describe(net: nn.Module) -> dict[str, Any]:
    """The sizes of a plain net, and the modules that are none of its class."""
    sizes: dict[str, list[int]] = {}
    select, lookup, identity = {}, {}, []
    for name, module in net.named_modules():
        kind = kind_of(module)
        if kind is not None and kind.sizes:
            sizes[name] = [getattr(module, key) for key in kind.sizes]
            if (view := affine(module)) is not None:
                sizes[name].append(int(view.bias is not None))
        elif (pair := selecting(module, Select)) is not None:
            select[name] = [len(pair[0].index), pair[0].axis]
        elif (pair := selecting(module, Lookup)) is not None:
            lookup[name] = len(pair[0].index)
        elif type(module) is nn.Identity:
            identity.append(name)
    scale = {n: [len(m.factor), m.axis] for n, m in named_modules_of(net, Scale).items()}
    recurrent = {
        name: [m.input_size, m.hidden_size, m.proj_size, int(m.bias)]
        for name, m in named_modules_of(net, nn.RNNBase).items()
    }
    where_any = {
        "lookup": lookup,
        "attention": list(named_modules_of(net, SlimAttention)),
        "unfused": [name for name, m in net.named_modules() if is_encoder_fastpath_disabled(m)],
        "recurrent": recurrent,
    }
    plan = {"sizes": sizes, "select": select, "scale": scale, "identity": identity}
    return plan | {key: names for key, names in where_any.items() if names}


def rebuild(into: nn.Module, plan: dict[str, Any]) -> nn.Module:
    """A copy of `into` with the sizes of a description; its tensors still have to be loaded.

    Nothing gets larger than it is in `into`, so a forged file cannot ask for memory.
    """
    net = copy.deepcopy(into).eval()
    widest = max((max(v.inputs, v.outputs) for v in affine_layers(net).values()), default=0)
    dtype = next((p.dtype for p in net.parameters()), None)
    for name, count in plan.get("lookup", {}).items():
        net = replace_module(net, name, _with_lookup(name, _find(net, name), count))
    for name in plan.get("attention", []):
        attention = _find(net, name)
        if type(attention) is not SlimAttention:
            _check_kind(name, attention, nn.MultiheadAttention)
            net = replace_module(net, name, SlimAttention(attention))
    for name, (count, axis) in plan["select"].items():
        net = replace_module(net, name, _with_select(name, _find(net, name), count, int(axis)))
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
    settle_sizes(net)
    update_encoder_fastpath(net, Noisy)
    for name in plan.get("unfused", []):
        disable_encoder_fastpath(_find(net, name))
    return net


def _check_kind(name: str, module: nn.Module, *kinds: type[nn.Module]) -> None:
    if type(module) not in kinds or getattr(module, "bias_k", None) is not None:
        words = " or ".join(f"nn.{kind.__name__}" for kind in kinds) or "a plain torch layer"
        raise VardropError(
            f"Expected '{name}' of `into` to be {words}, but got {type(module).__name__}. "
            "Give a net of the class that was saved."
        )


def _resize_recurrent(name: str, layer: Any, sizes: list[Any]) -> nn.Module:
    """A recurrent layer with these sizes, none larger than before."""
    _check_kind(name, layer, nn.RNN, nn.LSTM, nn.GRU)
    inputs, units, projected, bias = sizes
    smaller = resized(
        layer,
        input_size=_count(name, inputs, layer.input_size),
        hidden_size=_count(name, units, layer.hidden_size),
        proj_size=_count(name, projected, layer.proj_size) if layer.proj_size else 0,
        bias=bool(bias),
    )
    weight = next(layer.parameters())
    return smaller.to_empty(device=weight.device).to(weight.dtype).eval()


def _with_lookup(name: str, module: nn.Module, count: Any) -> nn.Module:
    """An embedding behind a `Lookup` of so many entries."""
    there = selecting(module, Lookup)
    inner: Any = module if there is None else there[1]
    _check_kind(name, inner, nn.Embedding)
    most = inner.num_embeddings if there is None else len(there[0].index)
    inner.padding_idx = None
    index = torch.zeros(_count(name, count, most), dtype=torch.long)
    return nn.Sequential(Lookup(index), inner).eval()


def _with_select(name: str, module: nn.Module, count: Any, axis: int) -> nn.Module:
    """A layer behind a `Select` of so many inputs; one that was shrunk twice has two of them."""
    if (pair := selecting(module, Select)) is not None:
        most, module = len(pair[0].index), pair[1]
    else:
        most = view.inputs if (view := affine(module)) else 0
    index = torch.zeros(_count(name, count, most), dtype=torch.long)
    return nn.Sequential(Select(index, axis), module).eval()


def _find(net: nn.Module, name: str) -> Any:
    try:
        return net.get_submodule(name)
    except AttributeError as missing:
        raise VardropError(
            f"Expected `into` to have the module '{name}', but it has not. "
            "Give a net of the class that was saved."
        ) from missing


def _count(name: str, value: Any, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise VardropError(
            f"Expected a size of '{name}' to be an integer from 1 to {most}, but got {value!r}. "
            "The file does not belong to this net."
        )
    return value


def _resize(name: str, module: nn.Module, sizes: list[Any]) -> None:
    """Set the sizes of a layer, never larger than before, and give it tensors of the shapes."""
    kind = kind_of(module)
    if kind is None or not kind.sizes:
        _check_kind(name, module)
        return
    for key, value in zip(kind.sizes, sizes, strict=False):
        setattr(module, key, _count(name, value, getattr(module, key)))
    shapes: Mapping[str, tuple[int, ...] | None]
    if isinstance(kind, UnitKind):
        shapes = Units(module, kind).shapes()
    else:
        shapes = Affine(module, kind).shapes(bias=sizes[len(kind.sizes) :] == [1])
    for key, shape in shapes.items():
        old = getattr(module, key)
        if shape is None:
            setattr(module, key, None)
        elif old is None or tuple(old.shape) != shape:
            if old is not None and math.prod(shape) > old.numel():
                raise VardropError(
                    f"Expected '{name}.{key}' to have at most {old.numel()} entries, but got "
                    f"{math.prod(shape)}. The file does not belong to this net."
                )
            like = next(module.parameters()) if old is None else old
            replace_tensor(module, key, like.detach().new_empty(shape))


def load_tensors(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load all tensors of a file into a rebuilt net, none missing and none left over."""
    try:
        net.load_state_dict(tensors)
    except RuntimeError as mismatch:
        layers = {name for name, m in net.named_modules() if type(m) in NOISY_TYPES}
        others = sorted(set(tensors) - set(net.state_dict()))
        noise = [key for key in others if key.rpartition(".")[0].removesuffix(".gate") in layers]
        hint = ""
        if noise:
            hint = (
                f" The file holds a noisy net (it has {noise[0]!r}): call "
                "vardrop.convert(into, recipe) with its recipe before loading, or write it with "
                "vardrop.save_noisy."
            )
        raise VardropError(
            f"Expected the tensors of the file to fit `into`, but got: {mismatch}{hint}"
        ) from mismatch
