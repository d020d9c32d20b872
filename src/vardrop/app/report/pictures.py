"""Pictures: functions on data that return a matplotlib Axes.

Without `ax` a picture is drawn on a new figure, which `ax.figure` shows in a notebook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from vardrop import metrics
from vardrop._core.errors import VardropError
from vardrop.app.report import canvas
from vardrop.app.report.canvas import Numbers
from vardrop.app.score_texts import title
from vardrop.metrics.intervals import Estimate

_PARTS = {"nll": ("NLL", canvas.BLUE), "kl": ("KL", canvas.RED), "beta": ("beta", canvas.GREEN)}
_PANEL, _ROW, _NAMES = 2.6, 0.32, 1.6  # inches


def reliability_diagram(
    probs: Numbers, labels: Numbers, bins: int = 15, ax: Axes | None = None
) -> Axes:
    """Draw accuracy against confidence in bins; a calibrated model is on the diagonal.

    The curve is `vardrop.metrics.reliability_curve`. Dots grow with the number of examples.

    Args:
        probs: class probabilities, shape (N, K).
        labels: class indices, shape (N,).
        bins: number of bins of equal width.
        ax: the Axes to draw on, a new figure by default.

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
        ax: the Axes to draw on, a new figure by default.

    >>> from vardrop.app.report import uncertainty_histograms
    >>> ax = uncertainty_histograms([0.1, 0.4], {"noise": [0.4, 0.9]})
    >>> ax.get_legend().get_texts()[1].get_text()
    'noise (AUROC 0.875)'

    Hendrycks & Gimpel 2017, for the area under the ROC curve as a detector's score.
    """
    ax = canvas.axes(ax)
    first = canvas.numbers("inside", inside, flat=True)
    sets = {"in distribution": first}
    for name, uncertainty in (outside or {}).items():
        sets[name] = canvas.numbers(f"outside[{name!r}]", uncertainty, flat=True)
    low, high = min(v.min() for v in sets.values()), max(v.max() for v in sets.values())
    edges = np.linspace(low, high if high > low else low + 1, 31).tolist()
    for i, (name, numbers) in enumerate(sets.items()):
        style: dict[str, Any] = {"color": canvas.BLUE, "alpha": 0.45, "label": name}
        if i > 0:
            area = float(metrics.auroc(torch.from_numpy(first), torch.from_numpy(numbers)))
            colour = canvas.OTHERS[(i - 1) % len(canvas.OTHERS)]
            text = f"{canvas.short(name, 30)} (AUROC {area:.3f})"
            style = {"histtype": "step", "linewidth": 1.6, "color": colour, "label": text}
        ax.hist(numbers, edges, weights=np.full(len(numbers), 1 / len(numbers)), **style)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    canvas.legend_above(canvas.tidy(ax, label, "examples"))
    return ax


def risk_coverage_curve(
    uncertainty: Numbers, errors: Numbers, risk: str = "error rate", ax: Axes | None = None
) -> Axes:
    """Draw the mean error of the examples that remain when the most uncertain are rejected.

    The curve is `vardrop.metrics.risk_coverage`. The title is the area under it.

    Args:
        uncertainty: uncertainty of each example, shape (N,).
        errors: 0/1 mistakes or any loss of each example, shape (N,).
        risk: the name of the mean error.
        ax: the Axes to draw on, a new figure by default.

    >>> from vardrop.app.report import risk_coverage_curve
    >>> risk_coverage_curve([0.3, 0.1], [1.0, 0.0]).get_title(loc="left")
    'area 0.25'

    Geifman & El-Yaniv 2017, "Selective classification for deep neural networks".
    """
    named = {"uncertainty": uncertainty, "errors": errors}
    scores, losses = (torch.from_numpy(canvas.numbers(*n, flat=True)) for n in named.items())
    ax, curve = canvas.axes(ax), metrics.risk_coverage(scores, losses)
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
        ax: the Axes to draw on, a new figure by default.
        level: the nominal coverage of the interval.
        target: the name of the target.

    >>> from vardrop.app.report import regression_band
    >>> ax = regression_band([0.0, 1.0], [0.1, 2.0], [0.0, 1.0], [-1.0, 0.0], [1.0, 1.5], level=0.9)
    >>> ax.get_title(loc="left")
    '50.0% of the examples in the 90% interval'
    """
    named = {"y": y, "mean": mean, "lower": lower, "upper": upper}
    rows = [canvas.numbers(name, numbers, flat=True) for name, numbers in named.items()]
    features = canvas.numbers("x", x)
    if any(len(row) != len(features) for row in rows):
        lengths = [len(features), *map(len, rows)]
        text = f"Expected `x`, `y`, `mean`, `lower` and `upper` of one length, but got {lengths}."
        raise VardropError(f"{text} Pass one row per example.")
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


def training_curves(history: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """Draw NLL, KL and beta by epoch in separate strips, because their scales differ.

    Args:
        history: one mapping per epoch, with "epoch" and any of "nll", "kl" and "beta". An "nll"
            in "validation" is drawn as a dashed line.
        ax: the Axes to draw on, a new figure by default.

    >>> from vardrop.app.report import training_curves
    >>> ax = training_curves([{"epoch": 0, "nll": 2.3, "kl": 900.0, "beta": 0.0}])
    >>> [strip.get_ylabel() for strip in ax.child_axes]
    ['NLL', 'KL', 'beta']
    """
    parts = [key for key in _PARTS if any(key in row for row in history)]
    if not parts:
        text = f"Expected `history` to hold {', '.join(_PARTS)}, but got {len(history)} other rows."
        raise VardropError(f"{text} Pass the rows of history.jsonl.")
    ax = canvas.axes(ax)
    ax.set_axis_off()
    height, strips = 1 / len(parts), []
    for i, key in enumerate(parts):
        strip = ax.inset_axes((0.0, 1 - (i + 1) * height, 1.0, 0.82 * height))
        strips.append(strip)
        label, colour = _PARTS[key]
        validation = [row.get("validation") or {} for row in history]
        for rows, style in ((history, "-"), (validation, "--")):
            points = [
                (row.get("epoch", epoch), scores[key])
                for epoch, (row, scores) in enumerate(zip(history, rows, strict=True))
                if scores.get(key) is not None
            ]
            if points:
                marker = "o" if len(points) == 1 else None
                strip.plot(*zip(*points, strict=True), style, color=colour, marker=marker)
        last = i == len(parts) - 1
        canvas.tidy(strip, x="epoch" if last else "", y=label)
        if any(scores.get(key) is not None for scores in validation):
            strip.set_title("dashed: validation", loc="right", fontsize=canvas.SMALL, pad=3)
        strip.tick_params(labelbottom=last)
        strip.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        strip.yaxis.set_major_locator(MaxNLocator(nbins=3))
        if key == "kl":
            strip.yaxis.set_major_formatter(EngFormatter(sep=""))
    ax.figure.align_ylabels(strips)
    return ax


def layer_sparsity(sparsity: Mapping[str, float], ax: Axes | None = None) -> Axes:
    """Draw the fraction of removed weights of every layer as bars.

    Args:
        sparsity: fraction of removed weights by layer, each in [0, 1].
        ax: the Axes to draw on, a new figure by default.

    >>> from vardrop.app.report import layer_sparsity
    >>> len(layer_sparsity({"conv1": 0.6, "fc1": 0.99}).patches)
    2
    """
    places = range(len(sparsity))
    fractions = canvas.numbers("sparsity", list(sparsity.values()))
    ax = canvas.axes(ax, height=max(3.0, 0.8 + 0.3 * len(sparsity)))
    ax.barh(places, fractions, color=canvas.BLUE, height=0.7)
    for place, fraction in zip(places, fractions, strict=True):
        ax.text(1.02, place, f"{fraction:.1%}", va="center", fontsize=canvas.SMALL)
    ax.set_yticks(places, labels=[canvas.short(name) for name in sparsity], parse_math=False)
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.tick_params(axis="y", length=0)
    return canvas.tidy(ax, x="weights removed")


def score_intervals(scores: Mapping[str, Mapping[str, Estimate]], ax: Axes | None = None) -> Axes:
    """Draw each score in a separate panel, with a dot per model and its 95% interval as a line.

    A dashed line marks the first model, which the others are compared with.

    Args:
        scores: estimates by score and model.
        ax: the Axes to draw on, a new figure by default.

    >>> from vardrop.metrics.intervals import Estimate
    >>> from vardrop.app.report import score_intervals
    >>> estimates = {"a": Estimate(0.9, 0.01, 0.88, 0.92), "b": Estimate(0.95)}
    >>> ax = score_intervals({"accuracy": estimates})
    >>> [panel.get_xlabel() for panel in ax.child_axes]
    ['accuracy']
    """
    if not scores or not all(scores.values()):
        raise VardropError("Expected `scores` to hold at least one score of one model.")
    names = list(dict.fromkeys(name for estimates in scores.values() for name in estimates))
    width = _NAMES + _PANEL * len(scores)
    ax = canvas.axes(ax, width=width, height=1.0 + _ROW * len(names))
    ax.set_axis_off()
    style: dict[str, Any] = {"color": canvas.BLUE, "linewidth": 1.6}
    for i, (score, estimates) in enumerate(scores.items()):
        panel = ax.inset_axes((i / len(scores), 0.0, 0.86 / len(scores), 1.0))
        for name, (center, _, low, high) in estimates.items():
            place = names.index(name)
            if low is not None and high is not None:
                panel.plot([low, high], [place, place], alpha=0.6, **style)
            panel.plot([center], [place], marker="o", markersize=5, **style)
        if names[0] in estimates:
            first = estimates[names[0]].value
            panel.axvline(first, color=canvas.GREY, linestyle="--", linewidth=1)
        labels = [canvas.short(name) for name in names] if i == 0 else [""] * len(names)
        panel.set_yticks(range(len(names)), labels=labels, parse_math=False)
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="x", alpha=0.25)
        canvas.tidy(panel, x=title(score))
    return ax
