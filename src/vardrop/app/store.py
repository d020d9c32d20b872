"""Read a run directory: configuration, training history, results, arrays for pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

from torch import Tensor

from vardrop._core.checks import check_choice, check_integer, check_number, check_type
from vardrop._core.errors import VardropError
from vardrop._core.files import check_readable, read_json, read_tensors, verify_checksum
from vardrop._core.values import to_json
from vardrop.recipes import METHODS, BaseRecipe

CHECKPOINT, BEST, HISTORY = "checkpoint.safetensors", "best.safetensors", "history.jsonl"
PROGRESS = "checkpoint.json"  # the values of the checkpoint without its tensors
SIZES = ("weights", "weights_left", "packed_bytes", "seconds")
Record = dict[str, Any]


@dataclass(frozen=True)
class StoredRun:
    """The content of a run directory. A missing file reads as empty."""

    path: Path
    config: Record
    history: Sequence[Record]
    results: Record
    arrays: Mapping[str, Tensor]
    preprocessing: Record = field(default_factory=dict)

    @property
    def target(self) -> str:
        """The name of the target column; empty if it has none."""
        roles = self.config.get("data") or {}
        return str(self.preprocessing.get("target") or roles.get("target") or "")

    @property
    def seconds(self) -> float:
        """The time of training."""
        return sum(float(row.get("seconds") or 0) for row in self.history)

    @property
    def stopped(self) -> str:
        """The last epoch of an interrupted training; empty for a finished one."""
        settings, done = self.config.get("settings") or {}, len(self.history)
        epochs = (settings.get("epochs") or 0) + (settings.get("pretrain") or 0)
        if settings.get("patience") is not None or done >= epochs:
            return ""
        return f"was stopped after {done} of {epochs} epochs"

    def sizes(self) -> dict[str, float]:
        """Weights, weights left after compression or pruning, bytes of the packed file, seconds."""
        counts = {str(row["name"]): int(row["weights"]) for row in self.results.get("layers") or []}
        compression, removed = self.results.get("compression") or {}, self.fractions()
        left, total = compression.get("weights_after"), sum(counts.values())
        if left is None and removed:
            left = total - round(sum(removed.get(k, 0.0) * n for k, n in counts.items()))
        seconds = round(self.seconds, 2) if self.history else None
        sizes = (total or None, left, compression.get("packed_bytes"), seconds)
        return {k: v for k, v in zip(SIZES, sizes, strict=True) if v is not None}

    def label(self, layer: str) -> str:
        """The name of a layer, with its type if the name is only a number."""
        types = {row.get("name"): row.get("kind") for row in self.results.get("layers") or []}
        return f"{types.get(layer) or 'layer'} {layer}" if layer.isdigit() else layer

    def fractions(self) -> dict[str, float]:
        """The fraction of the weights of each layer that pruning removes."""
        removed = (self.results.get("compression") or {}).get("removed")
        return dict(removed or (self.history or [{}])[-1].get("sparsity") or {})


def read_run(path: Path) -> StoredRun:
    """Read a run directory. config.json is required, the other files may be missing.

    Args:
        path: the directory that `vardrop fit` wrote.
    """
    check_readable(path / "config.json", "Pass a run directory.")
    arrays = path / "arrays.safetensors"
    tensors = read_tensors(arrays)[0] if arrays.is_file() else {}
    if empty := [name for name, tensor in tensors.items() if tensor.numel() == 0]:
        raise VardropError(f"{arrays} is corrupted ({empty[0]!r} is empty).")
    names = ("config.json", "results.json", "preprocessing.json")
    config, results, preprocessing = (_read_outline(path / name) for name in names)
    return StoredRun(path, config, read_history(path), results, tensors, preprocessing)


# The types of entries that the report and the comparison rely on. Any entry may be missing or null.
_TYPES: dict[str, type | UnionType] = {
    **dict.fromkeys(("metrics", "baseline", "ood", "held_out", "against"), dict),
    **dict.fromkeys(("compression", "settings", "sizes", "data", "known"), dict),
    **dict.fromkeys(("notes", "layers", "confusion", "classes"), list),
    **dict.fromkeys(("task", "test_rows", "checksum", "target"), str),
    "target_std": int | float,
}
_LAYER = {"name": str, "weights": int}
_NUMBERS = {"settings": ("epochs", "pretrain"), "compression": ("weights_after", "packed_bytes")}


def _read_outline(path: Path) -> Record:
    """The content of a file, whose entries must have the types that its readers rely on."""
    content = read_sealed(path) if path.is_file() else {}
    entries = [(name, entry, _TYPES.get(name, object)) for name, entry in content.items()]
    for name, keys in _NUMBERS.items():
        inner = content.get(name)
        entries += [(k, inner.get(k), int) for k in keys] if isinstance(inner, dict) else []
    for row in content.get("layers") or []:
        fields = row if isinstance(row, dict) else {}
        entries += [(k, fields.get(k, 0.5), kind) for k, kind in _LAYER.items()]
    metrics = content.get("metrics")
    entries += [(k, v, int | float) for k, v in metrics.items()] if type(metrics) is dict else []
    for name, entry, kind in entries:
        if entry is not None:
            check_type(f"`{name}` in {path}", entry, kind, "as vardrop writes it", "It is damaged.")
    return content


def select_prefix(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `start`, by the rest of their names."""
    return {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}


def name_runs(runs: Sequence[StoredRun]) -> dict[str, StoredRun]:
    """Runs by the name of their directory, or by its path if the names are not distinct."""
    by_name = {run.path.resolve().name: run for run in runs}
    return by_name if len(by_name) == len(runs) else {str(run.path): run for run in runs}


def make_directory(path: Path) -> Path:
    """Make a directory with its parents, unless it exists, and return it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise VardropError(f"Making the directory {path} failed: {failure.strerror}.") from failure
    return path


def read_sealed(path: Path) -> Record:
    """The content of a JSON file whose checksum matches."""
    return verify_checksum(read_json(path), str(path))


def read_progress(directory: Path) -> Record | None:
    """The values of the checkpoint without its tensors; None if there is no checkpoint."""
    path = directory / PROGRESS
    return check_progress(path, read_sealed(path)) if path.is_file() else None


def check_progress(path: Path, progress: Record) -> Record:
    """Return the values of a checkpoint, or raise an error if no recorder can have written them."""
    with reading(path, "a checkpoint of this run"):
        check_choice("phase", progress["phase"], ("pretrain", "fit"))
        for name in ("epoch", "position", "waited", "first_epoch"):
            check_integer(name, progress[name], 0)
        for number in (progress["best"], progress["best_beta"]):
            if number is not None:
                check_number("best", number)
        check_integer("batch_size", progress["batch_size"])
    return progress


@contextmanager
def reading(source: str | Path, what: str) -> Iterator[None]:
    """Report errors inside as damage of the source, which should hold `what`."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}. It is damaged."
        reason = " ".join((str(error) if isinstance(error, VardropError) else reason).split())
        raise VardropError(f"Expected {source} to hold {what}, but got: {reason[:400]}") from error


def read_history(directory: Path) -> list[Record]:
    """The records of all epochs, without an incomplete last line after a crash.

    A missing file is an empty history. A file without an epoch before the checkpoint is damaged.

    Args:
        directory: the run directory.
    """
    path = directory / HISTORY
    if not path.is_file():
        return []
    check_readable(path)
    lines = path.read_bytes().split(b"\n")
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as broken:
            if number == len(lines):
                break
            raise _history_error(path, f"{broken} in line {number}") from broken
        record = verify_checksum(content, f"{path}, line {number}")
        seconds, epoch = record.get("seconds", 0), record.get("epoch")
        if not isinstance(seconds, int | float) or not isinstance(record.get("sparsity", {}), dict):
            raise _history_error(path, f"no record of an epoch in line {number}")
        expected = records[-1]["epoch"] + 1 if records else epoch
        if type(epoch) is not int or epoch < 0 or epoch != expected:
            raise _history_error(path, f"the epoch {epoch!r} in line {number}")
        records.append(record)
    progress = read_progress(directory)
    done = 0 if progress is None else progress["first_epoch"] + progress["epoch"]
    if (last := records[-1]["epoch"] + 1 if records else 0) < done:
        raise _history_error(path, f"{last} epochs, but the checkpoint has {done}")
    return records


def _history_error(path: Path, problem: str) -> VardropError:
    text = f"Expected {path} to hold one JSON object per epoch, but got {problem}."
    return VardropError(f"{text} It is damaged. Remove it to continue without the curves.")


def show(stored: Any) -> str:
    """Stored JSON in one line of text, values of the library as `Type(field=value)`.

    >>> show({"type": "Normal", "version": 1, "scale": 0.1})
    'Normal(scale=0.1)'
    >>> show({"torch": "2.13.0", "seeds": [0, 1]}), show(0.123456), show(None)
    ('torch 2.13.0, seeds 0, 1', '0.1235', 'none')
    """
    if isinstance(stored, Mapping):
        fields = {k: v for k, v in stored.items() if k not in ("type", "version") and is_set(v)}
        if "type" in stored:
            return f"{stored['type']}({', '.join(f'{k}={show(v)}' for k, v in fields.items())})"
        return ", ".join(f"{k} {show(v)}" for k, v in fields.items())
    if isinstance(stored, list | tuple):
        return ", ".join(map(show, stored))
    if isinstance(stored, float) and math.isfinite(stored):
        return f"{stored:.4g}" if abs(stored) < 1e4 else f"{stored:,.0f}"
    return "none" if stored is None else str(stored)


def is_set(stored: object) -> bool:
    """Whether a stored entry is not its empty default."""
    return stored is not None and stored is not False and stored != []


def flatten(stored: Mapping[str, Any], prefix: str = "") -> Record:
    """Nested mappings as one, with the names joined.

    >>> flatten({"data": {"name": "iris", "in_memory": False}, "seed": 0})
    {'data name': 'iris', 'seed': 0}
    """
    flat: Record = {}
    for key, entry in stored.items():
        if isinstance(entry, Mapping):
            flat |= flatten(entry, f"{prefix}{key} ")
        elif is_set(entry):
            flat[f"{prefix}{key}"] = entry
    return flat


def method_name(method: BaseRecipe | Mapping[str, Any] | str | None) -> str:
    """The name of the method that is nearest to a recipe, with the options that differ.

    >>> import vardrop as vd
    >>> method_name(vd.sparse_vd()), method_name(None)
    ('sparse_vd', 'none')
    >>> method_name(vd.bayes_by_backprop(prior=vd.priors.Normal(learned=True)))
    'bayes_by_backprop (prior learned=True)'
    """
    stored = to_json(method) if isinstance(method, BaseRecipe) else method
    if not isinstance(stored, Mapping):
        return show(stored)
    leaves, best, fewest = flatten(stored), show(stored), math.inf
    for name, make in METHODS.items():
        usual = flatten(to_json(make()))
        changed = {k: v for k, v in leaves.items() if usual.get(k) != v and "version" not in k}
        # The types of the parts identify the method, without the estimator.
        others = {k for k in leaves | usual if leaves.get(k) != usual.get(k) and k.endswith("type")}
        if all("estimator" in key for key in others) and len(changed) < fewest:
            options = ", ".join(f"{k.removesuffix(' type')}={show(v)}" for k, v in changed.items())
            best, fewest = f"{name} ({options})" if changed else name, len(changed)
    return best
