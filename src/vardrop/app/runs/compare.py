"""Compare several methods with several seeds."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from vardrop._core.checks import check_integer, check_type
from vardrop._core.errors import VardropError
from vardrop._core.files import digest
from vardrop._core.values import to_json
from vardrop.app.data import Roles, load_dataset
from vardrop.app.runs.callbacks import RunCallback
from vardrop.app.runs.config import free_directory, prepare, working
from vardrop.app.runs.fit import fit, resume
from vardrop.app.runs.models import method_named
from vardrop.app.score_texts import BOUNDS, number
from vardrop.app.store import StoredRun, read_run
from vardrop.metrics.intervals import repetition_estimate
from vardrop.recipes import BaseRecipe

if TYPE_CHECKING:
    from vardrop.app.report import Comparison

Method = BaseRecipe | str | None
_PARTS = ("validation", "test")
_OF_DATA = (*(f.name for f in dataclasses.fields(Roles)), "directory", *_PARTS)
_UNBOUNDED = (-math.inf, math.inf)


def compare_methods(
    data: Any,
    recipes: Sequence[Method] | Mapping[str, Method],
    seeds: int | Sequence[int] = 5,
    *,
    net: str | nn.Module = "auto",
    out: str | Path | None = None,
    callback: RunCallback | None = None,
    **options: Any,
) -> Comparison:
    """Fit several methods with several seeds on the same splits, and compare them.

    Every seed splits the data again, in the same way for all methods. Scores are on the test
    part. Means have intervals over the seeds, and so have the differences from the first method,
    seed by seed. If the seeds choose the test rows, the intervals account for what splits of the
    same rows share (Nadeau & Bengio 2003).

    Every run is kept in the folder, under its method, a checksum of all that it depends on, and its
    seed. Existing runs are not trained again: the same call resumes after a stop, and later accepts
    more seeds or methods. Runs with other data, settings or options are kept.

    Args:
        data: as for `fit`.
        recipes: methods, by name or by value, None for the plain net; or a dictionary of them by
            custom labels. The others are compared with the first.
        seeds: how many, from 0 on, or which.
        net: as for `fit`; a custom network is copied for each run.
        out: the folder; runs/<data>-comparison-<number> by default.
        callback: as for `fit`; gets the runs as trials, and their scores as notes.
        options: other arguments of `fit`, the same for all runs. The plain model is not trained
            next to each run (`compare=False`) unless requested.

    Returns:
        A `Comparison`, which is also written into the folder (comparison.json and comparison.png).

    >>> import tempfile, vardrop as vd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = vd.compare_methods("iris", ["none", "l0"], 2, out=folder, epochs=2, folds=1)
    >>> list(found.scores), found.over
    (['none', 'l0'], 'seeds')
    """
    if wrong := sorted({"seed", "force"} & set(options)):
        text = f"Expected no `{wrong[0]}` for a comparison, but got {options[wrong[0]]!r}."
        raise VardropError(f"{text} Pass `seeds`, and another `out` to start again.")
    methods, numbers, options = _methods(recipes), _seeds(seeds), {"compare": False, **options}
    of_data = {name: value for name, value in options.items() if name in _OF_DATA}
    checksum = load_dataset(data, seed=numbers[0], **of_data).checksum  # or why it cannot be read
    name = Path(data).stem if isinstance(data, str | Path) else type(data).__name__
    folder = Path(out) if out is not None else free_directory(f"{name}-comparison")
    prepare(folder, force=True)
    runs: dict[str, list[StoredRun]] = {label: [] for label in methods}
    with working(folder):
        for label, method in methods.items():
            identity = _identity(checksum, net, method, options)
            for seed in numbers:
                watch = callback and callback.trial(f"{label}, seed {seed}")
                arguments = {"recipe": method, "seed": seed, "callback": watch, **options}
                run = _finish(folder / f"{identity}-{seed}", data, net, **arguments)
                runs[label].append(run)
                if callback is not None:
                    scores = list((run.results.get("metrics") or {}).items())[:4]
                    shown = ", ".join(f"{score} {number(value)}" for score, value in scores)
                    callback.note(f"{label}, seed {seed}: {shown}")
    comparison = _compare_seeds(runs)
    comparison.write(folder)
    return comparison


def _methods(recipes: Any) -> dict[str, Method]:
    """Methods by their labels."""
    check_type("recipes", recipes, Sequence | Mapping, "a list or a dictionary of methods")
    listed = [recipes] if isinstance(recipes, str) else recipes
    pairs = listed.items() if isinstance(listed, Mapping) else [("", one) for one in listed]
    methods: dict[str, Method] = {}
    for label, recipe in pairs:
        check_type("recipes", recipe, BaseRecipe | str | None, "names of methods, recipes or None")
        named = isinstance(recipe, str) and recipe != "auto"
        method = method_named(recipe) if named else recipe  # type: ignore[arg-type]
        name = str(label) or (recipe if isinstance(recipe, str) else _name(method))
        if name in methods:
            text = f"Expected methods that differ in their names, but got {name} twice."
            raise VardropError(f"{text} Give them labels: recipes={{'a': ..., 'b': ...}}.")
        methods[name] = method
    if not methods:
        raise VardropError("Expected `recipes` to name at least one method, but got none.")
    return methods


def _name(method: Method) -> str:
    from vardrop.app.report.summary import method_name

    return method_name(to_json(method) if isinstance(method, BaseRecipe) else method)


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    if isinstance(seeds, str) or not isinstance(seeds, Sequence):
        check_integer("seeds", seeds)
        return list(range(int(seeds)))
    for seed in seeds:
        check_integer("seeds", seed, 0)
    if not seeds or len(set(seeds)) < len(seeds):
        raise VardropError(f"Expected `seeds` to be different numbers, but got {list(seeds)}.")
    return list(seeds)


def _identity(checksum: str, net: Any, method: Method, options: Mapping[str, Any]) -> str:
    """The name of the method and a checksum of all that its runs depend on, but for the seed.

    The checksum of the data covers custom validation and test parts, wherever they are stored.
    """
    settings = {k: repr(v) for k, v in sorted(options.items()) if k not in (*_PARTS, "directory")}
    tensors = {} if isinstance(net, str) else net.state_dict()
    content = digest(f"{checksum} {net!r} {method!r} {settings}", tensors)
    return re.sub(r"[^\w.=-]+", "-", f"{_name(method)}-{content[:12]}")


def _finish(path: Path, data: Any, net: str | nn.Module, **options: Any) -> StoredRun:
    """The run of a method and a seed: that which is there, taken to its end, or a new one."""
    if (path / "results.json").is_file() and not read_run(path).stopped:
        return read_run(path)
    model = copy.deepcopy(net)
    if (path / "config.json").is_file():
        parts = {"data": data, **{name: options.get(name) for name in _PARTS}}
        in_memory = any(not isinstance(part, str | Path | None) for part in parts.values())
        own = None if isinstance(model, str) else model
        resume(path, own, options["callback"], **(parts if in_memory else {}))
    else:  # whatever a stop left there is no run yet
        fit(data, model, out=path, force=True, **options)
    return read_run(path)


def _compare_seeds(runs: Mapping[str, Sequence[StoredRun]]) -> Comparison:
    from vardrop.app.report import Comparison

    values = {label: _values(stored) for label, stored in runs.items()}
    reference = next(iter(runs))
    rows = {run.results.get("test_rows") for stored in runs.values() for run in stored}
    counts = runs[reference][0].config["sizes"]
    trained = counts["train"] + counts["validation"]
    ratio = counts["test"] / trained if len(rows) > 1 else 0.0  # 0 if no seed chooses the rows
    scores = {
        label: {
            name: repetition_estimate(v, ratio, BOUNDS.get(name, _UNBOUNDED))
            for name, v in stored.items()
        }
        for label, stored in values.items()
    }
    differences = {
        label: {
            name: repetition_estimate([a - b for a, b in zip(v, first, strict=True)], ratio)
            for name, v in stored.items()
            if (first := values[reference].get(name)) is not None
        }
        for label, stored in values.items()
        if label != reference
    }
    notes = ["One seed has no interval: give more."] if len(runs[reference]) == 1 else []
    sizes: dict[str, dict[str, float]] = {}
    for label, stored in runs.items():
        each = [run.sizes() for run in stored]
        names = dict.fromkeys(name for one in each for name in one)
        means = {n: sum(one.get(n, 0) for one in each) / len(each) for n in names}
        sizes[label] = {n: round(v, 2) if n == "seconds" else round(v) for n, v in means.items()}
    paths = {label: [str(run.path) for run in stored] for label, stored in runs.items()}
    return Comparison("seeds", scores, differences, sizes, notes, paths)


def _values(runs: Sequence[StoredRun]) -> dict[str, list[float]]:
    """Scores by seed, those that every seed defines."""
    metrics = [run.results.get("metrics") or {} for run in runs]
    if not all(metrics):
        text = "Expected a test part to compare methods on, but got none."
        raise VardropError(f"{text} Leave `test=False` out.")
    names = [n for n in metrics[0] if all(isinstance(one.get(n), int | float) for one in metrics)]
    return {name: [float(one[name]) for one in metrics] for name in names}
