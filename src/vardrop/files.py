"""Files that are whole or absent: written aside and renamed, tensors with a checksum, no pickle."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
        with suppress(OSError):  # where the directory is read-only there is nothing to remove
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


def digest(text: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of a text and of named tensors: their names, types, shapes and bytes."""
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def tensor_bytes(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """A safetensors file, the same bytes for the same content.

    safetensors writes the metadata in another order at every call, so the header is written again.
    """
    from safetensors.torch import save

    # A copy of each: safetensors refuses tensors that share memory, as tied weights do.
    raw = save({k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}, metadata)
    start = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:start])
    del entries["__metadata__"]
    header = {"__metadata__": dict(sorted(metadata.items())), **dict(sorted(entries.items()))}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + raw[start:]


def write_tensors(path: Path, tensors: dict[str, Tensor], values: Any = None) -> None:
    """Write tensors, and plain values in the metadata of the same file, atomically."""
    text = json.dumps(values)
    content = tensor_bytes(tensors, {"values": text, "sha256": digest(text, tensors)})
    write_atomically(path, content)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read the tensors and the values that `write_tensors` wrote; a damaged file is an error.

    A file of version 0.1, which has no checksum, is read with a warning.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise VardropError(f"Expected the file {path}, but it is not there. Train first.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata.get("values", "null")
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            values = json.loads(text)
    except (SafetensorError, OSError, ValueError, RecursionError) as broken:
        raise VardropError(
            f"Expected {path} to be a safetensors file, but got: {broken}. It is damaged."
        ) from broken
    if set(metadata) <= {"values"}:
        warnings.warn(
            f"{path} has no checksum: it was written by version 0.1, and damage cannot be seen.",
            stacklevel=2,
        )
    elif metadata.get("sha256") != digest(text, tensors):
        raise VardropError(
            f"Expected the checksum of {path} to match, but got another. The file is damaged."
        )
    return tensors, values
