"""Compare runs: scores with intervals, and differences from the first run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vardrop._core.errors import VardropError, import_optional, report_arguments
from vardrop._core.files import write_atomically, write_json
from vardrop.app.report.canvas import png
from vardrop.app.report.pictures import score_intervals
from vardrop.app.score_texts import check_scores, estimate_text, judge_difference, title
from vardrop.app.store import SIZES, Record, StoredRun, make_directory, name_runs, read_run
from vardrop.metrics.intervals import (
    Estimate,
    bootstrap,
    bootstrap_estimate,
    class_scores,
    number_scores,
)

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

Estimates = Mapping[str, Mapping[str, Estimate]]
_NUMBERS = ("mean", "y", "lower", "upper")
FILE, PICTURE = "comparison.json", "comparison.png"


@dataclass(frozen=True, eq=False)
class Comparison:
    """Models and their scores.

    Args:
        over: the source of the intervals: "rows" of the test data, or "seeds".
        scores: estimates by model and score, with 95% intervals if they are defined.
        differences: differences from the first model, on the same rows or seeds.
        sizes: weights, weights left, bytes and seconds, by model.
        notes: limits of the comparison, in sentences.
        runs: the run directories, by model.
    """

    over: str
    scores: Estimates
    differences: Estimates
    sizes: Mapping[str, Mapping[str, float]]
    notes: Sequence[str] = ()
    runs: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """The first model, which the others are compared with."""
        return next(iter(self.scores))

    def select(self, scores: Sequence[str] | None = None) -> list[str]:
        """The names of the scores of a table.

        Args:
            scores: names of scores, the most important ones by default.
        """
        names = list(dict.fromkeys(name for by_name in self.scores.values() for name in by_name))
        if scores is None:
            first = names[:2] if names[:1] == ["balanced_accuracy"] else names[:1]
            return [*first, *(n for n in ("nll", "ece", "coverage95") if n in names)]
        check_scores(scores, names)
        return list(scores)

    def difference_text(self, model: str, score: str) -> str:
        """The difference of a model from the first one, and whether it is better or worse."""
        difference = self.differences.get(model, {}).get(score)
        if difference is None:
            return ""
        sign = "+" if difference.value > 0 else ""
        return f"{sign}{estimate_text(difference)} {judge_difference(score, difference)}".rstrip()

    def table(self, scores: Sequence[str] | None = None) -> str:
        """The comparison as text, with a line for each model and one for its difference.

        Args:
            scores: names of scores, the most important ones by default.
        """
        names = self.select(scores)
        kinds = [kind for kind in SIZES if any(kind in sizes for sizes in self.sizes.values())]
        lines = [["", *map(title, names), *(kind.replace("_", " ") for kind in kinds)]]
        for model, estimates in self.scores.items():
            sizes = self.sizes[model]
            counts = [f"{sizes[kind]:,}" if kind in sizes else "" for kind in kinds]
            lines.append([model, *(estimate_text(estimates.get(name)) for name in names), *counts])
            if model in self.differences:
                cells = (self.difference_text(model, name) for name in names)
                lines.append([f"  against {self.reference}", *cells, *[""] * len(kinds)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        count = len(self.runs.get(self.reference, ()))
        means = f"Means of {count} seeds. " if self.over == "seeds" else ""
        text = f"{means}In brackets: 95% intervals over {self.over}."
        return "\n".join([*rows, text, *self.notes])

    def __str__(self) -> str:
        return self.table()

    def frame(self) -> pandas.DataFrame:
        """A DataFrame with a row for each model and score."""
        rows = []
        for model, estimates in self.scores.items():
            for name, estimate in estimates.items():
                other = self.differences.get(model, {}).get(name, Estimate(float("nan")))
                difference = {f"difference_{k}": v for k, v in other._asdict().items()}
                rows.append({"name": model, "score": name, **estimate._asdict(), **difference})
        frame = import_optional("pandas").DataFrame(rows)
        return frame.rename(columns={"difference_value": "difference"})

    def to_json(self) -> Record:
        """The comparison as plain dictionaries."""
        content: Record = {**vars(self), "reference": self.reference}
        for part in ("scores", "differences"):
            content[part] = {
                model: {name: estimate._asdict() for name, estimate in estimates.items()}
                for model, estimates in content[part].items()
            }
        return content

    def plot(self, scores: Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
        """Draw the scores with their intervals, with a panel for each score.

        Args:
            scores: names of scores, the most important ones by default.
            ax: the Axes to draw on, a new figure by default.
        """
        panels = {
            name: {model: e[name] for model, e in self.scores.items() if name in e}
            for name in self.select(scores)
        }
        return score_intervals(panels, ax)

    def write(self, folder: str | Path, scores: Sequence[str] | None = None) -> Path:
        """Write comparison.json and comparison.png into a folder.

        Args:
            folder: the folder.
            scores: names of scores in the picture, the most important ones by default.

        Returns:
            The folder.
        """
        path = make_directory(Path(folder))
        write_json(path / FILE, self.to_json())
        write_atomically(path / PICTURE, png(self.plot(scores)))
        return path


def compare_runs(runs: Iterable[Any]) -> Comparison:
    """Compare runs on the same data by their stored files. No model is run.

    Intervals come from 1000 resamples of the test rows. Runs with the same test rows as the first
    one are compared with it on the same resamples, which can show smaller differences than two
    separate intervals. Runs on other data raise an error.

    Args:
        runs: two or more runs, or their directories. The others are compared with the first.

    Returns:
        A `Comparison`. Print it, or use `plot()`, `frame()`, `to_json()` and `write(folder)`.

    >>> import tempfile, vardrop as vd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, recipe in (("plain", None), ("noisy", vd.bayes_by_backprop())):
    ...         run = vd.fit("iris", "mlp", recipe, out=f"{folder}/{name}", epochs=2, folds=1)
    ...     comparison = vd.compare_runs([f"{folder}/plain", f"{folder}/noisy"])
    >>> list(comparison.scores), sorted(comparison.differences["noisy"])[:2]
    (['plain', 'noisy'], ['accuracy', 'auroc'])
    """
    with report_arguments("runs"):
        stored = [read_run(Path(getattr(run, "directory", run))) for run in runs]
    if len({run.path.resolve() for run in stored}) < max(2, len(stored)):
        paths = ", ".join(str(run.path) for run in stored) or "none"
        raise VardropError(f"Expected two or more different runs to compare, but got {paths}.")
    first = stored[0]
    for run in stored:
        if not run.results.get("metrics"):
            remedy = f"Run `vardrop evaluate {run.path}`, or fit it with a test part."
            raise VardropError(f"{run.path} has no scores on test data. {remedy}")
        expected = _identify_data(first)
        for what, identity in _identify_data(run).items():
            if identity != expected[what]:
                raise VardropError(
                    f"Expected runs on the same data, but the {what} of {run.path} is {identity} "
                    f"and the {what} of {first.path} is {expected[what]}."
                )
    return compare_stored(name_runs(stored))


def _identify_data(run: StoredRun) -> dict[str, str]:
    """The properties of the data that are equal for comparable runs."""
    name = Path(str((run.config.get("data") or {}).get("name") or "")).name
    source = f"{name} with {str(run.config.get('checksum'))[:15]}"
    task, classes = str(run.results.get("task")), str(run.config.get("classes"))
    return {"data": source, "task": task, "target": run.target, "classes": classes}


def compare_stored(runs: Mapping[str, StoredRun]) -> Comparison:
    """Scores of runs with intervals, and differences from the first run on the same test rows."""
    name, first = next(iter(runs.items()))
    scores: dict[str, dict[str, Estimate]] = {}
    differences: dict[str, dict[str, Estimate]] = {}
    notes: list[str] = []
    resamples = {label: _resample(run) for label, run in runs.items()}
    for label, run in runs.items():
        metrics, draws = run.results.get("metrics") or {}, resamples[label]
        defined = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
        scores[label] = {
            k: bootstrap_estimate(v, draws[k]) if k in draws else Estimate(v)
            for k, v in defined.items()
        }
        rows, others = (one.results.get("test_rows") for one in (run, first))
        same = rows is not None and rows == others and _identify_data(run) == _identify_data(first)
        if run is not first and same:
            differences[label] = {
                k: bootstrap_estimate(v - scores[name][k].value, draws[k] - resamples[name][k])
                for k, v in defined.items()
                if k in draws and k in resamples[name]
            }
        elif run is not first and defined:
            notes.append(f"{label} was tested on other rows than {name}.")
        notes += [f"{label} {run.stopped}."] if run.stopped else []
    sizes = {label: run.sizes() for label, run in runs.items()}
    paths = {label: [str(run.path)] for label, run in runs.items()}
    return Comparison("rows", scores, differences, sizes, notes, paths)


def _resample(run: StoredRun) -> dict[str, Tensor]:
    """The scores of resamples of the test rows; empty if the rows are not stored."""
    arrays = run.arrays
    if "log_prob" not in arrays:
        return {}
    logs, weight = arrays["log_prob"], arrays.get("row_weight")
    if "probs" in arrays:
        # As in the scores themselves, a probability of zero counts as the smallest normal number.
        smallest = math.log(torch.finfo(torch.float32).tiny)
        bounded = logs.clamp(min=smallest) if logs.isinf().any() else logs
        scores = class_scores(arrays["probs"].double(), bounded, arrays["labels"].long())
    else:
        mean, y, lower, upper = (arrays[k].flatten().double() for k in _NUMBERS)
        scores = number_scores(mean, y, lower, upper, logs)
    return bootstrap(scores, len(logs), weight)
