"""Pictures of uncertainty: calibration, out-of-distribution data, rejection, intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vardrop import metrics
from vardrop._core.errors import VardropError
from vardrop.app.report.pictures import canvas
from vardrop.app.report.pictures.canvas import Numbers


def reliability_diagram(
    probs: Numbers, labels: Numbers, bins: int = 15, ax: Axes | None = None
) -> Axes:
    """Draw accuracy against confidence in bins; a calibrated model is on the diagonal.

    As `vardrop.metrics.reliability_curve`; dots grow with the number of examples.

    Args:
        probs: class probabilities, shape (N, K).
        labels: class indices, shape (N,).
        bins: number of bins of equal width.
        ax: where to draw; a new figure by default.

    >>> from vardrop.app.report import reliability_diagram
    >>> ax = reliability_diagram([[0.75, 0.25], [0.75, 0.25]], [0, 1])
    >>> ax.get_title(loc="left")
    'ECE 0.250'

    Guo et al. 2017, "On calibration of modern neural networks", sec. 2.
    """
    ax = canvas.axes(ax)
    p = torch.as_tensor(probs).detach().cpu()
    y = torch.as_tensor(labels).cpu()
    curve = metrics.reliability_curve(p, y, bins)
    filled = curve.count > 0
    confidence, accuracy = curve.confidence[filled].numpy(), curve.accuracy[filled].numpy()
    fraction = (curve.count[filled] / curve.count.sum()).numpy()
    ax.plot([0, 1], [0, 1], color=canvas.GREY, linestyle="--", linewidth=1)
    ax.vlines(confidence, confidence, accuracy, color=canvas.BLUE, linewidth=1, alpha=0.6)
    size = 16 + 200 * np.sqrt(fraction)
    ax.scatter(confidence, accuracy, s=size, color=canvas.BLUE, alpha=0.75, lw=0)
    ax.set_xlim(-0.02, 1.06)
    ax.set_ylim(-0.04, 1.08)
    return canvas.tidy(ax, "confidence", "accuracy", f"ECE {float(metrics.ece(p, y, bins)):.3f}")


def uncertainty_histograms(
    inside: Numbers,
    outside: Mapping[str, Numbers] | None = None,
    label: str = "entropy",
    ax: Axes | None = None,
) -> Axes:
    """Draw the uncertainty of test examples and of out-of-distribution examples.

    Args:
        inside: uncertainty of examples like the training data, shape (N,).
        outside: uncertainty of out-of-distribution examples by data set, each of shape (M,).
        label: the name of the uncertainty.
        ax: where to draw; a new figure by default.

    >>> from vardrop.app.report import uncertainty_histograms
    >>> ax = uncertainty_histograms([0.1, 0.4], {"noise": [0.4, 0.9]})
    >>> ax.get_legend().get_texts()[1].get_text()
    'noise (AUROC 0.875)'

    Hendrycks & Gimpel 2017, for the area under the ROC curve as a detector's score.
    """
    ax = canvas.axes(ax)
    first = canvas.numbers("inside", inside, flat=True)
    others = {
        name: canvas.numbers(f"outside[{name!r}]", values, flat=True)
        for name, values in (outside or {}).items()
    }
    sets = {"in distribution": first, **others}
    low, high = min(v.min() for v in sets.values()), max(v.max() for v in sets.values())
    edges = np.linspace(low, high if high > low else low + 1, 31).tolist()
    for i, (name, values) in enumerate(sets.items()):
        style: dict[str, Any] = {"color": canvas.BLUE, "alpha": 0.45, "label": name}
        if i > 0:
            area = float(metrics.auroc(torch.from_numpy(first), torch.from_numpy(values)))
            colour = canvas.OTHERS[(i - 1) % len(canvas.OTHERS)]
            text = f"{canvas.short(name, 30)} (AUROC {area:.3f})"
            style = {"histtype": "step", "linewidth": 1.6, "color": colour, "label": text}
        ax.hist(values, edges, weights=np.full(len(values), 1 / len(values)), **style)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    canvas.legend_above(canvas.tidy(ax, label, "examples"))
    return ax


def risk_coverage_curve(
    uncertainty: Numbers, errors: Numbers, risk: str = "error rate", ax: Axes | None = None
) -> Axes:
    """Draw the mean error of the examples that remain when the most uncertain are rejected.

    As `vardrop.metrics.risk_coverage`; the title is the area under the curve.

    Args:
        uncertainty: of each example, shape (N,).
        errors: 0/1 mistakes or any loss of each example, shape (N,).
        risk: the name of the mean error.
        ax: where to draw; a new figure by default.

    >>> from vardrop.app.report import risk_coverage_curve
    >>> risk_coverage_curve([0.3, 0.1], [1.0, 0.0]).get_title(loc="left")
    'area 0.25'

    Geifman & El-Yaniv 2017, "Selective classification for deep neural networks".
    """
    ax = canvas.axes(ax)
    scores = torch.from_numpy(canvas.numbers("uncertainty", uncertainty, flat=True))
    losses = torch.from_numpy(canvas.numbers("errors", errors, flat=True))
    curve = metrics.risk_coverage(scores, losses)
    ax.plot(curve.coverage.numpy(), curve.risk.numpy(), color=canvas.BLUE, linewidth=1.6)
    ax.axhline(float(losses.mean()), color=canvas.GREY, linestyle="--", linewidth=1)
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.grid(alpha=0.25)
    area = float(metrics.aurc(scores, losses))
    return canvas.tidy(ax, "examples answered", risk, f"area {area:.3g}")


def regression_band(
    x: Numbers,
    y: Numbers,
    mean: Numbers,
    lower: Numbers,
    upper: Numbers,
    ax: Axes | None = None,
    level: float | None = None,
    target: str = "y",
) -> Axes:
    """Draw predictions with their interval and the observed values.

    Examples are ordered by the feature if there is one, else by the prediction.

    Args:
        x: features, shape (N,), (N, 1) or (N, D).
        y: observed values, shape (N,).
        mean: predictions, shape (N,).
        lower, upper: ends of the predictive interval, shape (N,).
        ax: where to draw; a new figure by default.
        level: the nominal coverage of the interval.
        target: the name of the target.

    >>> from vardrop.app.report import regression_band
    >>> ax = regression_band([0.0, 1.0], [0.1, 2.0], [0.0, 1.0], [-1.0, 0.0], [1.0, 1.5], level=0.9)
    >>> ax.get_title(loc="left")
    '50.0% of the examples in the 90% interval'
    """
    values = {"y": y, "mean": mean, "lower": lower, "upper": upper}
    rows = [canvas.numbers(name, value, flat=True) for name, value in values.items()]
    features = canvas.numbers("x", x)
    if any(len(row) != len(features) for row in rows):
        raise VardropError(
            f"Expected `x`, `y`, `mean`, `lower` and `upper` to have one length, but got "
            f"{[len(features), *map(len, rows)]}. Pass one row per example."
        )
    single = features.size == len(features)
    order = np.argsort(features.ravel() if single else rows[1], kind="stable")
    place = features.ravel()[order] if single else np.arange(len(order), dtype=np.float64)
    seen, middle, low, high = (row[order] for row in rows)
    ax = canvas.axes(ax)
    interval = "interval" if level is None else f"{level:.0%} interval"
    ax.fill_between(place, low, high, color=canvas.BLUE, alpha=0.22, lw=0, label=interval)
    ax.plot(place, middle, color=canvas.BLUE, linewidth=1.6, label="prediction")
    ax.plot(place, seen, ".", color=canvas.OTHERS[0], markersize=3, alpha=0.7, label="observed")
    inside = np.mean((seen >= low) & (seen <= high))
    text = "x" if single else "examples in order of the prediction"
    canvas.tidy(ax, text, target, f"{inside:.1%} of the examples in the {interval}")
    canvas.legend_above(ax)
    return ax
