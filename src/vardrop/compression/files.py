"""Save and load a shrunken net: safetensors for the tensors, JSON for the sizes, no pickle."""

from __future__ import annotations

import hashlib
import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.compression.extras import require
from vardrop.compression.parts import replaced
from vardrop.compression.rebuild import (
    densify,
    describe,
    load_tensors,
    rebuild,
    refusing,
)
from vardrop.compression.sparse import SparseLinear
from vardrop.errors import VardropError

_FORMAT = "1"


def state(net: nn.Module) -> dict[str, Tensor]:
    """The tensors of a net, each with memory of its own."""
    return {k: v.detach().cpu().contiguous().clone() for k, v in net.state_dict().items()}


def _digest(plan: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(plan.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save(net: nn.Module, path: str | PathLike[str]) -> int:
    """Write a plain net as safetensors, with the sizes of its layers in the metadata.

    Args:
        net: a plain net, such as the result of `shrink` or `sparsify`.
        path: the file; by custom it ends in .safetensors.

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
    formats = require("safetensors.torch", "safetensors")
    dense, sparse = densify(net)
    tensors = state(dense)
    plan = json.dumps({**describe(dense), "sparse": sparse})
    metadata = {"vardrop": _FORMAT, "plan": plan, "sha256": _digest(plan, tensors)}
    raw = formats.save(tensors, metadata)
    Path(path).write_bytes(raw)
    return len(raw)


def load(path: str | PathLike[str], into: nn.Module) -> nn.Module:
    """Read a net that `save` wrote, given a net of the user's own class.

    Args:
        path: the file.
        into: a plain net of the class that was shrunken, at its full size; left as it is.

    Returns:
        A copy of `into` with the saved sizes and tensors, in evaluation mode. A file that is
        damaged, foreign or of another version is an error.
    """
    plan, tensors = _read(Path(path))
    with refusing(str(path)):
        net = rebuild(into, plan)
        load_tensors(net, tensors)
        for name in plan["sparse"]:
            layer: Any = net.get_submodule(name)
            net = replaced(net, name, SparseLinear(layer))
    return net.eval()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    library = require("safetensors", "safetensors")
    require("safetensors.torch", "safetensors")
    if not path.is_file():
        raise VardropError(f"Expected the file {path}, but it is not there.")
    try:
        with library.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as broken:
        raise VardropError(
            f"Expected {path} to be a safetensors file, but got: {broken}. "
            "It is damaged or foreign."
        ) from broken
    if metadata.get("vardrop") != _FORMAT or "plan" not in metadata:
        raise VardropError(
            f"Expected {path} to be written by vardrop.save in format {_FORMAT}, but got "
            f"{metadata.get('vardrop', 'no such mark')!r}."
        )
    if _digest(metadata["plan"], tensors) != metadata.get("sha256"):
        raise VardropError(
            f"Expected the checksum of {path} to match, but got another. The file is damaged."
        )
    with refusing(str(path)):
        return json.loads(metadata["plan"]), tensors
