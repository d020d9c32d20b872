"""The pictures of a report: which there are, the arrays of a run that each needs, their order."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes

from vardrop.errors import VardropError
from vardrop.report.pictures import certainty, maps, sparsity, training
from vardrop.report.pictures.canvas import png, short
from vardrop.report.run import StoredRun

# A picture may come in several parts, such as one per layer; no part means that data is absent.
Parts = dict[str, Axes]
_IMAGES = 12  # that are shown of each kind
_LEVEL = 0.95  # of the intervals that `evaluate` stores


@dataclass(frozen=True)
class Kind:
    """A kind of picture: where it stands, what it shows, for which task, and how it is drawn."""

    section: str
    title: str
    caption: str | Callable[[StoredRun], str]
    draw: Callable[[StoredRun], Parts]
    task: str | None = None
    photo: bool = False

    def of(self, run: StoredRun) -> Parts:
        """The parts of this picture for a run; unfit data is an error that names the directory."""
        try:
            return self.draw(run)
        except (ValueError, TypeError, KeyError, RuntimeError, IndexError) as error:
            raise VardropError(
                f"Expected the files of `{run.path}` to hold what the picture "
                f"{self.title!r} needs, but got: {error} Check history.jsonl, results.json and "
                "arrays.safetensors there, or run the command again."
            ) from error

    def says(self, run: StoredRun) -> str:
        """The caption, which may depend on what the run found."""
        return self.caption if isinstance(self.caption, str) else self.caption(run)

    def suits(self, run: StoredRun) -> bool:
        """Whether the picture has a meaning for the run's task."""
        return self.task is None or run.task is None or run.task == self.task


def _training(run: StoredRun) -> Parts:
    if not run.history:
        return {}
    newer = int(run.config.get("version", 1)) > 2
    # The loss is of scaled targets; validation has been in the units of the target since version 3.
    shift = math.log(run.unit)
    rows = [
        {**row, "nll": row["nll"] + shift} if newer and row.get("nll") is not None else row
        for row in run.history
    ]
    return {"": training.training_curves(rows)}


def threshold(run: StoredRun) -> float:
    """The threshold on log alpha that the run pruned with, else the usual 3."""
    found = (run.results.get("compression") or {}).get("threshold")
    return 3.0 if found is None else float(found)


def _alpha(run: StoredRun) -> Parts:
    layers = {run.label(name): values for name, values in run.layers("log_alpha").items()}
    return {"": sparsity.alpha_histograms(layers, threshold(run))} if layers else {}


def _alpha_caption(run: StoredRun) -> str:
    """What stands on the two sides of the threshold, whatever it is."""
    limit = threshold(run)
    pruned = (run.results.get("compression") or {}).get("threshold") is not None
    text = (
        "alpha is the variance of the noise of a weight over the square of the weight. Weights to "
        f"the right of the dashed line, with alpha above {math.exp(limit):.2g}, "
        f"{'were removed' if pruned else 'would be removed by the usual rule'}."
    )
    if limit < 0:
        text += " So low a threshold removes weights that are larger than their noise as well."
    return text


def _layers(run: StoredRun) -> Parts:
    fractions = {run.label(name): value for name, value in run.fractions().items()}
    return {"": sparsity.layer_sparsity(fractions)} if fractions else {}


def _curve(run: StoredRun) -> Parts:
    curve = run.results.get("curve")
    usual = "rmse" if run.task == "regression" else "accuracy"
    name = (run.results.get("compression") or {}).get("score", usual)
    return {"": sparsity.sparsity_curve(curve, str(name))} if curve else {}


def _curve_caption(run: StoredRun) -> str:
    rises = run.task != "regression"
    return (
        "What removing more weights costs on validation data; one point per threshold, "
        f"{'higher' if rises else 'lower'} is better."
    )


def _weights(run: StoredRun) -> Parts:
    pruned = run.layers("weight_pruned")
    layers = run.layers("weight")
    return {run.label(n): maps.weight_maps(w, pruned.get(n)) for n, w in layers.items()}


def _reliability(run: StoredRun) -> Parts:
    arrays = run.arrays
    if not {"probs", "labels"} <= arrays.keys():
        return {}
    return {"": certainty.reliability_diagram(arrays["probs"], arrays["labels"])}


def _uncertainty(run: StoredRun) -> Parts:
    parts = {}
    for key, label in (("entropy", "entropy"), ("epistemic", "epistemic uncertainty")):
        if f"{key}_in" in run.arrays:
            inside, outside = run.arrays[f"{key}_in"], run.sets(f"{key}_out")
            parts[label] = certainty.uncertainty_histograms(inside, outside, f"{label} (nats)")
    return parts


def _uncertainty_caption(run: StoredRun) -> str:
    if run.sets("entropy_out") or run.sets("epistemic_out"):
        return (
            "The further the outlines lie right of the bars, the better unfamiliar data is noticed."
        )
    return "How uncertain the model is of its test cases; `vardrop evaluate --ood` adds other data."


def _risk(run: StoredRun) -> Parts:
    arrays = run.arrays
    if {"probs", "labels"} <= arrays.keys():
        confidence, guess = arrays["probs"].max(-1)
        mistakes = (guess != arrays["labels"]).float()
        return {"": certainty.risk_coverage_curve(1 - confidence, mistakes)}
    if {"y", "mean", "lower", "upper"} <= arrays.keys():
        width = (arrays["upper"] - arrays["lower"]).flatten()
        errors = (arrays["y"].flatten() - arrays["mean"].flatten()).abs()
        return {"": certainty.risk_coverage_curve(width, errors, "mean absolute error")}
    return {}


def _examples(run: StoredRun) -> Parts:
    shown = {which: run.arrays.get(f"images_{which}_certain") for which in ("most", "least")}
    most, least = (None if images is None else images[:_IMAGES] for images in shown.values())
    if most is None and least is None:
        return {}
    return {"": maps.certain_examples(most, least, texts=[_told(run, which) for which in shown])}


def _told(run: StoredRun, which: str) -> list[str]:
    """True class, the predicted one where it is another, and its probability, by image."""
    rows, names = run.arrays.get(f"told_{which}_certain"), run.config.get("classes") or []
    if rows is None:
        return []
    name = {i: short(str(text), 11) for i, text in enumerate(names)}
    return [
        f"{name.get(y, y)}\n{'' if y == guess else f'as {name.get(guess, guess)}, '}{chance:.0%}"
        for y, guess, chance in rows[:_IMAGES].tolist()
    ]


def _band(run: StoredRun) -> Parts:
    arrays = run.arrays
    if not {"y", "mean", "lower", "upper"} <= arrays.keys():
        return {}
    x = arrays.get("x", torch.stack([arrays["mean"].flatten()] * 2, 1))
    y, mean, lower, upper = (arrays[key] for key in ("y", "mean", "lower", "upper"))
    band = certainty.regression_band(
        x, y, mean, lower, upper, level=_LEVEL, target=run.target or "target"
    )
    return {"": band}


def _band_caption(run: StoredRun) -> str:
    """What the interval promises, and what it kept."""
    arrays, promised = run.arrays, f"{_LEVEL:.0%}"
    if not {"y", "lower", "upper"} <= arrays.keys():
        return ""
    inside = (arrays["lower"] <= arrays["y"]) & (arrays["y"] <= arrays["upper"])
    rows, found = inside.numel(), float(inside.double().mean())
    slack = 2 * math.sqrt(_LEVEL * (1 - _LEVEL) / rows)
    if abs(found - _LEVEL) <= slack:
        verdict = "as far as so many rows can show, it keeps its promise"
    else:
        verdict = "it is wider than it needs to be" if found > _LEVEL else "it is too narrow"
    return (
        f"The interval promises to hold {promised} of new rows, and holds {found:.1%} of "
        f"{rows:,} test rows: {verdict}."
    )


_WEIGHTS, _TRUST = "Training and sparsity", "Certainty"
KINDS = (
    Kind(
        _TRUST,
        "Reliability",
        "Dots on the diagonal mean that confidence comes true, below it that it is too high; "
        "large dots hold many cases.",
        _reliability,
        task="classification",
    ),
    Kind(_TRUST, "Interval of prediction", _band_caption, _band, task="regression"),
    Kind(
        _TRUST,
        "Risk and coverage",
        "Error among the cases that are answered when the least certain are turned away; it "
        "should fall to the left. Dashed: all cases.",
        _risk,
    ),
    Kind(
        _TRUST,
        "Uncertainty in and out of distribution",
        _uncertainty_caption,
        _uncertainty,
        task="classification",
    ),
    Kind(
        _TRUST,
        "Most and least certain cases",
        "Below each its true class and the probability of the predicted one; “as” names a wrong "
        "prediction.",
        _examples,
        task="classification",
        photo=True,
    ),
    Kind(
        _WEIGHTS,
        "Training curves",
        "NLL per example, KL of all weights, and beta, the weight of the KL, by epoch.",
        _training,
    ),
    Kind(_WEIGHTS, "log alpha by layer", _alpha_caption, _alpha),
    Kind(
        _WEIGHTS,
        "Sparsity by layer",
        "Fraction of the weights of each layer that pruning removes.",
        _layers,
    ),
    Kind(_WEIGHTS, "Score against sparsity", _curve_caption, _curve),
    Kind(
        _WEIGHTS,
        "Weights before and after",
        "Before and after pruning: red is positive, blue negative, blank zero.",
        _weights,
    ),
)


Drawn = Mapping[Kind, Mapping[str, Parts]]


@dataclass(frozen=True)
class Card:
    """A picture with its label and caption; without an image where a run has none to show."""

    label: str
    caption: str
    style: str
    alt: str = ""
    image: str = ""


@dataclass(frozen=True)
class Grid:
    """Cards in so many columns, with a heading where there is one."""

    cards: list[Card]
    columns: int
    heading: str = ""
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A section of pictures, and the titles of those that no run has the data for."""

    title: str
    grids: list[Grid]
    missing: list[str]


def sections(runs: Mapping[str, StoredRun]) -> list[Section]:
    """All pictures of the runs: one run's in a grid, several runs' side by side, kind by kind."""
    return [_section(title, runs) for title in dict.fromkeys(kind.section for kind in KINDS)]


def _section(title: str, runs: Mapping[str, StoredRun]) -> Section:
    drawn = {
        kind: {name: kind.of(run) if kind.suits(run) else {} for name, run in runs.items()}
        for kind in KINDS
        if kind.section == title
    }
    grids = (_alone if len(runs) == 1 else _side_by_side)(drawn, runs)
    missing = [
        kind.title
        for kind, found in drawn.items()
        if not any(found.values()) and any(map(kind.suits, runs.values()))
    ]
    return Section(title, [grid for grid in grids if grid.cards], missing)


def _alone(drawn: Drawn, runs: Mapping[str, StoredRun]) -> list[Grid]:
    cards = [
        _card(kind, name, part, ax, kind.title, kind.says(runs[name]))
        for kind, found in drawn.items()
        for name, parts in found.items()
        for part, ax in parts.items()
    ]
    return [Grid(cards, 1)]


def _side_by_side(drawn: Drawn, runs: Mapping[str, StoredRun]) -> list[Grid]:
    grids = []
    for kind, found in drawn.items():
        every = dict.fromkeys(part for parts in found.values() for part in parts)
        alike = {kind.says(runs[name]) for name, parts in found.items() if parts}
        shared = alike.pop() if len(alike) == 1 else ""
        cards = [
            _card(kind, name, part, parts.get(part), name, "" if shared else kind.says(runs[name]))
            for part in every
            for name, parts in found.items()
        ]
        grids.append(Grid(cards, len(found), kind.title, shared))
    return grids


def _card(kind: Kind, name: str, part: str, ax: Axes | None, label: str, caption: str = "") -> Card:
    label = f"{label}: {part}" if part else label
    style = "photo" if kind.photo else "chart"
    if ax is None:
        return Card(label, caption, style)
    about = f"{kind.title}, {part}," if part else kind.title
    alt = f"{about} of run {name}. {ax.get_title(loc='left')}".strip()
    return Card(label, caption, style, alt, base64.b64encode(png(ax, clear=kind.photo)).decode())
