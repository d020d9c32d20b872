"""Pictures of training: NLL, KL and beta by epoch, each on its own scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from vardrop._core.errors import VardropError
from vardrop.app.report.pictures import canvas

_PARTS = {"nll": ("NLL", canvas.BLUE), "kl": ("KL", canvas.RED), "beta": ("beta", canvas.GREEN)}


def training_curves(history: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """Draw NLL, KL and beta by epoch in separate strips, because their scales differ.

    Args:
        history: one mapping per epoch, with "epoch" and any of "nll", "kl" and "beta". An "nll"
            in "validation" is drawn as a dashed line.
        ax: where to draw; a new figure by default.

    >>> from vardrop.app.report import training_curves
    >>> ax = training_curves([{"epoch": 0, "nll": 2.3, "kl": 900.0, "beta": 0.0}])
    >>> [strip.get_ylabel() for strip in ax.child_axes]
    ['NLL', 'KL', 'beta']
    """
    parts = [key for key in _PARTS if any(key in row for row in history)]
    if not parts:
        raise VardropError(
            f"Expected `history` to hold rows with {', '.join(_PARTS)}, but got {len(history)} "
            "rows without any of them. Pass the rows of history.jsonl."
        )
    ax = canvas.axes(ax)
    ax.set_axis_off()
    height, strips = 1 / len(parts), []
    for i, key in enumerate(parts):
        strip = ax.inset_axes((0.0, 1 - (i + 1) * height, 1.0, 0.82 * height))
        strips.append(strip)
        label, colour = _PARTS[key]
        _curve(strip, history, key, colour)
        canvas.tidy(strip, x="epoch" if i == len(parts) - 1 else "", y=label)
        strip.tick_params(labelbottom=i == len(parts) - 1)
        strip.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        strip.yaxis.set_major_locator(MaxNLocator(nbins=3))
        if key == "kl":
            strip.yaxis.set_major_formatter(EngFormatter(sep=""))
    canvas.figure_of(ax).align_ylabels(strips)
    return ax


def _curve(strip: Axes, history: Sequence[Mapping[str, Any]], key: str, colour: str) -> None:
    """One quantity by epoch, with its validation score as a dashed line."""
    validation = [row.get("validation") or {} for row in history]
    for rows, style in ((history, "-"), (validation, "--")):
        points = [
            (row.get("epoch", i), own[key])
            for i, (row, own) in enumerate(zip(history, rows, strict=True))
            if own.get(key) is not None
        ]
        if points:
            marker = "o" if len(points) == 1 else None
            strip.plot(*zip(*points, strict=True), style, color=colour, marker=marker)
        if points and rows is validation:
            strip.set_title("dashed: validation", loc="right", fontsize=canvas.SMALL, pad=3)
