"""Files that are whole or absent: written aside and renamed, with a checksum, without pickle."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from vardrop._core.errors import VardropError, needed

LOCK = ".lock"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash at any moment, sees the old or the new one."""
    with writing(path, len(data)) as file:
        file.write(data)


@contextmanager
def writing(path: Path, size: int | None = None) -> Iterator[BinaryIO]:
    """A file to write piece by piece, which takes its name when the block ends without an error.

    Its size, where it is known, is for the error.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException as failure:
        with suppress(OSError):  # where the directory is read-only there is nothing to remove
            aside.unlink(missing_ok=True)
        if isinstance(failure, OSError):
            raise _unwritten(path, size, failure) from failure
        raise


def append(path: Path, data: bytes) -> None:
    """Write at the end of a file; a crash may leave a part of it."""
    try:
        with open(path, "ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as failure:
        raise _unwritten(path, len(data), failure) from failure


def _unwritten(path: Path, size: int | None, failure: OSError) -> VardropError:
    what = "" if size is None else f"{size} bytes "
    return VardropError(
        f"Expected to write {what}to {path}, but got: {failure.strerror}. "
        "Whatever the file held before is still there."
    )


def check_apart(path: Path, others: Iterable[Path]) -> None:
    """Refuse to write to a file that is in use: one that is read, or one of a run."""
    target = path.resolve()
    if any(target == other.resolve() for other in others):
        raise VardropError(
            f"Expected a file of its own for the output, but got {path}, which is in use and would "
            "be lost. Choose another name."
        )


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as failure:
        raise VardropError(f"Expected to remove {path}, but got: {failure.strerror}.") from failure


def remove_leftovers(directory: Path) -> None:
    """Remove what writes left behind that were killed half way; nobody else may be writing."""
    for path in directory.glob(".*.new"):
        if re.fullmatch(r"\..+\.\d+\.new", path.name):
            remove(path)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep every other process and thread out of a directory that exists.

    The lock is the operating system's, so it ends with the process, however that ends; the empty
    file that carries it stays.
    """
    path = directory / LOCK
    try:
        file = open(path, "ab")  # noqa: SIM115  closed below, where the lock is given back
    except OSError as failure:
        raise _unwritten(path, 0, failure) from failure
    with file:
        try:
            _take(file.fileno())
        except OSError as taken:
            raise VardropError(
                f"Expected {directory} to be free, but another process is working in it. Wait for "
                "it to end, or choose another directory."
            ) from taken
        yield


if sys.platform == "win32":
    import msvcrt

    def _take(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _take(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically; see `plain` for numbers that are not finite."""
    text = json.dumps(plain(value), indent=2, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def plain(value: Any) -> Any:
    """The value as JSON can hold it: null for a number that is not finite.

    The entry `not_finite` of the outermost object then says which and what they were.

    >>> plain({"nll": float("inf"), "brier": 0.5})
    {'nll': None, 'brier': 0.5, 'not_finite': {'nll': 'inf'}}
    """
    gone: dict[str, str] = {}
    found = _finite(value, (), gone)
    if gone and isinstance(found, dict):
        found["not_finite"] = {**found.get("not_finite", {}), **gone}
    return found


def _finite(value: Any, path: tuple[str, ...], gone: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v, (*path, str(k)), gone) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v, (*path, str(i)), gone) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        gone[".".join(path)] = str(value)
        return None
    return value


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """An object with a checksum of its content, as `unsealed` expects it.

    >>> unsealed(sealed({"epochs": 3}), "config.json")
    {'epochs': 3}
    """
    found = plain(value)
    return {**found, "sha256": _checksum(found)}


def unsealed(value: Any, source: str) -> dict[str, Any]:
    """The content of a sealed object; an error if its checksum is missing or does not match.

    Args:
        value: what was read.
        source: where from, for the error.
    """
    if not isinstance(value, dict):
        raise VardropError(
            f"Expected {source} to hold a JSON object, but got {type(value).__name__}. "
            "It is damaged."
        )
    content = {k: v for k, v in value.items() if k != "sha256"}
    if value.get("sha256") != _checksum(content):
        raise VardropError(
            f"Expected the checksum of {source} to match its content, but it does not. It is "
            "damaged or was edited."
        )
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file; an error names it where it is absent or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise VardropError(
            f"Expected the file {path}, but it is not there. Is this the directory of a run?"
        ) from None
    except RecursionError:
        raise VardropError(f"Expected {path} to hold JSON, but it is nested too deeply.") from None
    except (OSError, ValueError) as broken:
        raise VardropError(f"Expected {path} to hold JSON, but got: {broken}.") from broken


def digest(text: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of a text and of named tensors: their names, types, shapes and bytes."""
    needed("numpy", "compress")
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
    save = needed("safetensors.torch", "compress").save
    # A copy of each: safetensors refuses tensors that share memory, as tied weights do.
    raw: bytes = save(
        {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}, metadata
    )
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
    """Read the tensors and the values that `write_tensors` wrote.

    A damaged file, or one without a checksum, is an error.
    """
    library = needed("safetensors", "compress")
    if not path.is_file():
        raise VardropError(f"Expected the file {path}, but it is not there. Train first.")
    try:
        with library.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata.get("values", "null")
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            values = json.loads(text)
    except (library.SafetensorError, OSError, ValueError, RecursionError) as broken:
        raise VardropError(
            f"Expected {path} to be a safetensors file, but got: {broken}. It is damaged."
        ) from broken
    if metadata.get("sha256") != digest(text, tensors):
        raise VardropError(
            f"Expected the checksum of {path} to match, but got another. The file is damaged, or "
            "vardrop did not write it."
        )
    return tensors, values
