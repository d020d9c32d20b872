"""The plan of a shrunken net: the sizes of its layers as JSON, and the way back.

A plan holds numbers and names only. `rebuild` gives a copy of the user's own net those sizes, so
that loading needs no code from a file.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.checks import check_type
from vardrop.compression.layout import AFFINE, CARRIERS, affine_layers, units
from vardrop.compression.parts import Scale, Select, is_selecting, replaced
from vardrop.compression.sparse import SparseLinear
from vardrop.errors import VardropError
from vardrop.layers import NOISY_TYPES

PACKED = b"VDP\x01"  # the first bytes of a packed file, with the version of its format
_SIZES: dict[type[nn.Module], tuple[str, ...]] = {
    **dict.fromkeys(AFFINE, ("in_channels", "out_channels", "groups")),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), ("num_features",)),
    nn.Linear: ("in_features", "out_features"),
    nn.PReLU: ("num_parameters",),
    nn.Embedding: ("num_embeddings", "embedding_dim"),
}


def describe(net: nn.Module) -> dict[str, Any]:
    """The plan of a plain net."""
    sizes, select, scale = {}, {}, {}
    for name, module in net.named_modules():
        if type(module) in _SIZES:
            sizes[name] = [getattr(module, key) for key in _SIZES[type(module)]]
            if hasattr(module, "bias") and type(module) in AFFINE:
                sizes[name].append(int(module.bias is not None))
        elif is_selecting(module):
            first: Any = module.get_submodule("0")
            select[name] = [len(first.index), first.axis]
        elif type(module) is Scale:
            scale[name] = [len(module.factor), module.axis]
    identity = [name for name, m in net.named_modules() if type(m) is nn.Identity]
    return {"sizes": sizes, "select": select, "scale": scale, "identity": identity}


def densify(net: nn.Module) -> tuple[nn.Module, list[str]]:
    """The net with its CSR layers dense again (a copy, if there are any), and their names."""
    names = [name for name, m in net.named_modules() if isinstance(m, SparseLinear)]
    if names:
        net = copy.deepcopy(net)
        for name in names:
            dense = net.get_submodule(name).dense()  # type: ignore[operator]
            net = replaced(net, name, dense)
    return net, names


@contextmanager
def refusing(path: str) -> Iterator[None]:
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


def as_path(path: Any) -> Path:
    """The path of a file; an error names what is none."""
    check_type("path", path, (str, os.PathLike), "a path")
    return Path(path)


def check_file(path: Path) -> None:
    """Refuse a path where there is no file."""
    if not path.is_file():
        raise VardropError(f"Expected the file {path}, but it is not there.")


def start_of(path: Path) -> bytes:
    """The first bytes of a file, as many as tell a packed one."""
    with open(path, "rb") as file:
        return file.read(len(PACKED))


def rebuild(into: nn.Module, plan: dict[str, Any]) -> nn.Module:
    """A copy of `into` with the sizes of a plan; its tensors still have to be loaded.

    Nothing gets larger than it is in `into`, so a forged plan cannot ask for memory.
    """
    net = copy.deepcopy(into).eval()
    widest = max((n for m in affine_layers(net).values() for n in units(m)), default=0)
    for name, (count, axis) in plan["select"].items():
        inner = _find(net, name)
        if is_selecting(inner):  # `into` is the small net itself; one shrunk twice has two of them
            most, inner = len(inner[0].index), inner[1]
        else:
            most = units(inner)[0] if type(inner) in AFFINE else 0
        index = torch.zeros(_count(name, count, most), dtype=torch.long)
        net = replaced(net, name, nn.Sequential(Select(index, int(axis)), inner).eval())
    for name, (count, axis) in plan["scale"].items():
        most = getattr(_find(net, name), "units", widest)
        factor = torch.zeros(_count(name, count, most))
        net = replaced(net, name, Scale(factor, int(axis)))
    for name in plan["identity"]:
        _find(net, name)
        net = replaced(net, name, nn.Identity())
    for name, sizes in plan["sizes"].items():
        module = _find(net, name)
        if type(module) not in _SIZES:
            raise VardropError(
                f"Expected '{name}' of `into` to be a plain torch layer, but got "
                f"{type(module).__name__}. Give a net of the class that was saved."
            )
        _resize(name, module, list(sizes))
    return net


def _find(net: nn.Module, name: str) -> Any:
    try:
        return net.get_submodule(name)
    except AttributeError as missing:
        raise VardropError(
            f"Expected `into` to have the module '{name}', but it has not. "
            "Give a net of the class that was saved."
        ) from missing


def _count(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise VardropError(
            f"Expected a size of '{name}' to be an integer from 1 to {most}, but got {value!r}. "
            "The file does not belong to this net."
        )
    return value


def _resize(name: str, module: Any, sizes: list[Any]) -> None:
    """Set the sizes of a layer, never larger than before, and give it tensors of the shapes."""
    keys = _SIZES[type(module)]
    for key, value in zip(keys, sizes, strict=False):
        setattr(module, key, _count(name, value, getattr(module, key)))
    for key, shape in _shapes(module, bool(sizes[len(keys) :] == [1])).items():
        old = getattr(module, key)
        if shape is None:
            setattr(module, key, None)
        elif old is None or tuple(old.shape) != shape:
            like = module.weight if old is None else old
            if old is not None and math.prod(shape) > old.numel():
                raise VardropError(
                    f"Expected '{name}.{key}' to have at most {old.numel()} entries, but got "
                    f"{math.prod(shape)}. The file does not belong to this net."
                )
            new = torch.empty(shape, dtype=like.dtype, device=like.device)
            setattr(module, key, new if key.startswith("running") else nn.Parameter(new))


def _shapes(module: Any, bias: bool) -> dict[str, tuple[int, ...] | None]:
    if isinstance(module, nn.Embedding):
        return {"weight": (module.num_embeddings, module.embedding_dim)}
    if type(module) in CARRIERS:
        size = (module.num_parameters,) if isinstance(module, nn.PReLU) else (module.num_features,)
        return {k: size for k in CARRIERS[type(module)] if getattr(module, k) is not None}
    if isinstance(module, nn.Linear):
        outputs, weight = module.out_features, (module.out_features, module.in_features)
    else:
        outputs, inputs = module.out_channels, module.in_channels
        pair = (inputs, outputs) if module.transposed else (outputs, inputs)
        weight = (pair[0], pair[1] // module.groups, *module.kernel_size)
    return {"weight": weight, "bias": (outputs,) if bias else None}


def load_tensors(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load all tensors of a file into a rebuilt net, none missing and none left over."""
    try:
        net.load_state_dict(tensors)
    except RuntimeError as mismatch:
        raise VardropError(
            f"Expected the tensors of the file to fit `into`, but got: {mismatch}"
            f"{_hint(net, tensors)}"
        ) from mismatch


def _hint(net: nn.Module, tensors: dict[str, Tensor]) -> str:
    """What to do where the file is that of a noisy net and `into` is plain."""
    more = sorted(set(tensors) - set(net.state_dict()))
    layers = {name for name, m in net.named_modules() if type(m) in NOISY_TYPES}
    noise = [key for key in more if key.rpartition(".")[0].removesuffix(".gate") in layers]
    if not noise:
        return ""
    return (
        f" The file holds a noisy net (it has {noise[0]!r}): call vardrop.convert(into, recipe) "
        "with the recipe it was trained with before loading."
    )
