"""The plot of one result, as its description asks: curves of the runs, or bars of the figures."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from vardrop.report.pictures.canvas import BLUE, GREY, OTHERS, SMALL, axes, legend, short, tidy

Row = Mapping[str, Any]


def plot(row: Row) -> bytes | None:
    """A small PNG that names the digest of its data, or None where there is nothing to draw.

    `[plot]` of a description has either `bars`, a part of the names of the figures to draw, or `x`
    and `y`, the fields of the curve, with `by` for a line each and `log` for the axes "x", "y",
    "xy".
    """
    if row["result"] is None or not row["plot"]:
        return None
    ax = _bars(row) if "bars" in row["plot"] else _curves(row)
    buffer = io.BytesIO()
    ax.get_figure(root=True).savefig(  # type: ignore[union-attr]
        buffer, format="png", dpi=90, metadata={"Description": row["digest"]}
    )
    return buffer.getvalue()


def _bars(row: Row) -> Axes:
    part = row["plot"]["bars"]
    found = {k: f for k, f in row["result"]["figures"].items() if part in k}
    ax = axes(None, 5.6, 1.0 + 0.3 * len(found))
    places = range(len(found), 0, -1)
    errors = [f["standard_error"] or 0.0 for f in found.values()]
    ax.barh(places, [f["mean"] for f in found.values()], xerr=errors, color=BLUE, label="ours")
    paper = [(row["expected"][k], p) for k, p in zip(found, places, strict=True)
             if k in row["expected"]]  # fmt: skip
    if paper:
        ax.plot(*zip(*paper, strict=True), "D", color=OTHERS[0], label="paper")
    ax.set_yticks(places, [short(key, 44) for key in found], fontsize=SMALL, parse_math=False)
    _scale(ax, row["plot"].get("log", ""))
    tidy(ax)
    # Bars fill the room below.
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=SMALL)
    return ax


def _curves(row: Row) -> Axes:
    spec = row["plot"]
    ax = axes(None, 5.6, 3.2)
    colours: dict[str, str] = {}
    for run in row["result"]["runs"]:
        for label, points in _lines(spec, run["curve"]).items():
            known = label in colours
            palette = (BLUE, *OTHERS, GREY)
            colour = colours.setdefault(label, palette[len(colours) % len(palette)])
            ax.plot(*zip(*points, strict=True), color=colour, linewidth=1.2,
                    label=None if known else label)  # fmt: skip
    _scale(ax, spec.get("log", ""))
    tidy(ax, spec["x"], "" if len(spec["y"]) > 1 else spec["y"][0])
    if len(colours) > 1:
        legend(ax)
    return ax


def _lines(spec: Row, curve: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """The points of each line: a field of the curve, for each value of `by`."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in curve:
        for y in spec["y"]:
            if record.get(y) is not None and spec["x"] in record:
                label = str(record[spec["by"]]) if "by" in spec else y
                found.setdefault(label, []).append((record[spec["x"]], record[y]))
    return found


def _scale(ax: Axes, log: str) -> None:
    if "x" in log:
        ax.set_xscale("log")
    if "y" in log:
        ax.set_yscale("log")
