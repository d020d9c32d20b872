"""The pictures of a report, drawn from stored arrays."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from matplotlib.axes import Axes

from vardrop.app.report import pictures
from vardrop.app.report.canvas import png
from vardrop.app.store import StoredRun, select_prefix

# A picture may have several named parts, such as one per uncertainty, and none without its data.
Parts = Iterator[tuple[str, Axes]]
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

    def cards(self, runs: Mapping[str, StoredRun]) -> Iterator[Card]:
        """The picture of every run that has the data for it."""
        for name, run in runs.items():
            for part, ax in self.draw(run):
                label = name if len(runs) > 1 else self.title
                alt = f"{self.title} {part} of run {name}."
                yield make_card(f"{label}: {part}" if part else label, alt, ax)


def make_card(label: str, alt: str, ax: Axes) -> Card:
    """A card with a picture. Its description ends with the title of the picture."""
    alt = " ".join(f"{alt} {ax.get_title(loc='left')}".split())
    return Card(label, alt, base64.b64encode(png(ax)).decode())


def _training(run: StoredRun) -> Parts:
    # The training loss is in units of the scaled target, the validation score is not.
    shift = math.log(run.preprocessing.get("target_std") or 1.0)
    rows = [{**row, "nll": row["nll"] + shift} if "nll" in row else row for row in run.history]
    if rows:
        yield "", pictures.training_curves(rows)


def _reliability(run: StoredRun) -> Parts:
    if "probs" in run.arrays:
        yield "", pictures.reliability_diagram(run.arrays["probs"], run.arrays["labels"])


def _band(run: StoredRun) -> Parts:
    if "lower" in run.arrays:
        x, y, mean, lower, upper = (run.arrays[key] for key in ("x", "y", "mean", "lower", "upper"))
        target = run.target or "target"
        yield "", pictures.regression_band(x, y, mean, lower, upper, level=_LEVEL, target=target)


def _risk(run: StoredRun) -> Parts:
    arrays = run.arrays
    if "probs" in arrays:
        confidence, guess = arrays["probs"].max(-1)
        yield "", pictures.risk_coverage_curve(1 - confidence, guess != arrays["labels"])
    elif "lower" in arrays:
        y, mean, lower, upper = (arrays[key].flatten() for key in ("y", "mean", "lower", "upper"))
        errors = (y - mean).abs()
        yield "", pictures.risk_coverage_curve(upper - lower, errors, "mean absolute error")


def _histograms(run: StoredRun) -> Parts:
    for key, label in (("entropy", "entropy"), ("epistemic", "epistemic uncertainty")):
        if outside := select_prefix(f"{key}_out_", run.arrays):
            inside = run.arrays[f"{key}_in"]
            yield label, pictures.uncertainty_histograms(inside, outside, f"{label} (nats)")


def _layers(run: StoredRun) -> Parts:
    if fractions := {run.label(name): fraction for name, fraction in run.fractions().items()}:
        yield "", pictures.layer_sparsity(fractions)


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
