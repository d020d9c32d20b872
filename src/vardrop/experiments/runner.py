"""Runs an experiment that a TOML file describes, and keeps what it measured as JSON.

A description names the function, its arguments, the seeds (stated in advance) and the paper's
figures. The result is written after every seed, so a run that was cut off goes on where it stood.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vardrop.data import IMAGE_SETS
from vardrop.errors import VardropError

# seed and arguments -> {"figures": {name: number}, "curve": [...] (optional)}
Function = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Experiment:
    """One row of the reproduction table, as its TOML file states it."""

    name: str
    title: str
    paper: str
    source: str  # where the paper's figures stand
    function: str
    seeds: tuple[int, ...]
    minutes: float  # expected, all seeds, one thread
    arguments: dict[str, Any]
    expected: dict[str, float]  # the paper's figures, by the names of ours
    quick: dict[str, Any]  # arguments of the minutes-long version
    bounds: dict[str, tuple[float, float]]  # that the quick version must keep
    notes: str


_REQUIRED = ("title", "paper", "source", "function", "seeds", "minutes")


def load(path: Path) -> Experiment:
    """Read one description."""
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise VardropError(f"Expected {path} to be TOML, but got: {error}.") from error
    if missing := [key for key in _REQUIRED if key not in data]:
        raise VardropError(f"Expected {path} to have {', '.join(missing)}, but got {sorted(data)}.")
    return Experiment(
        name=f"{path.parent.name}/{path.stem}",
        title=data["title"],
        paper=data["paper"],
        source=data["source"],
        function=data["function"],
        seeds=tuple(data["seeds"]),
        minutes=float(data["minutes"]),
        arguments=data.get("arguments", {}),
        expected=data.get("expected", {}),
        quick=data.get("quick", {}),
        bounds={k: (v[0], v[1]) for k, v in data.get("bounds", {}).items()},
        notes=data.get("notes", ""),
    )


def experiments(directory: Path) -> dict[str, Experiment]:
    """All descriptions below a directory, by name."""
    found = {e.name: e for e in (load(p) for p in sorted(directory.glob("*/*.toml")))}
    if not found:
        raise VardropError(f"Expected descriptions `*/*.toml` in {directory}, but got none.")
    return found


def reproduce(
    experiment: Experiment, functions: dict[str, Function], out: Path, quick: bool = False
) -> Iterator[dict[str, Any]]:
    """Run the seeds that `out` does not hold yet, yielding the result as it grows."""
    if experiment.function not in functions:
        raise VardropError(
            f"Expected `function` of {experiment.name} to be one of {sorted(functions)}, "
            f"but got {experiment.function!r}."
        )
    arguments = experiment.arguments | (experiment.quick if quick else {})
    seeds = experiment.seeds[:1] if quick else experiment.seeds
    result = _open(experiment, arguments, out)
    done = {run["seed"] for run in result["runs"]}
    for seed in seeds:
        if seed not in done:
            result["runs"].append(_run(functions[experiment.function], seed, arguments))
            result["figures"] = _summary(result["runs"])
            _write(out, result)
        yield result


def _run(function: Function, seed: int, arguments: dict[str, Any]) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    measured = function(seed=seed, **arguments)
    return {
        "seed": seed,
        **measured,
        "wall_seconds": round(time.perf_counter() - wall, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def _open(experiment: Experiment, arguments: dict[str, Any], out: Path) -> dict[str, Any]:
    fresh: dict[str, Any] = {
        "name": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "source": experiment.source,
        "expected": experiment.expected,
        "notes": experiment.notes,
        "arguments": arguments,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "data_md5": {name: IMAGE_SETS[name] for name in ("mnist", "fashion-mnist")},
        "figures": {},
        "runs": [],
    }
    if not out.is_file():
        return fresh
    known: dict[str, Any] = json.loads(out.read_text())
    if known.get("arguments") != arguments:
        raise VardropError(
            f"Expected {out} to hold a run with the arguments {arguments}, but got "
            f"{known.get('arguments')}. Move the file away to start anew."
        )
    return fresh | {"runs": known["runs"], "figures": known["figures"]}


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for key in runs[0]["figures"]:
        values = [run["figures"][key] for run in runs]
        mean = math.fsum(values) / len(values)
        spread = math.fsum((v - mean) ** 2 for v in values)
        error = math.sqrt(spread / (len(values) - 1) / len(values)) if len(values) > 1 else None
        figures[key] = {"mean": mean, "standard_error": error, "values": values}
    return figures


def _write(out: Path, result: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, out)


def outside(figures: dict[str, Any], bounds: dict[str, tuple[float, float]]) -> list[str]:
    """Which figures of a quick run lie outside their bounds."""
    found = []
    for key, (low, high) in bounds.items():
        value = figures[key]["mean"]
        if not low <= value <= high:
            found.append(f"{key} = {value:.4g}, expected {low} to {high}")
    return found
