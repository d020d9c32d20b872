"""The pictures of a report: which there are, what each needs of a run, what it says below."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes

from vardrop._core.errors import VardropError
from vardrop.app.report.pictures import certainty, maps, sparsity, training
from vardrop.app.report.pictures.canvas import short
from vardrop.app.store import StoredRun

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


def _judged(run: StoredRun) -> dict[str, torch.Tensor]:
    """log alpha of the layers whose weights the method removes by it."""
    pruned = run.layers("weight_pruned")
    return {name: values for name, values in run.layers("log_alpha").items() if name in pruned}


def threshold(run: StoredRun) -> float | None:
    """The threshold on log alpha that the run pruned with, else the usual 3; None without one."""
    found = (run.results.get("compression") or {}).get("threshold")
    if not _judged(run):
        return None
    return 3.0 if found is None else float(found)


def _alpha(run: StoredRun) -> Parts:
    found = _judged(run) or run.layers("log_alpha")
    layers = {run.label(name): values for name, values in found.items()}
    return {"": sparsity.alpha_histograms(layers, threshold(run))} if layers else {}


def _alpha_caption(run: StoredRun) -> str:
    """What stands on the two sides of the threshold, whatever it is."""
    limit = threshold(run)
    text = "alpha is the variance of the noise over the square of what it is on. "
    if limit is None:
        return f"{text}The method removes nothing by it."
    pruned = (run.results.get("compression") or {}).get("threshold") is not None
    text += (
        f"Weights to the right of the dashed line, with alpha above {math.exp(limit):.2g}, "
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
