"""Several runs, or several methods with several seeds, beside each other."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
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
from vardrop.app.runs.run import Run
from vardrop.app.score_texts import BOUNDS, number
from vardrop.app.store import StoredRun, read_run
from vardrop.metrics.intervals import repeated
from vardrop.recipes import BaseRecipe

if TYPE_CHECKING:
    from vardrop.app.report import Comparison

Method = BaseRecipe | str | None
_PARTS = ("validation", "test")
_OF_DATA = (*(f.name for f in dataclasses.fields(Roles)), "directory", *_PARTS)
_UNBOUNDED = (-math.inf, math.inf)


def compare_runs(runs: Iterable[str | Path | Run]) -> Comparison:
    """Compare runs on the same data by what they wrote; no net is run.

    Intervals are those of 1000 resamples of the test rows. Runs with the same test rows as the
    first one are compared with it on the same resamples, which tells smaller differences apart
    than two intervals do. Runs on other data are refused.

    Args:
        runs: two or more runs, or their directories; the first is what the others are compared
            with.

    Returns:
        a `Comparison`: print it, or `plot()`, `frame()`, `to_json()`, `write(folder)`.

    >>> import tempfile, vardrop as vd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, recipe in (("plain", None), ("noisy", vd.bayes_by_backprop())):
    ...         run = vd.fit("iris", "mlp", recipe, out=f"{folder}/{name}", epochs=2, folds=1)
    ...     found = vd.compare_runs([f"{folder}/plain", f"{folder}/noisy"])
    >>> list(found.scores), sorted(found.differences["noisy"])[:2]
    (['plain', 'noisy'], ['accuracy', 'auroc'])
    """
    from vardrop.app.report import compare_runs as compare

    return compare(run.directory if isinstance(run, Run) else run for run in runs)


def compare_methods(
    data: Any,
    recipes: Sequence[Method] | Mapping[str, Method],
    seeds: int | Sequence[int] = 5,
    *,
    net: str | nn.Module = "auto",
    out: str | Path | None = None,
    callback: RunCallback | None = None,
    **more: Any,
) -> Comparison:
    """Fit several methods with several seeds on the same splits, and compare them.

    Every seed splits the data anew, in the same way for all methods; scores are those of the test
    part. Means have intervals over the seeds, and so have the differences from the first method,
    seed by seed; where the seeds choose the test rows the intervals are wider by what splits of the
    same rows share (Nadeau & Bengio 2003).

    Every run is kept in the folder, under its method, a checksum of all that it depends on, and its
    seed. What is there already is not trained again: the same call goes on after a stop, and takes
    more seeds or more methods later; runs with other data, settings or options stay beside it.

    Args:
        data: as for `fit`.
        recipes: methods, by name or by value, None for the plain net; or a dictionary of them by
            labels of your own. The first is what the others are compared with.
        seeds: how many, from 0 on, or which.
        net: as for `fit`; one of your own is copied for each run.
        out: the folder; runs/<data>-comparison-<number> by default.
        callback: as for `fit`; is told about the runs as about trials, and their scores by notes.
        more: other arguments of `fit`, the same for all runs. The plain net is not trained beside
            each run (`compare=False`) unless asked for.

    Returns:
        a `Comparison`, which also stands in the folder (comparison.json and comparison.png).

    >>> import tempfile, vardrop as vd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = vd.compare_methods("iris", ["none", "l0"], 2, out=folder, epochs=2, folds=1)
    >>> list(found.scores), found.over
    (['none', 'l0'], 'seeds')
    """
    if wrong := sorted({"seed", "force"} & set(more)):
        raise VardropError(
            f"Expected no `{wrong[0]}` for a comparison, but got {more[wrong[0]]!r}. Pass `seeds`, "
            "and another `out` to begin anew."
        )
    methods, numbers, more = _methods(recipes), _seeds(seeds), {"compare": False, **more}
    of_data = {name: value for name, value in more.items() if name in _OF_DATA}
    checksum = load_dataset(data, seed=numbers[0], **of_data).checksum  # or why it cannot be read
    name = Path(data).stem if isinstance(data, str | Path) else type(data).__name__
    folder = Path(out) if out is not None else free_directory(f"{name}-comparison")
    prepare(folder, force=True)
    runs: dict[str, list[StoredRun]] = {label: [] for label in methods}
    with working(folder):
        for label, method in methods.items():
            identity = _identity(checksum, net, method, more)
            for seed in numbers:
                watch = callback and callback.trial(f"{label}, seed {seed}")
                given = {"recipe": method, "seed": seed, "callback": watch, **more}
                run = _finish(folder / f"{identity}-{seed}", data, net, **given)
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
        known = isinstance(recipe, str) and recipe != "auto"
        method = method_named(recipe) if known else recipe  # type: ignore[arg-type]
        name = str(label) or (recipe if isinstance(recipe, str) else _name(method))
        if name in methods:
            raise VardropError(
                f"Expected methods that differ in their names, but got {name} twice. Give them "
                "labels: recipes={'a': ..., 'b': ...}."
            )
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


def _identity(checksum: str, net: str | nn.Module, method: Method, more: Mapping[str, Any]) -> str:
    """The name of the method and a checksum of all that its runs depend on, but for the seed.

    The checksum of the data knows the parts of a test and of validation, wherever they lie.
    """
    settings = {k: repr(v) for k, v in sorted(more.items()) if k not in (*_PARTS, "directory")}
    tensors = {} if isinstance(net, str) else net.state_dict()
    content = digest(f"{checksum} {net!r} {method!r} {settings}", tensors)
    return re.sub(r"[^\w.=-]+", "-", f"{_name(method)}-{content[:12]}")


def _finish(path: Path, data: Any, net: str | nn.Module, **given: Any) -> StoredRun:
    """The run of a method and a seed: that which is there, taken to its end, or a new one."""
    if (path / "results.json").is_file() and not read_run(path).stopped:
        return read_run(path)
    model = copy.deepcopy(net)
    if (path / "config.json").is_file():
        parts = {"data": data, **{name: given.get(name) for name in _PARTS}}
        in_memory = any(not isinstance(part, str | Path | None) for part in parts.values())
        own = None if isinstance(model, str) else model
        resume(path, own, given["callback"], **(parts if in_memory else {}))
    else:  # whatever a stop left there is no run yet
        fit(data, model, out=path, force=True, **given)
    return read_run(path)


def _compare_seeds(runs: Mapping[str, Sequence[StoredRun]]) -> Comparison:
    from vardrop.app.report import Comparison

    values = {label: _values(own) for label, own in runs.items()}
    reference = next(iter(runs))
    ratio = _test_ratio([run for own in runs.values() for run in own])
    scores = {
        label: {name: repeated(v, ratio, BOUNDS.get(name, _UNBOUNDED)) for name, v in own.items()}
        for label, own in values.items()
    }
    differences = {
        label: {
            name: repeated([a - b for a, b in zip(v, first, strict=True)], ratio)
            for name, v in own.items()
            if (first := values[reference].get(name)) is not None
        }
        for label, own in values.items()
        if label != reference
    }
    notes = ["One seed has no interval: give more."] if len(runs[reference]) == 1 else []
    sizes = {label: _mean_sizes(own) for label, own in runs.items()}
    paths = {label: [str(run.path) for run in own] for label, own in runs.items()}
    return Comparison("seeds", scores, differences, sizes, notes, paths)


def _values(runs: Sequence[StoredRun]) -> dict[str, list[float]]:
    """Scores by seed, those that every seed defines."""
    metrics = [run.results.get("metrics") or {} for run in runs]
    if not all(metrics):
        raise VardropError(
            "Expected a test part to compare methods on, but got none. Leave `test=False` out."
        )
    names = [n for n in metrics[0] if all(isinstance(one.get(n), int | float) for one in metrics)]
    return {name: [float(one[name]) for one in metrics] for name in names}


def _test_ratio(runs: Sequence[StoredRun]) -> float:
    """Rows of the test over those of the training, where the seeds choose them; else 0."""
    rows = {run.results.get("test_rows") for run in runs}
    sizes = runs[0].config["sizes"]
    return sizes["test"] / (sizes["train"] + sizes["validation"]) if len(rows) > 1 else 0.0


def _mean_sizes(runs: Sequence[StoredRun]) -> dict[str, Any]:
    """Sizes of the nets, on average over the seeds."""
    each = [run.sizes() for run in runs]
    names = dict.fromkeys(name for one in each for name in one)
    means = {n: sum(one.get(n, 0) for one in each) / len(each) for n in names}
    return {n: round(v, 2) if n == "seconds" else round(v) for n, v in means.items()}
