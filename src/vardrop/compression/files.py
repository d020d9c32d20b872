"""Save and load a shrunken net: safetensors for the tensors, JSON for the sizes, no pickle."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vardrop.checks import check_net
from vardrop.compression.extras import require
from vardrop.compression.parts import replaced
from vardrop.compression.rebuild import (
    PACKED,
    as_path,
    check_file,
    densify,
    describe,
    load_tensors,
    rebuild,
    refusing,
    start_of,
)
from vardrop.compression.sparse import SparseLinear
from vardrop.errors import VardropError
from vardrop.files import digest, tensor_bytes, write_atomically

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
    require("safetensors.torch", "safetensors")
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
        damaged, foreign or of another version is an error.
    """
    check_net(into, "into")
    plan, tensors = _read(as_path(path))
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
    check_file(path)
    if start_of(path) == PACKED:
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
            "It is damaged or foreign."
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
    with refusing(str(path)):
        return json.loads(metadata["plan"]), tensors
