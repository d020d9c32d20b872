"""Which of the papers' figures are reached: computed from theirs and ours, never counted by hand.

`[judged]` of a description names the figures that are compared, and what would be as good: "lower"
or "higher" than the paper's, or the "same". Figures that are beside a variant of the paper's recipe
are shown and not judged. With the standard error s over seeds (0 of one seed) and half a unit r of
the paper's last digit, a figure is better where it is past the paper's by more than 2 s + r, and
reached where it is not behind it by more than that. The same is within 2 s + r, or a tenth. Half a
unit counts for a fiftieth of the figure at most, since a round number may have lost its zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

_FLOATS = 1e-12  # what double precision may leave of a zero

Row = Mapping[str, Any]
Verdict = Literal["better", "reached", "not reached", "not run yet"]


@dataclass(frozen=True)
class Judged:
    """One figure of a paper, and what became of it."""

    row: Row
    figure: str
    verdict: Verdict
    paper: float
    ours: Mapping[str, Any] | None


def judged(table: Sequence[Row]) -> list[Judged]:
    """Every figure that is compared, in the order of the table."""
    return [_judged(row, figure) for row in table for figure in row["judged"]]


def _judged(row: Row, figure: str) -> Judged:
    paper = row["expected"][figure]
    ours = None if row["result"] is None else row["result"]["figures"].get(figure)
    verdict: Verdict = "not run yet"
    if ours is not None:
        verdict = judge(row["judged"][figure], paper, ours["mean"], ours["standard_error"])
    return Judged(row, figure, verdict, paper, ours)


def judge(way: str, paper: float, ours: float, error: float | None) -> Verdict:
    """What a figure is beside the paper's.

    >>> judge("lower", 1.92, 1.75, 0.04), judge("higher", 68, 50.5, 0.7)
    ('better', 'not reached')
    >>> judge("lower", 1.33, 1.34, 0.04), judge("same", 11.3, 11.35, None)
    ('reached', 'reached')
    """
    slack = 2 * (error or 0.0) + _rounding(paper)
    if way == "same":
        near = abs(ours - paper) <= max(slack, 0.1 * abs(paper), _FLOATS)
        return "reached" if near else "not reached"
    ahead = ours - paper if way == "higher" else paper - ours
    if ahead > slack:
        return "better"
    return "reached" if ahead >= -slack else "not reached"


def _rounding(value: float) -> float:
    """Half a unit of the last digit that is written."""
    written = f"{value:.12g}"
    decimals = len(written.partition(".")[2]) if "e" not in written else 0
    return min(0.5 * math.pow(10, -decimals), 0.02 * abs(value))


def summary(table: Sequence[Row]) -> str:
    """The head of the page: how many figures are reached, and why the others are not."""
    found = judged(table)
    counts = {v: sum(f.verdict == v for f in found) for v in ("better", "reached", "not reached")}
    waiting = sum(f.verdict == "not run yet" for f in found)
    alone = sum(f.ours is not None and f.ours["standard_error"] is None for f in found)
    lines = [
        "## Summary\n",
        f"Of {len(found)} figures that are judged, {counts['better']} are better than the paper's, "
        f"{counts['reached']} are reached, {counts['not reached']} are not, and {waiting} are not "
        f"run yet; {alone} rest on one seed. A figure is better where it is past the paper's by "
        "more than two standard errors and half a unit of the last digit, and reached where it is "
        "not behind by more; a figure that should be the same may differ by a tenth. Variants of a "
        "recipe stand in the table below and are not judged.\n",
    ]
    lines += _section(found, "Better", ("better",), cause=False)
    lines += _section(found, "Not reached", ("not reached",), cause=True)
    lines += _missing(table)
    return "\n".join(lines) + "\n"


def _section(
    found: Sequence[Judged], title: str, verdicts: Sequence[Verdict], cause: bool
) -> list[str]:
    own = [f for f in found if f.verdict in verdicts]
    if not own:
        return []
    head = "| experiment | figure: paper, ours |" + (" cause |" if cause else "")
    lines = [f"### {title}\n", head, "|---|---|" + ("---|" if cause else "")]
    for name in dict.fromkeys(f.row["name"] for f in own):
        group = [f for f in own if f.row["name"] == name]
        figures = "; ".join(
            f"{f.figure}: {f.paper:.5g}, {f.ours['mean']:.4g}" for f in group if f.ours
        )
        line = f"| [{group[0].row['title']}](#{name.replace('/', '-')}) | {figures} |"
        lines.append(line + (f" {group[0].row['cause']} |" if cause else ""))
    return [*lines, ""]


def _missing(table: Sequence[Row]) -> list[str]:
    """What is described and has not been run to its end, with the time it needs."""
    lines = []
    for row in table:
        done = 0 if row["result"] is None else len(row["result"]["runs"])
        if done < len(row["seeds"]):
            left = row["minutes"] * (1 - done / len(row["seeds"]))
            seeds = f"{done} of {len(row['seeds'])}"
            link = f"[{row['title']}](#{row['name'].replace('/', '-')})"
            lines.append(f"| {link} | {seeds} | {left:.0f} min |")
    if not lines:
        return []
    head = [
        "### Not run to the end\n",
        "| experiment | seeds done | CPU time left |",
        "|---|--:|--:|",
    ]
    return [*head, *lines, ""]
