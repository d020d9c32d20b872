"""Training steps as bars, one panel per model: plain torch, vardrop, and each other library."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import matplotlib as mpl
from goals import LAST, TRAIN
from measuring import Row
from peer_layers import BUILDS, LOCAL, OURS

mpl.use("Agg")
import matplotlib.pyplot as plt

PLAIN = "plain torch"
_KINDS = {
    "vardrop, weight draws": "vardrop, one sample per batch",
    "vardrop, LRT": "vardrop, local",
}
_GREY, _BLUE, _ORANGE = "tab:gray", "tab:blue", "tab:orange"


def _order() -> dict[str, tuple[str, ...]]:
    """The bars from above, and the candidates that each is the best of."""
    drawn = [peer for peer in BUILDS if peer not in LOCAL]
    found: dict[str, tuple[str, ...]] = {PLAIN: ("plain",)}
    for ours, peers in zip(("vardrop, weight draws", "vardrop, LRT"), (drawn, LOCAL), strict=True):
        assert ours in OURS
        found[_KINDS[ours]] = (ours,)
        found |= {peer: tuple(BUILDS[peer]) for peer in peers}
    return found


def bars(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Times by case and bar, relative to plain torch, all in their better memory layout.

    vardrop ran next to every library, with the optimizer and the KL of that comparison. Its bar is
    the median over those processes.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    names = {candidate: bar for bar, several in _order().items() for candidate in several}
    for row in rows:
        bar = names.get(row["candidate"].removesuffix(LAST))
        timed = row["group"] == TRAIN and row.get("threads") == 1 and row.get("ratio")
        if bar is None or not timed or ("environment" not in row and bar != PLAIN):
            continue
        times = found.setdefault(row["case"], {}).setdefault(bar, {})
        where = row.get("environment", "")
        times[where] = min(row["ratio"], times.get(where, row["ratio"]))
    medians = {
        case: {bar: median(times.values()) for bar, times in several.items()}
        for case, several in found.items()
    }
    return {
        case: {bar: time / several.get(PLAIN, 1.0) for bar, time in several.items()}
        for case, several in medians.items()
    }


def _colour(bar: str) -> str:
    return {PLAIN: _GREY, **dict.fromkeys(_KINDS.values(), _BLUE)}.get(bar, _ORANGE)


def draw(rows: list[Row], path: Path) -> None:
    """Draw one panel per case, for one thread. Libraries are below vardrop with the same noise."""
    cases, order = bars(rows), list(_order())
    figure, axes = plt.subplots(
        1, len(cases), figsize=(1.6 + 2.5 * len(cases), 3.4), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, (case, found) in zip(axes.flat, cases.items(), strict=True):
        values = [found.get(bar, 0.0) for bar in order]
        drawn = axis.barh(order, values, color=[_colour(bar) for bar in order])
        axis.bar_label(drawn, [f"{v:.1f}" if v else "-" for v in values], padding=2, fontsize=8)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xlim(0, 1.2 * max(values))
        axis.set_title(case.rpartition(" b")[0] or case, fontsize=9)
    axes.flat[0].invert_yaxis()
    figure.supxlabel(
        "time of a training step, each in its faster memory layout, plain torch = 1", fontsize=9
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
