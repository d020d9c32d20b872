"""Several nets beside each other: scores with intervals, and differences from the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vardrop._core.errors import VardropError, needed
from vardrop._core.files import write_atomically, write_json
from vardrop.app.report.page import named
from vardrop.app.report.pictures.canvas import png
from vardrop.app.report.pictures.comparison import score_intervals
from vardrop.app.report.score_texts import MEANINGS, check_scores, number, title
from vardrop.app.store import StoredRun, read_run
from vardrop.metrics.intervals import (
    Estimate,
    Weighted,
    bootstrap,
    class_scores,
    estimated,
    number_scores,
)

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

Estimates = Mapping[str, Mapping[str, Estimate]]
SIZES = ("weights", "weights_left", "packed_bytes", "seconds")
_NUMBERS = ("mean", "y", "lower", "upper")  # by row
FILE, PICTURE = "comparison.json", "comparison.png"


@dataclass(frozen=True, eq=False)
class Comparison:
    """Nets and their scores.

    Args:
        over: what the intervals are over: the "rows" of the test, or "seeds".
        scores: by net and score, with 95 % intervals where they are known.
        differences: from the first net, on the same rows or seeds, by net and score.
        sizes: by net: weights, what is left of them, and what else is known.
        notes: what the numbers cannot tell.
        runs: the directories, by net.
    """

    over: str
    scores: Estimates
    differences: Estimates
    sizes: Mapping[str, Mapping[str, Any]]
    notes: Sequence[str] = ()
    runs: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """The net that the others are compared with: the first one."""
        return next(iter(self.scores))

    def shown(self, scores: Sequence[str] | None = None) -> list[str]:
        """The scores of a table: the given ones, or those to be read first."""
        known = list(dict.fromkeys(name for found in self.scores.values() for name in found))
        if scores is None:
            first = known[:2] if known[:1] == ["balanced_accuracy"] else known[:1]
            return [*first, *(n for n in ("nll", "ece", "coverage95") if n in known)]
        check_scores(scores, known)
        return list(scores)

    def table(self, scores: Sequence[str] | None = None) -> str:
        """The table as text; a line for each net, and one on how it differs from the first."""
        names = self.shown(scores)
        kinds = [kind for kind in SIZES if any(kind in found for found in self.sizes.values())]
        lines = [["", *map(title, names), *(kind.replace("_", " ") for kind in kinds)]]
        for net, found in self.scores.items():
            sizes = [_size(self.sizes[net].get(kind)) for kind in kinds]
            lines.append([net, *(_cell(found.get(name)) for name in names), *sizes])
            if other := self.differences.get(net):
                cells = (_difference(name, other.get(name)) for name in names)
                lines.append([f"  against {self.reference}", *cells, *[""] * len(kinds)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = [
            "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        count = len(self.runs.get(self.reference, ()))
        means = f"Means of {count} seeds; in" if self.over == "seeds" else "In"
        told = f"{means} brackets: 95 % intervals over {self.over}."
        return "\n".join([*rows, told, *self.notes])

    def __str__(self) -> str:
        return self.table()

    def frame(self) -> pandas.DataFrame:
        """A DataFrame with a row for each net and score."""
        rows = []
        for net, found in self.scores.items():
            for name, estimate in found.items():
                other = self.differences.get(net, {}).get(name, Estimate(float("nan")))
                apart = {f"difference_{k}": v for k, v in other._asdict().items()}
                rows.append({"name": net, "score": name, **estimate._asdict(), **apart})
        return needed("pandas").DataFrame(rows).rename(columns={"difference_value": "difference"})

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain dictionaries."""
        return {
            "over": self.over,
            "reference": self.reference,
            "scores": _plain(self.scores),
            "differences": _plain(self.differences),
            "sizes": {net: dict(found) for net, found in self.sizes.items()},
            "notes": list(self.notes),
            "runs": {net: list(paths) for net, paths in self.runs.items()},
        }

    def plot(self, scores: Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
        """The picture: a panel for each score."""
        found = {
            name: {net: own[name] for net, own in self.scores.items() if name in own}
            for name in self.shown(scores)
        }
        return score_intervals(found, ax)

    def write(self, folder: str | Path, scores: Sequence[str] | None = None) -> Path:
        """Write comparison.json and comparison.png into a folder; the folder."""
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise VardropError(
                f"Expected to make the directory {path}, but got: {failure.strerror}."
            ) from failure
        write_json(path / FILE, self.to_json())
        write_atomically(path / PICTURE, png(self.plot(scores)))
        return path


def _plain(found: Estimates) -> dict[str, Any]:
    return {net: {k: v._asdict() for k, v in own.items()} for net, own in found.items()}


def _cell(found: Estimate | None) -> str:
    if found is None:
        return "undefined"
    if found.low is None:
        return number(found.value)
    return f"{number(found.value)} [{number(found.low)}, {number(found.high)}]"


def _difference(name: str, found: Estimate | None) -> str:
    if found is None:
        return ""
    sign = "+" if found.value > 0 else ""
    better = MEANINGS[name].better if name in MEANINGS else ""
    wanted = {"higher": 1, "lower": -1}.get(better)
    word = "" if wanted is None or not found.sign else found.sign == wanted
    return f"{sign}{_cell(found)}" + ("" if word == "" else " better" if word else " worse")


def _size(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return "" if value is None else f"{value:,}"


def sizes(run: StoredRun) -> dict[str, Any]:
    """Weights of a net, what is left of them by compression or the method's rule, seconds."""
    counts = {str(row["name"]): int(row["weights"]) for row in run.results.get("layers") or []}
    packed = run.results.get("compression") or {}
    removed = run.fractions()
    left = packed.get("weights_after")
    if left is None and removed:
        gone = (removed.get(name, 0.0) * count for name, count in counts.items())
        left = sum(counts.values()) - round(sum(gone))
    seconds = sum(float(row.get("seconds") or 0) for row in run.history)
    time = round(seconds, 2) if run.history else None
    found = (sum(counts.values()) or None, left, packed.get("packed_bytes"), time)
    return {k: value for k, value in zip(SIZES, found, strict=True) if value is not None}


def compare_runs(paths: Iterable[str | Path]) -> Comparison:
    """Compare runs on the same data by what they wrote; see `vardrop.compare_runs`."""
    runs = _checked([read_run(Path(path)) for path in paths])
    first = next(iter(runs.values()))
    scores: dict[str, dict[str, Estimate]] = {}
    differences: dict[str, dict[str, Estimate]] = {}
    notes: list[str] = []
    drawn = {name: _drawn(run) for name, run in runs.items()}
    reference = drawn[next(iter(runs))]
    for name, run in runs.items():
        values, draws = run.results["metrics"], drawn[name]
        known = {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
        scores[name] = {
            k: estimated(v, draws[k]) if k in draws else Estimate(v) for k, v in known.items()
        }
        if run is not first and (why := _other_rows(first, run)):
            notes.append(f"{name} was tested on other rows than {next(iter(runs))} ({why}).")
        elif run is not first:
            differences[name] = {
                k: estimated(v - float(first.results["metrics"][k]), draws[k] - reference[k])
                for k, v in known.items()
                if k in draws and k in reference
            }
        notes += [f"{name} {found}." for found in filter(None, [stopped(run)])]
    found = {name: sizes(run) for name, run in runs.items()}
    where = {name: [str(run.path)] for name, run in runs.items()}
    return Comparison("rows", scores, differences, found, notes, where)


def _checked(runs: Sequence[StoredRun]) -> dict[str, StoredRun]:
    """Runs by name, if they can be compared."""
    if len({run.path.resolve() for run in runs}) < max(2, len(runs)):
        shown = ", ".join(str(run.path) for run in runs) or "none"
        raise VardropError(f"Expected two or more different runs to compare, but got {shown}.")
    first = runs[0]
    for run in runs:
        if not run.results.get("metrics"):
            done = "has no test part" if run.results else "was not evaluated"
            raise VardropError(
                f"Expected scores on test data of {run.path}, but it {done}. "
                + ("Fit it with one." if run.results else f"Try `vardrop evaluate {run.path}`.")
            )
        for what, own, others in (
            ("data", _data(run), _data(first)),
            ("task", run.task, first.task),
            ("target", run.target, first.target),
            ("classes", run.config.get("classes"), first.config.get("classes")),
        ):
            if own != others:
                raise VardropError(
                    f"Expected runs on the same data, but the {what} of {run.path} is {own} and "
                    f"that of {first.path} {others}. Compare runs on one data set."
                )
    return named(runs)


def _data(run: StoredRun) -> str:
    name = Path(str((run.config.get("data") or {}).get("name") or "")).name
    return f"{name} with {str(run.config.get('checksum'))[:15]}"


def _drawn(run: StoredRun) -> dict[str, Tensor]:
    """The scores of resamples of the test rows, as far as these are stored."""
    arrays, logs = run.arrays, run.arrays.get("log_prob")
    weight = arrays.get("row_weight")
    found: dict[str, Weighted] = {}
    if "probs" in arrays and "labels" in arrays:
        probs, y = arrays["probs"].double(), arrays["labels"].long()
        logs = probs.gather(1, y[:, None]).flatten().log() if logs is None else logs
        least = torch.finfo(torch.float32).tiny
        bounded = logs.clamp(min=torch.tensor(least).log().item()) if logs.isinf().any() else logs
        found = class_scores(probs, bounded, y)
    elif "y" in arrays and "mean" in arrays:
        mean, y, lower, upper = (arrays[n].flatten().double() for n in _NUMBERS)
        found = number_scores(mean, y, lower, upper, logs)
    rows = len(arrays.get("labels", arrays.get("y", ())))
    return bootstrap(found, rows, weight) if found else {}


def _other_rows(first: StoredRun, run: StoredRun) -> str:
    """Why two runs do not share their test rows; empty where they do."""
    own, others = run.results.get("test_rows"), first.results.get("test_rows")
    if own and others:
        same = own == others
    else:  # of runs before this was kept
        keys = ("checksum", "seed", "sizes", "data")
        same = all(run.config.get(key) == first.config.get(key) for key in keys)
    if same:
        return ""
    seeds = [found.config.get("seed") for found in (run, first)]
    return f"seed {seeds[0]} instead of {seeds[1]}" if seeds[0] != seeds[1] else "split otherwise"


def stopped(run: StoredRun) -> str:
    """What to say of a run that did not come to its end; empty for one that did."""
    settings = run.config.get("settings") or {}
    epochs, done = settings.get("epochs"), len(run.history)
    wanted = (epochs or 0) + (settings.get("pretrain") or 0)
    if settings.get("patience") is not None or done >= wanted:
        return ""
    return f"was stopped after {done} of {wanted} epochs"
