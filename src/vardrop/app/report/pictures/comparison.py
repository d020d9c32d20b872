"""Pictures of comparisons: scores of models with their intervals."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes

from vardrop._core.errors import VardropError
from vardrop.app.report.pictures import canvas
from vardrop.app.score_texts import title
from vardrop.metrics.intervals import Estimate

_PANEL, _ROW, _NAMES = 2.6, 0.32, 1.6  # inches


def score_intervals(scores: Mapping[str, Mapping[str, Estimate]], ax: Axes | None = None) -> Axes:
    """Draw each score in a separate panel: a dot per model, its 95% interval as a line.

    A dashed line marks the first model, which the others are compared with.

    Args:
        scores: estimates by score and model.
        ax: where to draw; a new figure by default.

    >>> from vardrop.metrics.intervals import Estimate
    >>> from vardrop.app.report import score_intervals
    >>> found = {"a": Estimate(0.9, 0.01, 0.88, 0.92), "b": Estimate(0.95)}
    >>> ax = score_intervals({"accuracy": found})
    >>> [panel.get_xlabel() for panel in ax.child_axes]
    ['accuracy']
    """
    if not scores or not all(scores.values()):
        raise VardropError(
            "Expected `scores` to hold at least one score of one model, but got none. Leave the "
            "picture out."
        )
    names = list(dict.fromkeys(name for found in scores.values() for name in found))
    width = _NAMES + _PANEL * len(scores)
    ax = canvas.axes(ax, width=width, height=1.0 + _ROW * len(names))
    ax.set_axis_off()
    for i, (score, found) in enumerate(scores.items()):
        panel = ax.inset_axes((i / len(scores), 0.0, 0.86 / len(scores), 1.0))
        _panel(panel, found, names)
        labels = [canvas.short(name) for name in names] if i == 0 else [""] * len(names)
        panel.set_yticks(range(len(names)), labels=labels, parse_math=False)
        canvas.tidy(panel, x=title(score))
        panel.tick_params(axis="y", length=0)
    return ax


def _panel(panel: Axes, found: Mapping[str, Estimate], names: list[str]) -> None:
    for place, name in enumerate(names):
        if name in found:
            value, _, low, high = found[name]
            if low is not None and high is not None:
                panel.plot([low, high], [place, place], color=canvas.BLUE, linewidth=1.6, alpha=0.6)
            panel.plot([value], [place], color=canvas.BLUE, marker="o", markersize=5)
    if names[0] in found:
        panel.axvline(found[names[0]].value, color=canvas.GREY, linestyle="--", linewidth=1)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.grid(axis="x", alpha=0.25)
