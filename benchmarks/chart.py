"""The train steps as bars: plain torch, other libraries, ours."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib as mpl
from goals import TRAIN
from measuring import Row, once
from peer_layers import of_peer

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

_COLOURS = {
    "plain torch": "tab:gray",
    "vardrop": "tab:blue",
    "other libraries, and by hand": "tab:orange",
}


def _colour(name: str) -> str:
    if name.startswith("plain"):
        return _COLOURS["plain torch"]
    other = of_peer(name) or "by hand" in name
    return _COLOURS["other libraries, and by hand" if other else "vardrop"]


def _bars(axis: Any, case: str, rows: list[Row]) -> None:
    rows = sorted(rows, key=lambda r: -r["ratio"])
    spread = [
        [max(0.0, r["ratio"] - r["low"]) for r in rows],
        [max(0.0, r["high"] - r["ratio"]) for r in rows],
    ]
    names = [r["candidate"] for r in rows]
    axis.barh(
        names, [r["ratio"] for r in rows], xerr=spread, color=list(map(_colour, names)),
        ecolor="black",
    )  # fmt: skip
    axis.axvline(1, color="black", linewidth=0.8)
    axis.tick_params(axis="y", labelsize=7)
    axis.set(title=case, xlabel="time of a train step, plain net with default Adam = 1")


def draw(rows: list[Row], path: Path) -> None:
    """Ratios with quartiles on one thread, a panel a case."""
    rows = [r for r in rows if r["group"] == TRAIN and r.get("ratio") and r["threads"] == 1]
    cases = list(dict.fromkeys(r["case"] for r in rows))
    across = min(3, len(cases))
    down = -(-len(cases) // across)
    figure, axes = plt.subplots(
        down, across, figsize=(7 * across, 9 * down), squeeze=False, layout="constrained"
    )
    for axis, case in zip_longest(axes.flat, cases):
        if case is None:
            axis.set_axis_off()
        else:
            _bars(axis, case, once([r for r in rows if r["case"] == case]))
    axes.flat[-1].legend(
        handles=[Patch(color=colour, label=what) for what, colour in _COLOURS.items()],
        loc="lower right",
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
