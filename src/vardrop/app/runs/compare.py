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

from vardrop.app.runs.config import free_directory, working
from vardrop.app.runs.fit import Auto, fit, resume
from vardrop.app.runs.models import PLAIN, method_named
from vardrop.app.runs.run import Run
from vardrop._core.checks import check_integer, check_type
from vardrop.app.data import Roles, load_dataset
from vardrop._core.errors import VardropError
from vardrop._core.files import digest, read_json, sealed, unsealed, write_json
from vardrop.metrics.intervals import repeated
from vardrop.app.score_texts import BOUNDS, number
from vardrop.app.store import StoredRun, read_run
from vardrop.recipes import BaseRecipe
from vardrop.app.runs.callbacks import Observer
from vardrop._core.values import to_json

if TYPE_CHECKING:
    from vardrop.objective import ELBO
    from vardrop.app.report import Comparison
    from vardrop.tuning.train import Loop

Method = BaseRecipe | str | None
Methods = Mapping[str, BaseRecipe | Auto | None]
_ORDER = "order.json"  # what a folder compares, so that it is not mixed with anything else
_PARTS = ("validation", "test")
_ELSEWHERE = (*_PARTS, "directory")  # the checksum of the data knows them, wherever they lie
_UNBOUNDED = (-math.inf, math.inf)
_OF_DATA = (*(f.name for f in dataclasses.fields(Roles)), "directory", *_PARTS)


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
    observer: Observer | None = None,
    **more: Any,
) -> Comparison:
    """Fit several methods with several seeds on the same splits, and compare them.

    Every seed splits the data anew, in the same way for all methods; scores are those of the test
    part. Means have intervals over the seeds, and so have the differences from the first method,
    seed by seed; where the seeds choose the test rows the intervals are wider by what splits of the
    same rows share (Nadeau & Bengio 2003).

    Every run is kept in a folder, and what is there already is not trained again: the same call
    goes on after a stop, and takes more seeds or more methods later.

    Args:
        data: as for `fit`.
        recipes: methods, by name or by value, None for the plain net; or a dictionary of them by
            labels of your own. The first is what the others are compared with.
        seeds: how many, from 0 on, or which.
        net: as for `fit`; one of your own is copied for each run.
        out: the folder; runs/<data>-comparison-<number> by default.
        observer: as for `fit`; is told by a note which run begins.
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
    _prepare(folder)
    order = _Order(data, net, folder, observer, more)
    with working(folder):
        order.agree(methods, checksum)
        runs = {
            label: [order.run(label, recipe, seed) for seed in numbers]
            for label, recipe in methods.items()
        }
    found = _compared(runs, numbers)
    found.write(folder)
    return found


def _methods(recipes: Any) -> Methods:
    """Recipes by their labels, no two in one directory."""
    from vardrop.app.report.summary import method_name

    check_type("recipes", recipes, Sequence | Mapping, "a list or a dictionary of methods")
    listed = [recipes] if isinstance(recipes, str) else recipes
    given = listed.items() if isinstance(listed, Mapping) else [("", one) for one in listed]
    found: dict[str, Any] = {}
    for own, recipe in given:
        check_type("recipes", recipe, BaseRecipe | str | None, "names of methods, recipes or None")
        known = recipe if not isinstance(recipe, str) or recipe == "auto" else method_named(recipe)
        usual = recipe if isinstance(recipe, str) else PLAIN
        label = own or (method_name(to_json(recipe)) if isinstance(recipe, BaseRecipe) else usual)
        if _slug(label) in map(_slug, found):
            raise VardropError(
                f"Expected methods that differ in their names, but got {label} twice. Give them "
                "labels: recipes={'a': ..., 'b': ...}."
            )
        found[str(label)] = known
    if not found:
        raise VardropError("Expected `recipes` to name at least one method, but got none.")
    return found


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    if isinstance(seeds, str) or not isinstance(seeds, Sequence):
        check_integer("seeds", seeds)
        return list(range(int(seeds)))
    for seed in seeds:
        check_integer("seeds", seed, 0)
    if not seeds or len(set(seeds)) < len(seeds):
        raise VardropError(f"Expected `seeds` to be different numbers, but got {list(seeds)}.")
    return list(seeds)


def _slug(label: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", str(label)).strip("-.") or "method"


def _prepare(folder: Path) -> None:
    if folder.is_dir() and any(folder.glob("[!.]*")) and not (folder / _ORDER).is_file():
        raise VardropError(
            f"Expected {folder} to be free, or to hold an earlier comparison, but it holds other "
            "files. Choose another directory."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise VardropError(
            f"Expected to make the directory {folder}, but got: {failure.strerror}."
        ) from failure


class _Progress(Observer):
    """Passes on how a training goes, and none of the words about it."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def trial(self, label: str) -> Observer:
        return _Progress(self.observer.trial(label))

    def start(self, first_epoch: int, loop: Loop) -> None:
        self.observer.start(first_epoch, loop)

    def step(self, loop: Loop) -> None:
        self.observer.step(loop)

    def epoch(self, record: dict[str, Any], elbo: ELBO) -> None:
        self.observer.epoch(record, elbo)

    def stop(self) -> None:
        self.observer.stop()


@dataclasses.dataclass(frozen=True)
class _Order:
    """What is compared, and where it is kept."""

    data: Any
    net: str | nn.Module
    folder: Path
    observer: Observer | None
    more: Mapping[str, Any]

    def agree(self, methods: Methods, checksum: str) -> None:
        """Refuse a folder of other data, settings or methods; keep what this one is for."""
        path, net = self.folder / _ORDER, self.net
        own = net if isinstance(net, str) else f"{net!r} {digest('', net.state_dict())}"
        settings = {k: repr(v) for k, v in sorted(self.more.items()) if k not in _ELSEWHERE}
        wanted = {"data": checksum, "net": own, "settings": settings}
        made = {k: v if isinstance(v, str | None) else to_json(v) for k, v in methods.items()}
        before = unsealed(read_json(path), str(path), True) if path.is_file() else {}
        for name, value in (wanted if before else {}).items():
            if before.get(name) != value:
                raise VardropError(
                    f"Expected the {name} of the comparison in {self.folder} to stay as before, "
                    f"{before.get(name)!r}, but got {value!r}. Choose another directory."
                )
        known = before.get("methods", {})
        if other := [label for label in made if known.get(label, made[label]) != made[label]]:
            raise VardropError(
                f"Expected the method {other[0]} of the comparison in {self.folder} to stay as "
                "before, but it has other options. Give it another label."
            )
        write_json(path, sealed({**wanted, "methods": {**known, **made}}))

    def run(self, label: str, recipe: BaseRecipe | Auto | None, seed: int) -> StoredRun:
        """The run of a method and a seed: that which is there, taken to its end, or a new one."""
        path = self.folder / f"{_slug(label)}-{seed}"
        if not (path / "results.json").is_file() or read_run(path).stopped:
            self._train(path, recipe, seed)
        found = read_run(path)
        if self.observer is not None:
            scores = list((found.results.get("metrics") or {}).items())[:4]
            shown = ", ".join(f"{name} {number(value)}" for name, value in scores)
            self.observer.note(f"{label}, seed {seed}: {shown}")
        return found

    def _train(self, path: Path, recipe: BaseRecipe | Auto | None, seed: int) -> None:
        watch = None if self.observer is None else _Progress(self.observer)
        net = self.net if isinstance(self.net, str) else copy.deepcopy(self.net)
        if not (path / "config.json").is_file():  # whatever a stop left there is no run yet
            fit(
                self.data, net, recipe, out=path, observer=watch, seed=seed, force=True, **self.more
            )
            return
        own = None if isinstance(net, str) else net
        parts = {name: self.more.get(name) for name in _PARTS}
        in_memory = any(not isinstance(d, str | Path | None) for d in (self.data, *parts.values()))
        resume(path, own, watch, **({"data": self.data, **parts} if in_memory else {}))


def _compared(runs: Mapping[str, Sequence[StoredRun]], seeds: Sequence[int]) -> Comparison:
    from vardrop.app.report import Comparison

    values = {label: _values(own) for label, own in runs.items()}
    first, ratio = (
        next(iter(values.values())),
        _ratio([run for own in runs.values() for run in own]),
    )
    scores = {
        label: {
            name: repeated(found, ratio, BOUNDS.get(name, _UNBOUNDED))
            for name, found in own.items()
        }
        for label, own in values.items()
    }
    differences = {
        label: {
            name: repeated([a - b for a, b in zip(found, first[name], strict=True)], ratio)
            for name, found in own.items()
            if name in first
        }
        for label, own in values.items()
        if own is not first
    }
    notes = ["One seed has no interval: give more."] if len(seeds) == 1 else []
    sizes = {label: _sizes(own) for label, own in runs.items()}
    where = {label: [str(run.path) for run in own] for label, own in runs.items()}
    return Comparison("seeds", scores, differences, sizes, notes, where)


def _values(runs: Sequence[StoredRun]) -> dict[str, list[float]]:
    """Scores by seed, those that every seed defines."""
    found = [run.results.get("metrics") or {} for run in runs]
    if not all(found):
        raise VardropError(
            "Expected a test part to compare methods on, but got none. Leave `test=False` out."
        )
    names = [n for n in found[0] if all(isinstance(one.get(n), int | float) for one in found)]
    return {name: [float(one[name]) for one in found] for name in names}


def _ratio(runs: Sequence[StoredRun]) -> float:
    """Rows of the test over those of the training, where the seeds choose them; else 0."""
    rows = {run.results.get("test_rows") for run in runs}
    sizes = runs[0].config["sizes"]
    return sizes["test"] / (sizes["train"] + sizes["validation"]) if len(rows) > 1 else 0.0


def _sizes(runs: Sequence[StoredRun]) -> dict[str, Any]:
    """Sizes of the nets, on average over the seeds."""
    found = [run.sizes() for run in runs]
    names = dict.fromkeys(name for one in found for name in one)
    means = {n: sum(one.get(n, 0) for one in found) / len(found) for n in names}
    return {n: round(v, 2) if n == "seconds" else round(v) for n, v in means.items()}
