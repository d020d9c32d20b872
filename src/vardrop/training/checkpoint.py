"""Files that are whole or absent: safetensors and JSON, written aside and renamed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardrop.errors import VardropError


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash at any moment, sees the old or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as failure:
        aside.unlink(missing_ok=True)
        raise _unwritten(path, len(data), failure) from failure


def append(path: Path, data: bytes) -> None:
    """Write at the end of a file; a crash may leave a part of it."""
    try:
        with open(path, "ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as failure:
        raise _unwritten(path, len(data), failure) from failure


def _unwritten(path: Path, size: int, failure: OSError) -> VardropError:
    return VardropError(
        f"Expected to write {size} bytes to {path}, but got: {failure.strerror}. "
        "Whatever the file held before is still there."
    )


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file; an error names it where it is absent or damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise VardropError(
            f"Expected the file {path}, but it is not there. Is this the directory of a run?"
        ) from None
    except (OSError, ValueError) as broken:
        raise VardropError(f"Expected {path} to hold JSON, but got: {broken}.") from broken


def write_tensors(path: Path, tensors: dict[str, Tensor], values: Any = None) -> None:
    """Write tensors, and plain values in the metadata of the same file, atomically."""
    from safetensors.torch import save

    # A copy of each: safetensors refuses tensors that share memory, as tied weights do.
    own = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    write_atomically(path, save(own, {"values": json.dumps(values)}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read the tensors and the values that `write_tensors` wrote."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise VardropError(f"Expected the file {path}, but it is not there. Train first.")
    try:
        with safe_open(path, framework="pt") as file:
            values = json.loads((file.metadata() or {}).get("values", "null"))
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, values
    except (SafetensorError, OSError, ValueError) as broken:
        raise VardropError(
            f"Expected {path} to be a safetensors file, but got: {broken}. It is damaged."
        ) from broken


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with `prefix.` before their names."""
    return {f"{prefix}.{name}": t for name, t in tensors.items()}


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix.`, without it."""
    start = f"{prefix}."
    return {name[len(start) :]: t for name, t in tensors.items() if name.startswith(start)}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimizer that is made of tensors, as torch's own optimizers' is."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": value
        for index, parts in state.items()
        for name, value in parts.items()
        if isinstance(value, Tensor)
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give an optimizer the tensors of `optimizer_tensors`; its groups stay as they are."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def load_module(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Give a module its tensors; an error names the file where they do not fit."""
    try:
        module.load_state_dict(tensors)
    except RuntimeError as misfit:
        first = " ".join(str(misfit).split())[:300]
        raise VardropError(
            f"Expected {path} to fit the net, but got: {first}. Give the net that was trained."
        ) from misfit
