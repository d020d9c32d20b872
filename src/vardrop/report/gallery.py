"""The pictures of a report: which there are, the arrays of a run that each needs, their order."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes

from vardrop.errors import VardropError
from vardrop.report.pictures import certainty, maps, sparsity, training
from vardrop.report.pictures.canvas import png
from vardrop.report.run import StoredRun

# A picture may come in several parts, such as one per layer; no part means that data is absent.
Parts = dict[str, Axes]


@dataclass(frozen=True)
class Kind:
    """A kind of picture: where it stands, what it shows, for which task, and how it is drawn."""

    section: str
    title: str
    caption: str
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

    def suits(self, run: StoredRun) -> bool:
        """Whether the picture has a meaning for the run's task."""
        return self.task is None or run.task is None or run.task == self.task


def _training(run: StoredRun) -> Parts:
    return {"": training.training_curves(run.history)} if run.history else {}


def threshold(run: StoredRun) -> float:
    """The threshold on log alpha that the run pruned with, else the usual 3."""
    found = (run.results.get("compression") or {}).get("threshold")
    return 3.0 if found is None else float(found)


def _alpha(run: StoredRun) -> Parts:
    layers = run.layers("log_alpha")
    return {"": sparsity.alpha_histograms(layers, threshold(run))} if layers else {}


def _layers(run: StoredRun) -> Parts:
    pruned = run.layers("weight_pruned")
    fractions = {name: float((w == 0).double().mean()) for name, w in pruned.items()}
    if not fractions and run.history:
        fractions = run.history[-1].get("sparsity") or {}
    return {"": sparsity.layer_sparsity(fractions)} if fractions else {}


def _curve(run: StoredRun) -> Parts:
    curve = run.results.get("curve")
    usual = "rmse" if run.task == "regression" else "accuracy"
    name = (run.results.get("compression") or {}).get("score", usual)
    return {"": sparsity.sparsity_curve(curve, str(name))} if curve else {}


def _weights(run: StoredRun) -> Parts:
    pruned = run.layers("weight_pruned")
    layers = run.layers("weight")
    return {name: maps.weight_maps(w, pruned.get(name)) for name, w in layers.items()}


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
    most, least = (run.arrays.get(f"images_{which}_certain") for which in ("most", "least"))
    return {} if most is None and least is None else {"": maps.certain_examples(most, least)}


def _band(run: StoredRun) -> Parts:
    arrays = run.arrays
    if not {"y", "mean", "lower", "upper"} <= arrays.keys():
        return {}
    x = arrays.get("x", torch.stack([arrays["mean"].flatten()] * 2, 1))
    y, mean, lower, upper = (arrays[key] for key in ("y", "mean", "lower", "upper"))
    return {"": certainty.regression_band(x, y, mean, lower, upper)}


_WEIGHTS, _TRUST = "Training and sparsity", "Certainty"
KINDS = (
    Kind(
        _WEIGHTS,
        "Training curves",
        "NLL per example, KL of all weights, and beta, the weight of the KL, by epoch.",
        _training,
    ),
    Kind(
        _WEIGHTS,
        "log alpha by layer",
        "Weights to the right of the threshold are mostly noise and can go.",
        _alpha,
    ),
    Kind(
        _WEIGHTS,
        "Sparsity by layer",
        "Fraction of the weights of each layer that pruning removes.",
        _layers,
    ),
    Kind(
        _WEIGHTS,
        "Score against sparsity",
        "What removing more weights costs; one point per threshold.",
        _curve,
    ),
    Kind(
        _WEIGHTS,
        "Weights before and after",
        "Red is positive, blue negative, blank zero.",
        _weights,
    ),
    Kind(
        _TRUST,
        "Reliability",
        "Dots on the diagonal mean that confidence comes true; large dots hold many cases.",
        _reliability,
        task="classification",
    ),
    Kind(
        _TRUST,
        "Uncertainty in and out of distribution",
        "The further the outlines lie right of the bars, the better unfamiliar data is noticed.",
        _uncertainty,
        task="classification",
    ),
    Kind(
        _TRUST,
        "Interval of prediction",
        "Observed values should lie in the band as often as it promises.",
        _band,
        task="regression",
    ),
    Kind(
        _TRUST,
        "Risk and coverage",
        "Error among the cases that are answered when the least certain are turned away.",
        _risk,
    ),
    Kind(
        _TRUST,
        "Most and least certain cases",
        "What the model finds clear, and what it finds hard.",
        _examples,
        task="classification",
        photo=True,
    ),
)


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
    grids = _alone(drawn) if len(runs) == 1 else _side_by_side(drawn)
    missing = [
        kind.title
        for kind, found in drawn.items()
        if not any(found.values()) and any(map(kind.suits, runs.values()))
    ]
    return Section(title, [grid for grid in grids if grid.cards], missing)


def _alone(drawn: Mapping[Kind, Mapping[str, Parts]]) -> list[Grid]:
    cards = [
        _card(kind, name, part, ax, kind.title, kind.caption)
        for kind, found in drawn.items()
        for name, parts in found.items()
        for part, ax in parts.items()
    ]
    return [Grid(cards, 1)]


def _side_by_side(drawn: Mapping[Kind, Mapping[str, Parts]]) -> list[Grid]:
    grids = []
    for kind, found in drawn.items():
        every = dict.fromkeys(part for parts in found.values() for part in parts)
        cards = [
            _card(kind, name, part, parts.get(part), name)
            for part in every
            for name, parts in found.items()
        ]
        grids.append(Grid(cards, len(found), kind.title, kind.caption))
    return grids


def _card(kind: Kind, name: str, part: str, ax: Axes | None, label: str, caption: str = "") -> Card:
    label = f"{label}: {part}" if part else label
    style = "photo" if kind.photo else "chart"
    if ax is None:
        return Card(label, caption, style)
    about = f"{kind.title}, {part}," if part else kind.title
    alt = f"{about} of run {name}. {ax.get_title(loc='left')}".strip()
    return Card(label, caption, style, alt, base64.b64encode(png(ax)).decode())
