"""Runs an experiment that a TOML file describes, and keeps what it measured as JSON.

A description names the function, its arguments, the seeds (stated in advance) and the paper's
figures. The result is written after every seed, so a run that was cut off goes on where it stood;
a function that takes a `watch` also goes on inside a seed.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.descriptions import Experiment, experiments, load
from experiments.watch import Tell, Watch
from vardrop.data import IMAGE_SETS
from vardrop.errors import VardropError
from vardrop.files import read_json, write_atomically

__all__ = [
    "Experiment", "Function", "experiments", "finished", "forget", "load", "outside", "reproduce",
    "result_path",
]  # fmt: skip

# seed and arguments -> {"figures": {name: number}, "curve": [...] (optional)}
Function = Callable[..., dict[str, Any]]


def result_path(experiment: Experiment, results: Path) -> Path:
    """Where the result of an experiment lies."""
    return results / f"{experiment.name}.json"


def reproduce(
    experiment: Experiment,
    functions: dict[str, Function],
    out: Path,
    quick: bool = False,
    tell: Tell | None = None,
) -> Iterator[dict[str, Any]]:
    """Run the seeds that `out` does not hold yet, yielding the result as it grows.

    Args:
        experiment: what to run.
        functions: by name.
        out: the JSON file.
        quick: run the minutes-long version, on the first seed alone.
        tell: is told which share of all seeds is done.
    """
    if experiment.function not in functions:
        raise VardropError(
            f"Expected `function` of {experiment.name} to be one of {sorted(functions)}, "
            f"but got {experiment.function!r}."
        )
    function = functions[experiment.function]
    arguments = experiment.arguments | (experiment.quick if quick else {})
    seeds = experiment.seeds[:1] if quick else experiment.seeds
    result = _open(experiment, arguments, out)
    done = {run["seed"] for run in result["runs"]}
    for index, seed in enumerate(seeds):
        if seed not in done:
            folder = _checkpoints(out, seed, arguments)
            watch = Watch(folder, _part(tell, index, len(seeds), seed))
            result["runs"].append(_run(function, seed, arguments, watch))
            result["figures"] = _summary(result["runs"])
            _write(result, out)
            shutil.rmtree(folder, ignore_errors=True)
        if tell is not None:
            tell((index + 1) / len(seeds), f"seed {seed} done")
        yield result
    shutil.rmtree(_kept(out), ignore_errors=True)


def finished(experiment: Experiment, out: Path) -> list[int]:
    """The seeds of a description that `out` holds a run of."""
    known = _known(out)
    if known is None or known["arguments"] != experiment.arguments:
        return []
    done = {run["seed"] for run in known["runs"]}
    return [seed for seed in experiment.seeds if seed in done]


def forget(out: Path) -> None:
    """Remove a result, and what is kept of a run that was cut off."""
    out.unlink(missing_ok=True)
    shutil.rmtree(_kept(out), ignore_errors=True)


def _part(tell: Tell | None, index: int, count: int, seed: int) -> Tell | None:
    """Tells a share of one seed as a share of all."""
    if tell is None:
        return None
    return lambda share, text: tell((index + min(share, 1.0)) / count, f"seed {seed}: {text}")


def _kept(out: Path) -> Path:
    return out.parent / f".{out.stem}"


def _checkpoints(out: Path, seed: int, arguments: dict[str, Any]) -> Path:
    """Where the trainings of a seed are kept, apart for other arguments and out of git."""
    kept = _kept(out)
    kept.mkdir(parents=True, exist_ok=True)
    (kept / ".gitignore").write_text("*\n")
    digest = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[:12]
    return kept / f"{seed}-{digest}"


def _run(function: Function, seed: int, arguments: dict[str, Any], watch: Watch) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    more = {"watch": watch} if "watch" in inspect.signature(function).parameters else {}
    measured = function(seed=seed, **arguments, **more)
    return {
        "seed": seed,
        **measured,
        "wall_seconds": round(time.perf_counter() - wall, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def _known(out: Path) -> dict[str, Any] | None:
    if not out.is_file():
        return None
    known: dict[str, Any] = read_json(out)
    if not isinstance(known, dict) or not {"arguments", "runs", "figures"} <= set(known):
        raise VardropError(f"Expected {out} to hold a result, but got {str(known)[:80]}.")
    return known


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
    known = _known(out)
    if known is None:
        return fresh
    if known["arguments"] != arguments:
        raise VardropError(
            f"Expected {out} to hold a run with the arguments {arguments}, but got "
            f"{known['arguments']}. Start anew with --force, or move the file away."
        )
    measured = ("versions", "data_md5", "figures", "runs")
    result = fresh | {key: known[key] for key in measured}
    if result != known:  # the description has been reworded since
        _write(result, out)
    return result


def _write(result: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, (json.dumps(result, indent=1) + "\n").encode())


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for key in runs[0]["figures"]:
        values = [run["figures"][key] for run in runs]
        mean = math.fsum(values) / len(values)
        spread = math.fsum((v - mean) ** 2 for v in values)
        error = math.sqrt(spread / (len(values) - 1) / len(values)) if len(values) > 1 else None
        figures[key] = {"mean": mean, "standard_error": error, "values": values}
    return figures


def outside(figures: dict[str, Any], bounds: dict[str, tuple[float, float]]) -> list[str]:
    """Which figures of a quick run lie outside their bounds."""
    found = []
    for key, (low, high) in bounds.items():
        value = figures[key]["mean"]
        if not low <= value <= high:
            found.append(f"{key} = {value:.4g}, expected {low} to {high}")
    return found
