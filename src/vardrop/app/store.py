"""A run directory as data: what was run, how it went, what came out, and arrays for pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vardrop._core.checks import check_choice, check_integer, check_number
from vardrop._core.errors import VardropError
from vardrop._core.files import read_json, read_tensors, unsealed

CHECKPOINT, BEST, HISTORY = "checkpoint.safetensors", "best.safetensors", "history.jsonl"
STANDING = "checkpoint.json"
Record = dict[str, Any]
_PARTS = {
    "metrics": dict,
    "baseline": dict,
    "held_out": dict,
    "against": dict,
    "ood": dict,
    "compression": dict,
    "curve": list,
    "layers": list,
    "notes": list,
    "by_class": list,
    "confusion": list,
}


@dataclass(frozen=True)
class StoredRun:
    """One run: its directory and the content of its files; a file that is absent reads as empty."""

    path: Path
    config: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    results: Mapping[str, Any]
    arrays: Mapping[str, Tensor]
    preprocessing: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """What is predicted, as the column is called; empty where that is not known."""
        found = self.preprocessing.get("target") or (self.config.get("data") or {}).get("target")
        return str(found or "")

    @property
    def unit(self) -> float:
        """The deviation of the target, by which it was scaled for the training."""
        found = self.preprocessing.get("target_std", 1.0)
        return float(found) if self.task != "classification" and found > 0 else 1.0

    def label(self, layer: str) -> str:
        """A layer for people: the kind beside a name that is but a number."""
        known = {row.get("name"): row.get("kind") for row in self.results.get("layers") or []}
        kind = known.get(layer) or "layer"
        return f"{kind} {layer}" if layer.isdigit() else layer

    @property
    def task(self) -> str | None:
        """ "classification" or "regression", where the results say so."""
        return self.results.get("task")

    def layers(self, prefix: str) -> dict[str, Tensor]:
        """The arrays called `<prefix>.<layer>`, by layer."""
        start = prefix + "."
        found = {k.removeprefix(start): v for k, v in self.arrays.items() if k.startswith(start)}
        # The file keeps no order; the history lists the layers as the net has them.
        known = list((self.history[-1].get("sparsity") or {}) if self.history else ())
        rank = {name: i for i, name in enumerate(known)}
        return {k: found[k] for k in sorted(found, key=lambda k: (rank.get(k, len(rank)), k))}

    def fractions(self) -> dict[str, float]:
        """The fraction of the weights of each layer that pruning removes, where that is known."""
        pruned = self.layers("weight_pruned")
        if not pruned and self.history:
            return dict(self.history[-1].get("sparsity") or {})
        return {name: float((w == 0).double().mean()) for name, w in pruned.items()}

    def sets(self, prefix: str) -> dict[str, Tensor]:
        """The arrays called `<prefix>_<name>`, by name."""
        start = prefix + "_"
        names = sorted(k for k in self.arrays if k.startswith(start))
        return {k.removeprefix(start): self.arrays[k] for k in names}


def read_run(path: Path) -> StoredRun:
    """Read a run directory; config.json must be there, the other files may be absent.

    Args:
        path: the directory that `vardrop fit` wrote.
    """
    if not (path / "config.json").is_file():
        raise VardropError(
            f"Expected `{path}` to be a run directory, but got no file {path / 'config.json'}. "
            "Pass the directory that `vardrop fit --out` wrote."
        )
    config, results = _object(path / "config.json"), path / "results.json"
    columns = path / "preprocessing.json"
    return StoredRun(
        path=path,
        config=config,
        history=read_history(path),
        results=_results(results) if results.is_file() else {},
        arrays=_arrays(path / "arrays.safetensors"),
        preprocessing=_preprocessing(columns) if columns.is_file() else {},
    )


def _broken(path: Path, wanted: str, found: object) -> VardropError:
    return VardropError(
        f"Expected `{path}` to hold {wanted}, but got {found}. "
        "The file is damaged; restore it or run the command again."
    )


def _object(path: Path) -> dict[str, Any]:
    """A file with one JSON object, checked against its checksum."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise _broken(path, "a JSON object", error) from error
    if not isinstance(found, dict):
        raise _broken(path, "a JSON object", type(found).__name__)
    return unsealed(found, str(path))


def _results(path: Path) -> dict[str, Any]:
    """The results, once every known part has its type."""
    found = _object(path)
    for part, kind in _PARTS.items():
        if not isinstance(found.get(part) or kind(), kind):
            raise _broken(path, f"`{part}` as a JSON {kind.__name__}", found[part])
    for row in found.get("layers") or []:
        if not isinstance(row, dict) or not isinstance(row.get("weights"), int):
            raise _broken(path, "`layers` with a number of weights each", row)
    return found


def _preprocessing(path: Path) -> dict[str, Any]:
    """What was found in a table, once the parts that are shown have their types."""
    found = _object(path)
    if not isinstance(found.get("target_std", 1.0), int | float):
        raise _broken(path, "`target_std` as a number", found["target_std"])
    return found


def _arrays(path: Path) -> dict[str, Tensor]:
    return read_tensors(path)[0] if path.is_file() else {}


def read_standing(directory: Path) -> Record | None:
    """The values of the checkpoint without its tensors; None where there are none."""
    path = directory / STANDING
    return check_standing(path, unsealed(read_json(path), str(path))) if path.is_file() else None


def check_standing(path: Path, values: Any) -> Record:
    """The values of a checkpoint, if they are such as a recorder writes; else an error."""
    with reading_checkpoint(path):
        check_choice("phase", values["phase"], ("pretrain", "fit"))
        for name in ("epoch", "position", "waited"):
            check_integer(name, values[name], 0)
        for number in (values["best"], values.get("best_beta")):
            if number is not None:
                check_number("best", number)
        check_integer("batch_size", values.get("batch_size", 1))
        check_integer("first_epoch", values.get("first_epoch", 0), 0)
    found: Record = values
    return found


@contextmanager
def reading_checkpoint(path: Path) -> Iterator[None]:
    """What fails inside is told as an error of the file."""
    try:
        yield
    except VardropError as wrong:
        raise VardropError(
            f"Expected {path} to hold a checkpoint of this run, but got: {wrong}"
        ) from wrong
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as wrong:
        reason = " ".join(f"{type(wrong).__name__}: {wrong}".split())[:300]
        raise VardropError(
            f"Expected {path} to hold a checkpoint of this run, but got: {reason}. It is damaged, "
            "or of another net."
        ) from wrong


def read_history(directory: Path) -> list[Record]:
    """The records of all epochs; a last line that was cut short by a crash is left out.

    An absent file is an empty history; one that lacks an epoch before the checkpoint is damaged.
    """
    path = directory / HISTORY
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as broken:
            if number == len(lines):
                break
            raise _damaged(path, f"{broken} in line {number}") from broken
        records.append(unsealed(record, f"{path}, line {number}"))
        epoch = records[-1].get("epoch")
        if type(epoch) is not int or epoch < 0:
            raise _damaged(path, f"the epoch {epoch!r} in line {number}")
        follows = len(records) == 1 or epoch == records[-2]["epoch"] + 1
        if not follows:
            raise _damaged(path, f"the epoch {epoch} in line {number}")
    standing = read_standing(directory) or {}
    done = standing["first_epoch"] + standing["epoch"] if "first_epoch" in standing else 0
    if (last := records[-1]["epoch"] + 1 if records else 0) < done:
        raise _damaged(path, f"{last} epochs, where the checkpoint has {done}")
    return records


def _damaged(path: Path, found: str) -> VardropError:
    return VardropError(
        f"Expected {path} to hold one JSON object per line, epoch after epoch, but got {found}. It "
        "is damaged; remove the file to go on without the curves."
    )
