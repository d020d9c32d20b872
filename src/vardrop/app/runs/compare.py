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
from vardrop._core.errors import VardropError, import_optional
from vardrop._core.files import digest
from vardrop.app.data import Roles, load_dataset
from vardrop.app.runs.config import free_directory, prepare, working
from vardrop.app.runs.fit import check_arguments, fit, resume
from vardrop.app.runs.models import method_named
from vardrop.app.runs.run_callbacks import RunCallback
from vardrop.app.score_texts import BOUNDS, number
from vardrop.app.store import StoredRun, method_name, read_run
from vardrop.metrics.intervals import Estimate, repetition_estimate
from vardrop.recipes import BaseRecipe

if TYPE_CHECKING:
    from vardrop.app.data.inputs import Source
    from vardrop.app.report import Comparison

Method = BaseRecipe | str | None
_PARTS = ("validation", "test")
_OF_DATA = (*(f.name for f in dataclasses.fields(Roles)), "directory", *_PARTS)


def compare_methods(
    data: Source,
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
    part. Means over the seeds have intervals, and so have the mean differences from the first
    method. If the seeds choose the test rows, the intervals account for the overlap of splits of
    the same rows (Nadeau & Bengio 2003).

    The folder holds every run under its method, a checksum of data, settings and options, and its
    seed. Existing runs are not trained again. The same call resumes after an interruption, and
    later accepts more seeds or methods.

    Args:
        data: as for `fit`.
        recipes: methods or their names, None for the plain model; or a dictionary of them with
            custom labels. The others are compared with the first.
        seeds: the number of seeds, from 0 on, or a list of them.
        net: as for `fit`. A custom network is copied for each run.
        out: the folder, runs/<data>-comparison-<number> by default.
        callback: as for `fit`. It gets the runs as trials, and their scores as notes.
        options: other arguments of `fit`, the same for all runs. The plain model is not trained
            next to each run (`compare=False`) unless requested.

    Returns:
        A `Comparison`, which is also written into the folder (comparison.json and comparison.png).

    >>> import tempfile, vardrop as vd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     options = {"out": folder, "epochs": 2, "folds": 1}
    ...     comparison = vd.compare_methods("iris", ["none", "l0"], 2, **options)
    >>> list(comparison.scores), comparison.over
    (['none', 'l0'], 'seeds')
    """
    if wrong := sorted({"seed", "force"} & set(options)):
        text = f"`{wrong[0]}` is not supported by compare_methods."
        raise VardropError(f"{text} Pass `seeds`, and another `out` to start again.")
    check_arguments(net=net, out=out, callback=callback)
    if not isinstance(seeds, Sequence):
        check_integer("seeds", seeds)
        seeds = range(seeds)
    for seed in seeds:
        check_integer("seeds", seed, 0)
    if not seeds or len(set(seeds)) < len(seeds):
        raise VardropError(f"Expected `seeds` to be different numbers, but got {list(seeds)}.")
    methods, options = _methods(recipes), {"compare": False, **options}
    of_data = {name: options[name] for name in _OF_DATA if name in options}
    checksum = load_dataset(data, seed=seeds[0], **of_data).checksum
    name = Path(data).stem if isinstance(data, str | Path) else type(data).__name__
    folder = Path(out) if out is not None else free_directory(f"{name}-comparison")
    prepare(folder, force=True)
    runs: dict[str, list[StoredRun]] = {label: [] for label in methods}
    with working(folder):
        # The checksum of the data covers validation and test parts, wherever they are stored.
        settings = {k: repr(options[k]) for k in sorted(options.keys() - {*_PARTS, "directory"})}
        tensors = {} if isinstance(net, str) else net.state_dict()
        for label, method in methods.items():
            content = digest(f"{checksum} {net!r} {method!r} {settings}", tensors)
            identity = re.sub(r"[^\w.=-]+", "-", f"{method_name(method)}-{content[:12]}")
            for seed in seeds:
                watch = callback and callback.trial(f"{label}, seed {seed}")
                arguments = {"recipe": method, "seed": seed, "callback": watch, **options}
                run = _finish(folder / f"{identity}-{seed}", data, net, **arguments)
                runs[label].append(run)
                if callback is not None:
                    scores = list((run.results.get("metrics") or {}).items())[:4]
                    text = ", ".join(f"{name} {number(score)}" for name, score in scores)
                    callback.note(f"{label}, seed {seed}: {text}")
    comparison = _compare_seeds(runs)
    comparison.write(folder)
    return comparison


def _methods(recipes: Sequence[Method] | Mapping[str, Method]) -> dict[str, Method]:
    """Methods by their labels."""
    check_type("recipes", recipes, Sequence | Mapping, "a list or a dictionary of methods")
    pairs = recipes.items() if isinstance(recipes, Mapping) else [("", one) for one in recipes]
    methods: dict[str, Method] = {}
    for label, recipe in pairs:
        check_type("recipes", recipe, BaseRecipe | str | None, "names of methods, recipes or None")
        named = isinstance(recipe, str) and recipe != "auto"
        method = method_named(recipe) if named else recipe  # type: ignore[arg-type]
        name = str(label) or (recipe if isinstance(recipe, str) else method_name(method))
        if name in methods:
            text = f"Expected methods with different names, but got {name} twice."
            raise VardropError(f"{text} Pass labels: recipes={{'a': ..., 'b': ...}}.")
        methods[name] = method
    if not methods:
        raise VardropError("Expected `recipes` to name at least one method, but got none.")
    return methods


def _finish(path: Path, data: Source, net: str | nn.Module, **options: Any) -> StoredRun:
    """The run of a method and a seed: an existing one, resumed if needed, or a new one."""
    if (path / "results.json").is_file() and not read_run(path).stopped:
        return read_run(path)
    model = copy.deepcopy(net)
    if (path / "config.json").is_file():
        parts: dict[str, Any] = {"data": data, **{name: options.get(name) for name in _PARTS}}
        if all(isinstance(part, str | Path | None) for part in parts.values()):
            parts = {}  # they are read again
        resume(path, None if isinstance(model, str) else model, options["callback"], **parts)
    else:  # files of an interruption before config.json are not a run yet
        fit(data, model, out=path, force=True, **options)
    return read_run(path)


def _compare_seeds(runs: Mapping[str, Sequence[StoredRun]]) -> Comparison:
    from vardrop.app.report import Comparison

    frame = import_optional("pandas").DataFrame
    by_seed = {label: _scores_by_seed(stored) for label, stored in runs.items()}
    (reference, first), *_ = runs.items()
    rows = {run.results.get("test_rows") for stored in runs.values() for run in stored}
    counts, others = first[0].config["sizes"], by_seed[reference]
    trained = counts["train"] + counts["validation"]
    ratio = counts["test"] / trained if len(rows) > 1 else 0.0  # 0 if no seed chooses the rows
    scores: dict[str, dict[str, Estimate]] = {}
    differences: dict[str, dict[str, Estimate]] = {}
    sizes: dict[str, dict[str, float]] = {}
    for label, series in by_seed.items():
        scores[label] = {
            name: repetition_estimate(one, ratio, BOUNDS.get(name, (-math.inf, math.inf)))
            for name, one in series.items()
        }
        gaps = {
            name: [a - b for a, b in zip(one, others[name], strict=True)]
            for name, one in series.items()
            if name in others
        }
        differences[label] = {name: repetition_estimate(gap, ratio) for name, gap in gaps.items()}
        means = frame([run.sizes() for run in runs[label]]).fillna(0.0).mean().to_dict()
        sizes[label] = {n: round(v, 2) if n == "seconds" else round(v) for n, v in means.items()}
    del differences[reference]
    notes = ["One seed has no interval. Use more seeds."] if len(first) == 1 else []
    paths = {label: [str(run.path) for run in stored] for label, stored in runs.items()}
    return Comparison("seeds", scores, differences, sizes, notes, paths)


def _scores_by_seed(runs: Sequence[StoredRun]) -> dict[str, list[float]]:
    """The scores of all seeds, without scores that are undefined for a seed."""
    metrics = [run.results.get("metrics") or {} for run in runs]
    if not all(metrics):
        raise VardropError("`test=False` cannot be combined with compare_methods.")
    names = [n for n in metrics[0] if all(isinstance(one.get(n), int | float) for one in metrics)]
    return {name: [float(one[name]) for one in metrics] for name in names}
