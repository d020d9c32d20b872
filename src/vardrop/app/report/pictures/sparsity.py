"""Pictures of sparsity: alpha by layer, removed weights by layer, and what removal costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from vardrop._core.errors import VardropError
from vardrop.app.report.pictures.canvas import (
    BLUE,
    GREY,
    RED,
    SMALL,
    Numbers,
    axes,
    numbers,
    short,
    tidy,
)

# Noise this far from the threshold looks the same; wider values go to the outermost bins.
_LOW, _HIGH = -12.0, 20.0


def alpha_histograms(
    log_alpha: Mapping[str, Numbers], threshold: float | None = 3.0, ax: Axes | None = None
) -> Axes:
    """Draw a histogram of log alpha for every layer, with the threshold of pruning.

    A weight is removed where log alpha >= `threshold`; alpha is its noise to signal ratio. Bars are
    as high as the root of their count.

    Args:
        log_alpha: by layer, any shapes, as `vardrop.log_alpha(net)` gives it.
        threshold: of pruning; None where the method removes nothing by it.
        ax: where to draw; a new figure without it.

    >>> from vardrop.app.report import alpha_histograms
    >>> ax = alpha_histograms({"fc": [-4.0, 2.0, 5.0, 6.0]})
    >>> ax.get_yticklabels()[0].get_text()
    'fc\\n50.0 % over'

    Molchanov, Ashukha & Vetrov 2017, sec. 4.3, for the threshold.
    """
    _check_layers("log_alpha", log_alpha)
    ax = axes(ax, height=max(3.0, 0.9 + 0.5 * len(log_alpha)))
    values = {name: numbers(f"log_alpha[{name!r}]", v).ravel() for name, v in log_alpha.items()}
    known = np.concatenate([v[~np.isnan(v)] for v in values.values()])
    limit = _HIGH + 1 if threshold is None else threshold
    shown = known if threshold is None else np.append(known, threshold)
    low, high = np.clip([shown.min(initial=0), shown.max(initial=0)], _LOW, _HIGH)
    edges = np.linspace(low, (high if threshold is None else max(high, threshold)) + 0.5, 61)
    labels = []
    for level, (name, value) in enumerate(values.items()):
        inside = np.clip(value[~np.isnan(value)], edges[0], edges[-1])
        # Roots keep the few weights in sight that stay beside the many that go.
        counts = np.sqrt(np.histogram(inside, edges)[0])
        heights = -level + 0.8 * np.append(counts, 0) / max(float(counts.max()), 1.0)
        for colour, part in ((BLUE, edges <= limit), (RED, edges >= limit)):
            ax.fill_between(edges, -level, heights, where=part, step="post", color=colour, lw=0)
        over = "" if threshold is None else f"\n{100 * np.mean(value >= threshold):.1f} % over"
        labels.append(f"{short(name)}{over}")
    if threshold is not None:
        ax.axvline(threshold, color=GREY, linestyle="--", linewidth=1)
    ax.set_yticks([0.3 - i for i in range(len(values))], labels=labels, parse_math=False)
    tidy(ax, x="log alpha", title="" if threshold is None else f"threshold {threshold:.3g}")
    ax.tick_params(axis="y", length=0)
    return ax


def layer_sparsity(sparsity: Mapping[str, float], ax: Axes | None = None) -> Axes:
    """Draw the fraction of removed weights of every layer as bars.

    Args:
        sparsity: fraction of removed weights by layer, each in [0, 1].
        ax: where to draw; a new figure without it.

    >>> from vardrop.app.report import layer_sparsity
    >>> len(layer_sparsity({"conv1": 0.6, "fc1": 0.99}).patches)
    2
    """
    _check_layers("sparsity", sparsity)
    ax = axes(ax, height=max(3.0, 0.8 + 0.3 * len(sparsity)))
    places, fractions = range(len(sparsity)), numbers("sparsity", list(sparsity.values()))
    ax.barh(places, fractions, color=BLUE, height=0.7)
    for place, fraction in zip(places, fractions, strict=True):
        ax.text(1.02, place, f"{fraction:.1%}", va="center", fontsize=SMALL)
    ax.set_yticks(places, labels=[short(name) for name in sparsity], parse_math=False)
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    tidy(ax, x="weights removed")
    ax.tick_params(axis="y", length=0)
    return ax


def sparsity_curve(
    curve: Sequence[Mapping[str, Any]], metric: str = "accuracy", ax: Axes | None = None
) -> Axes:
    """Draw a score against the fraction of removed weights, one point per threshold.

    Args:
        curve: points with "sparsity" and "metric", and "threshold" if they have one.
        metric: what the score is called.
        ax: where to draw; a new figure without it.

    >>> from vardrop.app.report import sparsity_curve
    >>> points = [{"sparsity": 0.5, "metric": 0.98}, {"sparsity": 0.9, "metric": 0.97}]
    >>> ax = sparsity_curve(points)
    >>> ax.get_ylabel()
    'accuracy'
    """
    if not curve:
        raise VardropError(
            "Expected `curve` to hold at least one point, but got none. Leave the picture out."
        )
    ax = axes(ax)
    points = sorted((float(point["sparsity"]), float(point["metric"])) for point in curve)
    ax.plot(*zip(*points, strict=True), color=BLUE, marker="o", markersize=4, linewidth=1.6)
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.grid(alpha=0.25)
    return tidy(ax, x="weights removed", y=metric)


def _check_layers(name: str, layers: Mapping[str, Any]) -> None:
    if not layers:
        raise VardropError(
            f"Expected `{name}` to hold at least one layer, but got none. Leave the picture out."
        )
