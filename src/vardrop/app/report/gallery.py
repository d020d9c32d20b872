"""The pictures of a report, drawn from stored arrays."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from matplotlib.axes import Axes

from vardrop.app.report import pictures
from vardrop.app.report.canvas import png
from vardrop.app.store import StoredRun

# A picture may have several parts, such as one per layer, and none if its data are missing.
Parts = dict[str, Axes]
_LEVEL = 0.95  # the level of stored intervals


class Card(NamedTuple):
    """A picture as the page shows it."""

    label: str
    alt: str
    image: str


class Picture(NamedTuple):
    """A kind of picture: its title, its caption, and the function that draws it."""

    title: str
    caption: str
    draw: Callable[[StoredRun], Parts]

    def cards(self, runs: Mapping[str, StoredRun]) -> list[Card]:
        """The picture of every run that has the data for it."""
        cards = []
        for name, run in runs.items():
            for part, ax in self.draw(run).items():
                label = name if len(runs) > 1 else self.title
                alt = f"{self.title} {part} of run {name}."
                cards.append(make_card(f"{label}: {part}" if part else label, alt, ax))
        return cards


def make_card(label: str, alt: str, ax: Axes) -> Card:
    """A card with a picture. Its description ends with the title of the picture."""
    alt = " ".join(f"{alt} {ax.get_title(loc='left')}".split())
    return Card(label, alt, base64.b64encode(png(ax)).decode())


def _training(run: StoredRun) -> Parts:
    # The training loss is in units of the scaled target, the validation score is not.
    shift = math.log(run.unit)
    rows = [{**row, "nll": row["nll"] + shift} if "nll" in row else row for row in run.history]
    return {"": pictures.training_curves(rows)} if rows else {}


def _reliability(run: StoredRun) -> Parts:
    if "probs" not in run.arrays:
        return {}
    return {"": pictures.reliability_diagram(run.arrays["probs"], run.arrays["labels"])}


def _band(run: StoredRun) -> Parts:
    if "lower" not in run.arrays:
        return {}
    x, y, mean, lower, upper = (run.arrays[key] for key in ("x", "y", "mean", "lower", "upper"))
    target = run.target or "target"
    return {"": pictures.regression_band(x, y, mean, lower, upper, level=_LEVEL, target=target)}


def _risk(run: StoredRun) -> Parts:
    arrays = run.arrays
    if "probs" in arrays:
        confidence, guess = arrays["probs"].max(-1)
        return {"": pictures.risk_coverage_curve(1 - confidence, guess != arrays["labels"])}
    if "lower" in arrays:
        y, mean, lower, upper = (arrays[key].flatten() for key in ("y", "mean", "lower", "upper"))
        errors = (y - mean).abs()
        return {"": pictures.risk_coverage_curve(upper - lower, errors, "mean absolute error")}
    return {}


def _histograms(run: StoredRun) -> Parts:
    parts = {}
    for key, label in (("entropy", "entropy"), ("epistemic", "epistemic uncertainty")):
        if outside := run.sets(f"{key}_out"):
            inside = run.arrays[f"{key}_in"]
            parts[label] = pictures.uncertainty_histograms(inside, outside, f"{label} (nats)")
    return parts


def _layers(run: StoredRun) -> Parts:
    fractions = {run.label(name): fraction for name, fraction in run.fractions().items()}
    return {"": pictures.layer_sparsity(fractions)} if fractions else {}


_RELIABILITY = "On the diagonal the model is calibrated, below it overconfident."
_BAND = "The 95% interval should hold 95% of the test examples."
_RISK = "Error when the most uncertain examples are rejected; it should fall to the left."
_HISTOGRAMS = "Out-of-distribution inputs should be to the right of the bars."
_TRAINING = "NLL per example, KL of all weights, and beta, the weight of the KL."
PICTURES = (
    Picture("Reliability", _RELIABILITY, _reliability),
    Picture("Prediction interval", _BAND, _band),
    Picture("Risk and coverage", _RISK, _risk),
    Picture("Uncertainty in and out of distribution", _HISTOGRAMS, _histograms),
    Picture("Training curves", _TRAINING, _training),
    Picture("Sparsity by layer", "Fraction of the weights that pruning removes.", _layers),
)
