"""Runs an experiment that a TOML file describes, and keeps what it measured as JSON.

A description names the function, its arguments, the seeds (stated in advance) and the paper's
figures. The result is written after every seed, so a run that was cut off goes on where it stood;
a function that takes a `watch` also goes on inside a seed. A function that takes `seeds` runs them
side by side and returns a list.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import platform
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from experiments.trainings import ProgressCallback, Watch
from vardrop._core.errors import VardropError
from vardrop._core.files import read_json, write_atomically
from vardrop.app.data import IMAGE_SETS

# seed and arguments -> {"figures": {name: number}, "curve": [...] (optional)}; seeds -> a list
Function = Callable[..., Any]


@dataclass(frozen=True)
class Experiment:
    """One line of the reproduction table, as its TOML file states it."""

    name: str
    row: int  # in the table of results; 0 for what is beside it
    title: str
    paper: str
    source: str  # where the paper's figures stand
    function: str
    seeds: tuple[int, ...]
    minutes: float  # expected, all seeds, one thread
    arguments: dict[str, Any]
    expected: dict[str, float]  # the paper's figures, by the names of ours
    headline: tuple[str, ...]  # figures of ours that the table shows beside those
    quick: dict[str, Any]  # arguments of the minutes-long version
    bounds: dict[str, tuple[float, float]]  # that the quick version must keep
    plot: dict[str, Any]  # how to draw the curve
    notes: str
    cause: str  # why judged figures are not reached


_REQUIRED = ("title", "paper", "source", "function", "seeds", "minutes", "bounds")
_KINDS: dict[type | tuple[type, ...], tuple[str, ...]] = {
    str: ("title", "paper", "source", "function", "notes", "cause"),
    int: ("row",),
    (int, float): ("minutes",),
    list: ("seeds", "headline"),
    dict: ("arguments", "expected", "quick", "bounds", "plot"),
}


def load(path: Path) -> Experiment:
    """Read one description."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # also what is not UTF-8
        raise VardropError(f"Expected {path} to be TOML, but got: {error}.") from error
    if missing := [key for key in _REQUIRED if key not in data]:
        raise VardropError(f"Expected {path} to have {', '.join(missing)}, but got {sorted(data)}.")
    if "expected" not in data and "headline" not in data:
        raise VardropError(
            f"Expected {path} to have `expected`, the paper's figures, or `headline`, the names of "
            f"figures to show without them, but got {sorted(data)}."
        )
    _check_types(path, data)
    return Experiment(
        name=f"{path.parent.name}/{path.stem}",
        row=data.get("row", 0),
        title=data["title"],
        paper=data["paper"],
        source=data["source"],
        function=data["function"],
        seeds=tuple(data["seeds"]),
        minutes=float(data["minutes"]),
        arguments=data.get("arguments", {}),
        expected=data.get("expected", {}),
        headline=tuple(data.get("headline", ())),
        quick=data.get("quick", {}),
        bounds={k: (v[0], v[1]) for k, v in data["bounds"].items()},
        plot=data.get("plot", {}),
        notes=data.get("notes", ""),
        cause=data.get("cause", ""),
    )


def _check_types(path: Path, data: dict[str, Any]) -> None:
    kinds = {name: kind for kind, names in _KINDS.items() for name in names}
    if unknown := sorted(set(data) - set(kinds)):
        raise VardropError(f"Expected {path} to have only {sorted(kinds)}, but got {unknown}.")
    seeds, figures = data["seeds"], data.get("expected", {})
    fits = (
        all(isinstance(data[k], kinds[k]) and not isinstance(data[k], bool) for k in data)
        and all(type(seed) is int and seed >= 0 for seed in seeds)
        and all(isinstance(name, str) for name in data.get("headline", ()))
        and all(map(_number, figures.values()))
        and all(isinstance(b, list) and len(b) == 2 for b in data["bounds"].values())
        and all(map(_number, (end for b in data["bounds"].values() for end in b)))
    )
    if not fits or not _number(data["minutes"]):
        raise VardropError(
            f"Expected {path} to have texts as title, paper, source, function and notes, whole "
            "numbers as row and seeds, finite numbers as minutes and expected figures, names as "
            "headline, and two numbers for every bound, but got something else."
        )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def experiments(directory: Path) -> dict[str, Experiment]:
    """All descriptions below a directory, by name, in the order of the table."""
    found = [load(path) for path in sorted(directory.glob("*/*.toml"))]
    if not found:
        raise VardropError(
            f"Expected descriptions `*/*.toml` in {directory}, but got none. "
            "Run it in a clone of the repository."
        )
    return {e.name: e for e in sorted(found, key=lambda e: e.row or len(found))}


def named(known: dict[str, Experiment], name: str) -> Experiment:
    """The experiment of a name; an error names the nearest."""
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=3, cutoff=0.4) or list(known)
    raise VardropError(
        f"Expected the name of an experiment such as {', '.join(near)}, but got {name!r}. "
        "`vardrop reproduce --list` shows all."
    )


def result_path(experiment: Experiment, results: Path) -> Path:
    """Where the result of an experiment lies."""
    return results / f"{experiment.name}.json"


def reproduce(
    experiment: Experiment,
    functions: dict[str, Function],
    out: Path,
    quick: bool = False,
    tell: ProgressCallback | None = None,
) -> Iterator[dict[str, Any]]:
    """Run the seeds that `out` does not hold yet, yielding the result as it grows.

    Args:
        experiment: what to run.
        functions: by name.
        out: the JSON file.
        quick: run the minutes-long version, on the first seed alone.
        tell: is told which fraction of all seeds is done.
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
    groups = [seeds] if _takes(function, "seeds") else [(seed,) for seed in seeds]
    for index, group in enumerate(groups):
        if missing := [seed for seed in group if seed not in done]:
            more = {"seeds": missing} if len(missing) > 1 else {}
            folder = _checkpoints(out, missing[0], arguments | more)
            watch = Watch(folder, _part(tell, index, len(groups), missing[0]))
            result["runs"] += _run(function, missing, arguments, watch)
            result["figures"] = _summary(result["runs"])
            _write(result, out)
            shutil.rmtree(folder, ignore_errors=True)
        if tell is not None:
            tell((index + 1) / len(groups), f"seed {group[-1]} done")
        yield result
    shutil.rmtree(_kept(out), ignore_errors=True)


def finished(experiment: Experiment, out: Path) -> list[int]:
    """The seeds of a description that `out` holds a run of."""
    known = _known(out)
    if known is None or known["arguments"] != experiment.arguments:
        return []
    done = {run["seed"] for run in known["runs"]}
    return [seed for seed in experiment.seeds if seed in done]


def reword(experiment: Experiment, out: Path) -> None:
    """Give a result of the described arguments the words of its description."""
    if finished(experiment, out):
        _open(experiment, experiment.arguments, out)


def forget(out: Path) -> None:
    """Remove a result, and what is kept of a run that was cut off."""
    out.unlink(missing_ok=True)
    shutil.rmtree(_kept(out), ignore_errors=True)


def _part(
    tell: ProgressCallback | None, index: int, count: int, seed: int
) -> ProgressCallback | None:
    """Tells a fraction of one seed as a fraction of all."""
    if tell is None:
        return None
    return lambda part, text: tell((index + min(part, 1.0)) / count, f"seed {seed}: {text}")


def _kept(out: Path) -> Path:
    return out.parent / f".{out.stem}"


def _checkpoints(out: Path, seed: int, arguments: dict[str, Any]) -> Path:
    """Where the trainings of a seed are kept, apart for other arguments and out of git."""
    kept = _kept(out)
    kept.mkdir(parents=True, exist_ok=True)
    (kept / ".gitignore").write_text("*\n")
    digest = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[:12]
    return kept / f"{seed}-{digest}"


def _takes(function: Function, name: str) -> bool:
    return name in inspect.signature(function).parameters


def _run(
    function: Function, seeds: list[int], arguments: dict[str, Any], watch: Watch
) -> list[dict[str, Any]]:
    """The runs of one seed, or of several that share the time they take together."""
    wall, cpu = time.perf_counter(), time.process_time()
    more = {"watch": watch} if _takes(function, "watch") else {}
    if _takes(function, "seeds"):
        measured = function(seeds=seeds, **arguments, **more)
    else:
        measured = [function(seed=seeds[0], **arguments, **more)]
    took = (time.perf_counter() - wall, time.process_time() - cpu)
    each = [round(seconds / len(seeds), 1) for seconds in took]
    times = {"wall_seconds": each[0], "cpu_seconds": each[1]}
    return [{"seed": seed, **found, **times} for seed, found in zip(seeds, measured, strict=True)]


def _known(out: Path) -> dict[str, Any] | None:
    if not out.is_file():
        return None
    known: dict[str, Any] = read_json(out)
    if not isinstance(known, dict) or not {"arguments", "runs", "figures"} <= set(known):
        raise VardropError(f"Expected {out} to hold a result, but got {str(known)[:80]}.")
    return known


def _open(experiment: Experiment, arguments: dict[str, Any], out: Path) -> dict[str, Any]:
    """The result that `out` holds, in the words of its description, or a fresh one."""
    fresh: dict[str, Any] = {
        "name": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "source": experiment.source,
        "expected": experiment.expected,
        "notes": experiment.notes,
        "arguments": arguments,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": _commit(),
        "data_md5": {name: known.md5 for name, known in IMAGE_SETS.items() if known.md5},
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
    measured = ("versions", "commit", "data_md5", "figures", "runs")
    result = fresh | {key: known.get(key) for key in measured}
    if result != known:  # the description has been reworded since
        _write(result, out)
    return result


def _commit() -> str | None:
    """The commit of the code that runs; None outside of a repository."""
    folder = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


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
