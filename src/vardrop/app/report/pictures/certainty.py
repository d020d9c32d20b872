"""Pictures of certainty: calibration, uncertainty out of distribution, rejection, intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vardrop import metrics
from vardrop._core.errors import VardropError
from vardrop.app.report.pictures.canvas import (
    BLUE,
    GREY,
    OTHERS,
    Numbers,
    axes,
    column,
    legend_above,
    numbers,
    short,
    tidy,
)


def reliability_diagram(
    probs: Numbers, labels: Numbers, bins: int = 15, ax: Axes | None = None
) -> Axes:
    """Draw accuracy against confidence in bins; a calibrated model lies on the diagonal.

    As `vardrop.metrics.reliability_curve`; dots grow with the number of cases.

    Args:
        probs: class probabilities, shape (N, K).
        labels: class indices, shape (N,).
        bins: number of bins of equal width.
        ax: where to draw; a new figure without it.

    >>> from vardrop.app.report import reliability_diagram
    >>> ax = reliability_diagram([[0.75, 0.25], [0.75, 0.25]], [0, 1])
    >>> ax.get_title(loc="left")
    'ECE 0.250'

    Guo et al. 2017, "On calibration of modern neural networks", sec. 2.
    """
    ax = axes(ax)
    p = torch.as_tensor(probs).detach().cpu()
    y = torch.as_tensor(labels).cpu()
    curve = metrics.reliability_curve(p, y, bins)
    filled = curve.count > 0
    confidence, accuracy = curve.confidence[filled].numpy(), curve.accuracy[filled].numpy()
    fraction = (curve.count[filled] / curve.count.sum()).numpy()
    ax.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
    ax.vlines(confidence, confidence, accuracy, color=BLUE, linewidth=1, alpha=0.6)
    ax.scatter(confidence, accuracy, s=16 + 200 * np.sqrt(fraction), color=BLUE, alpha=0.75, lw=0)
    ax.set_xlim(-0.02, 1.06)
    ax.set_ylim(-0.04, 1.08)
    return tidy(ax, "confidence", "accuracy", f"ECE {float(metrics.ece(p, y, bins)):.3f}")


def uncertainty_histograms(
    inside: Numbers,
    outside: Mapping[str, Numbers] | None = None,
    label: str = "entropy",
    ax: Axes | None = None,
) -> Axes:
    """Draw how uncertain the model is on its own kind of data and on others.

    Args:
        inside: uncertainty of cases like those of the training, shape (N,).
        outside: uncertainty of cases from elsewhere by name, each of shape (M,).
        label: what the uncertainty is called.
        ax: where to draw; a new figure without it.

    >>> from vardrop.app.report import uncertainty_histograms
    >>> ax = uncertainty_histograms([0.1, 0.4], {"noise": [0.4, 0.9]})
    >>> ax.get_legend().get_texts()[1].get_text()
    'noise (AUROC 0.875)'

    Hendrycks & Gimpel 2017, for the area under the ROC curve as a detector's score.
    """
    ax = axes(ax)
    known = column("inside", inside)
    others = {name: column(f"outside[{name!r}]", v) for name, v in (outside or {}).items()}
    everything = np.concatenate([known, *others.values()])
    low, high = float(everything.min()), float(everything.max())
    edges = np.linspace(low, high if high > low else low + 1, 31).tolist()
    ax.hist(
        known, edges, weights=_fractions(known), color=BLUE, alpha=0.45, label="in distribution"
    )
    for i, (name, values) in enumerate(others.items()):
        area = float(metrics.auroc(torch.from_numpy(known), torch.from_numpy(values)))
        line: dict[str, Any] = {
            "histtype": "step",
            "linewidth": 1.6,
            "color": OTHERS[i % len(OTHERS)],
        }
        text = f"{short(name, 30)} (AUROC {area:.3f})"
        ax.hist(values, edges, weights=_fractions(values), label=text, **line)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    legend_above(tidy(ax, label, "cases"))
    return ax


def _fractions(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Numbers:
    """Weights that make the bars of a histogram add up to one."""
    return np.full(len(values), 1 / len(values))


def risk_coverage_curve(
    uncertainty: Numbers, errors: Numbers, risk: str = "error rate", ax: Axes | None = None
) -> Axes:
    """Draw the mean error of the cases that are kept when the most uncertain are rejected.

    As `vardrop.metrics.risk_coverage`; the area under the curve stands above it.

    Args:
        uncertainty: of each case, shape (N,).
        errors: 0/1 mistakes or any loss of each case, shape (N,).
        risk: what the mean error is called.
        ax: where to draw; a new figure without it.

    >>> from vardrop.app.report import risk_coverage_curve
    >>> risk_coverage_curve([0.3, 0.1], [1.0, 0.0]).get_title(loc="left")
    'area 0.25'

    Geifman & El-Yaniv 2017, "Selective classification for deep neural networks".
    """
    ax = axes(ax)
    scores = torch.from_numpy(column("uncertainty", uncertainty))
    losses = torch.from_numpy(column("errors", errors))
    curve = metrics.risk_coverage(scores, losses)
    ax.plot(curve.coverage.numpy(), curve.risk.numpy(), color=BLUE, linewidth=1.6)
    ax.axhline(float(losses.mean()), color=GREY, linestyle="--", linewidth=1)
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.grid(alpha=0.25)
    return tidy(ax, "cases answered", risk, f"area {float(metrics.aurc(scores, losses)):.3g}")


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

    With one feature the cases lie along it; with several they are put in order of the prediction.

    Args:
        x: features, shape (N,), (N, 1) or (N, D).
        y: observed values, shape (N,).
        mean: predictions, shape (N,).
        lower, upper: ends of the predictive interval, shape (N,).
        ax: where to draw; a new figure without it.
        level: the fraction of the cases that the interval promises to hold.
        target: what is predicted.

    >>> from vardrop.app.report import regression_band
    >>> ax = regression_band([0.0, 1.0], [0.1, 2.0], [0.0, 1.0], [-1.0, 0.0], [1.0, 1.5], level=0.9)
    >>> ax.get_title(loc="left")
    '50.0 % of the cases in the 90 % interval'
    """
    names = ("y", "mean", "lower", "upper")
    rows = [column(n, v) for n, v in zip(names, (y, mean, lower, upper), strict=True)]
    features = numbers("x", x)
    if any(len(row) != len(features) for row in rows):
        raise VardropError(
            f"Expected `x`, `y`, `mean`, `lower` and `upper` to have one length, but got "
            f"{[len(features), *map(len, rows)]}. Pass one row a case."
        )
    single = features.size == len(features)
    order = np.argsort(features.ravel() if single else rows[1], kind="stable")
    place = features.ravel()[order] if single else np.arange(len(order), dtype=np.float64)
    seen, middle, low, high = (row[order] for row in rows)
    ax = axes(ax)
    promised = "" if level is None else f"{100 * level:g} % "
    ax.fill_between(place, low, high, color=BLUE, alpha=0.22, lw=0, label=f"{promised}interval")
    ax.plot(place, middle, color=BLUE, linewidth=1.6, label="prediction")
    ax.plot(place, seen, ".", color=OTHERS[0], markersize=3, alpha=0.7, label="observed")
    percent = 100 * np.mean((seen >= low) & (seen <= high))
    text = "x" if single else "cases in order of the prediction"
    tidy(ax, text, target, f"{percent:.1f} % of the cases in the {promised}interval")
    legend_above(ax)
    return ax
