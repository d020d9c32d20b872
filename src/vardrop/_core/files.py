"""Files that are complete or absent: written to a temporary name, with a checksum, no pickle."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from vardrop._core.errors import VardropError, import_optional
from vardrop._core.values import Json

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".lock"
_UNCHANGED = " The previous content of the file is unchanged."


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash at any moment, sees the old or the new file."""
    with open_atomically(path, len(content)) as file:
        file.write(content)


@contextmanager
def open_atomically(path: Path, size: int | None = None) -> Iterator[BinaryIO]:
    """A file to write piece by piece. It gets its name if the block ends without an error.

    Args:
        path: of the file.
        size: for the error, if it is known in advance.
    """
    if not path.name:
        raise VardropError(f"Expected `path` to name a file, but got '{path}'.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    amount = "" if size is None else f"{size} bytes "
    with _report_failure(f"write {amount}to {path}", _UNCHANGED):
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:  # after an error
            with suppress(OSError):  # in a read-only directory there is nothing to remove
                temporary.unlink(missing_ok=True)


def append(path: Path, content: bytes) -> None:
    """Write at the end of a file. A crash may leave a part of the content."""
    action = f"write {len(content)} bytes to {path}"
    with _report_failure(action, _UNCHANGED), open(path, "ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _report_failure(action: str, remedy: str = "") -> Iterator[None]:
    """Raise an error of the operating system as a `VardropError` that names the action."""
    try:
        yield
    except OSError as failure:
        raise VardropError(
            f"Expected to {action}, but got: {failure.strerror}.{remedy}"
        ) from failure


def check_not_in_use(path: Path, others: Iterable[Path]) -> None:
    """Raise an error if an output would replace a file that is in use, such as an input."""
    if path.resolve() in {other.resolve() for other in others}:
        raise VardropError(
            f"Expected a separate file for the output, but got {path}, which is in use and would "
            "be lost. Choose another name."
        )


def remove(path: Path) -> None:
    """Remove a file if it exists."""
    with _report_failure(f"remove {path}"):
        path.unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Remove temporary files of killed writes. No other process may be writing."""
    for path in directory.glob(".?*.*.new"):
        if path.name.split(".")[-2].isdecimal():  # the process
            remove(path)


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock an existing directory against every other process and thread.

    The operating system releases the lock when the process ends, also if it is killed. The empty
    lock file stays.
    """
    append(directory / LOCK, b"")
    with open(directory / LOCK, "ab") as file:
        try:
            if sys.platform == "win32":
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as taken:
            raise VardropError(
                f"Expected {directory} to be free, but another process is working in it. Wait for "
                "it to end, or choose another directory."
            ) from taken
        yield


def write_json(path: Path, value: Json) -> None:
    """Write a value as indented JSON, atomically. `to_json_safe` replaces NaN and infinities."""
    text = json.dumps(to_json_safe(value), indent=2, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def to_json_safe(value: Json) -> Any:
    """Convert a value for JSON: None for a number that is not finite.

    The entry `not_finite` of the outermost object then lists these numbers by their place.

    >>> to_json_safe({"nll": float("inf"), "brier": 0.5})
    {'nll': None, 'brier': 0.5, 'not_finite': {'nll': 'inf'}}
    """
    replaced: dict[str, str] = {}

    def convert(part: Json, *path: str | int) -> Json:
        if isinstance(part, dict):
            return {k: convert(v, *path, k) for k, v in part.items()}
        if isinstance(part, list | tuple):
            return [convert(v, *path, i) for i, v in enumerate(part)]
        if isinstance(part, float) and not math.isfinite(part):
            replaced[".".join(map(str, path))] = str(part)
            return None
        return part

    converted: Any = convert(value)
    if replaced and isinstance(converted, dict):
        converted["not_finite"] = {**converted.get("not_finite", {}), **replaced}
    return converted


def with_checksum(value: Mapping[str, Json]) -> dict[str, Json]:
    """Add a checksum of its content to an object, for `verify_checksum`.

    >>> verify_checksum(with_checksum({"epochs": 3}), "config.json")
    {'epochs': 3}
    """
    content = to_json_safe(value)
    text = json.dumps(content, sort_keys=True)
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def verify_checksum(value: Json, source: str) -> dict[str, Any]:
    """Check the checksum of an object and return its content.

    Args:
        value: an object that was read.
        source: the file that it was read from, for the error.

    Returns:
        The content without the checksum.
    """
    if not isinstance(value, dict):
        raise VardropError(
            f"Expected {source} to hold a JSON object, but got {type(value).__name__}. "
            "It is damaged."
        )
    content = {k: v for k, v in value.items() if k != "sha256"}
    if value.get("sha256") != with_checksum(content)["sha256"]:
        raise VardropError(
            f"Expected the checksum of {source} to match its content, but it does not. It is "
            "damaged or was edited."
        )
    return content


def check_readable(path: Path, remedy: str = "") -> None:
    """Raise an error unless a file exists and can be read, before its content is judged.

    Args:
        path: the file.
        remedy: the end of the message for an absent file.
    """
    try:
        with open(path, "rb") as file:
            file.read(1)
    except FileNotFoundError:
        raise VardropError(f"File not found: {path}. {remedy}".rstrip()) from None
    except OSError as failure:
        raise VardropError(f"Reading {path} failed: {failure.strerror}.") from failure


def read_json(path: Path) -> Any:
    """Read a JSON file. The error for an absent, unreadable or damaged file names it."""
    check_readable(path, "Is this the directory of a run?")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as broken:
        raise VardropError(f"Expected {path} to hold JSON, but got: {broken}.") from broken


def digest(text: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of a text and of the names, types, shapes and bytes of tensors."""
    import_optional("numpy", "compress")
    checksum = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        checksum.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()


def write_tensors(path: Path, tensors: dict[str, Tensor], values: Json = None) -> None:
    """Write tensors, and plain values in the metadata of the same safetensors file, atomically.

    The same content gives the same bytes. safetensors writes the metadata in random order, so the
    header is written again.
    """
    text = json.dumps(values)
    metadata = {"sha256": digest(text, tensors), "values": text}
    # Cloned, because safetensors does not accept tensors that share memory, such as tied weights.
    copies = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    raw: bytes = import_optional("safetensors.torch", "compress").save(copies, metadata)
    start = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:start])
    del entries["__metadata__"]
    header = {"__metadata__": metadata, **dict(sorted(entries.items()))}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    write_atomically(path, len(encoded).to_bytes(8, "little") + encoded + raw[start:])


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read the tensors and the values that `write_tensors` wrote.

    A damaged file, or one without a checksum, is an error.
    """
    library = import_optional("safetensors", "compress")
    check_readable(path, "Train first.")
    try:
        with library.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        text = metadata.get("values", "null")
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
