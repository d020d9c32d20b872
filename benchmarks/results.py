"""The results of a run as a Markdown page and a chart: python benchmarks/results.py <run.json>."""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import chart
from goals import GOALS, LAST, OURS, TRAIN, Goal
from machine import QUIET
from measuring import Row, once
from peer_layers import of_peer
from profiling import sentence

HERE = Path(__file__).parent
Run = dict[str, Any]


def _number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if value < 100 else f"{value:.0f}"


def _marks(run: Run, candidate: str) -> str:
    """What the checks of a candidate found, where it is another library's."""
    for record in run["peers"].values():
        found = record.get("checks", {}).get(candidate.removesuffix(LAST))
        if found and of_peer(candidate):
            return "; ".join(found["marks"])
    return ""


def _table(run: Run, rows: list[Row]) -> list[str]:
    lines = ["| candidate | ratio | quartiles | ms | remarks |", "|---|---:|---:|---:|---|"]
    for row in sorted(once(rows), key=lambda r: (r.get("ratio") is None, r.get("ratio") or 0)):
        name = row["candidate"]
        spread = f"{_number(row['low'])}-{_number(row['high'])}" if "low" in row else ""
        time = _number(row["ms"], 3) if "ms" in row else ""
        remarks = "; ".join(t for t in (row.get("note", ""), _marks(run, name)) if t)
        label = f"*{name}*" if of_peer(name) else name
        lines.append(f"| {label} | {_number(row.get('ratio'))} | {spread} | {time} | {remarks} |")
    return lines


def _best_elsewhere(goal: Goal, rows: list[Row]) -> str:
    found = [
        row for row in rows
        if (row["group"], row["case"]) == (goal.group, goal.case) and row.get("threads", 1) == 1
        and of_peer(row["candidate"]) and row.get("ratio") is not None
    ]  # fmt: skip
    if goal.over or not found:
        return ""
    best = min(found, key=lambda row: float(row["ratio"]))
    return f"{_number(best['ratio'])} ({best['candidate']})"


def _goal(goal: Goal, rows: list[Row]) -> tuple[str, str]:
    """The row of a goal's table, and what holds the goal where it is missed."""
    bound = f"{goal.bound:g}" + (f", then {goal.then:g}" if goal.then else "")
    line = f"| {goal.text} | {goal.case} | {_best_elsewhere(goal, rows)} | {bound} |"
    answer = goal.answer(rows)
    if answer is None:
        return f"{line} - | not measured |", ""
    value, row = answer
    verdict, why = goal.verdict(value), ""
    if verdict == "no":
        held = sentence(row["profile"]) if "profile" in row else row.get("note", "")
        why = f"- {goal.text}, {goal.case}, by `{row['candidate']}`: {held}"
    return f"{line} {_number(value, 3 if value < 1 else 2)} | {verdict} |", why


def goals(rows: list[Row]) -> list[str]:
    lines = [
        "## Goals", "",
        "| what | case | best other library | goal | measured | reached |",
        "|---|---|---|---:|---:|---|",
    ]  # fmt: skip
    answers = [_goal(goal, rows) for goal in GOALS]
    lines += [line for line, _ in answers]
    if missed := [why for _, why in answers if why]:
        lines += ["", "What holds the goals that were missed (shares of a call's time):", ""]
        lines += missed
    return lines


def like_for_like(rows: list[Row]) -> list[str]:
    """Every library's step over ours, measured in turns in one process, each in its best layout."""
    lines = [
        "## Step of each library over ours", "",
        "Same process, optimizer and kind of noise, the KL's value computed at every step; each in "
        "its better memory layout. Above 1, ours is faster.", "",
        "| library | case | its time over ours |", "|---|---|---:|",
    ]  # fmt: skip
    best: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if row["group"] == TRAIN and row.get("threads") == 1 and "environment" in row:
            key = row["environment"], row["case"], row["candidate"].removesuffix(LAST)
            best[key] = min(row["ratio"], best.get(key, row["ratio"]))
    for (environment, case, name), ratio in best.items():
        ours = [r for (e, c, n), r in best.items() if (e, c) == (environment, case) and OURS in n]
        if of_peer(name) and ours:
            lines.append(f"| {name} | {case} | {_number(ratio / ours[0])} |")
    return lines


def _peers(run: Run) -> list[str]:
    lines = ["## Libraries compared", "", "| library | state |", "|---|---|"]
    for record in run["peers"].values():
        marks = [
            f"{name}: {'; '.join(found['marks']) or 'KL is a sum, gradients of all draws exact'}"
            for name, found in record.get("checks", {}).items()
        ]
        state = record.get("failure") or "<br>".join(marks)
        lines.append(f"| {record['requirement']} | {state} |")
    return lines


def _quietness(run: Run) -> str:
    loud = [part for part in run["parts"] if part["others"] > QUIET]
    if not loud:
        return "The machine was quiet otherwise."
    cores = [part["others"] for part in loud]
    names = ", ".join(f"{part['name']} on {part['threads']}" for part in loud)
    which = "all parts" if len(loud) == len(run["parts"]) else names
    return (
        f"**Not quiet**: other programs kept {min(cores):.1f} to {max(cores):.1f} cores busy "
        f"during {which}."
    )


def _head(run: Run) -> list[str]:
    machine, minutes = run["machine"], sum(p["seconds"] for p in run["parts"]) / 60
    return [
        "# Benchmarks", "",
        f"{run['date']}, {'quick' if run['quick'] else 'full'} run of {minutes:.0f} minutes, at "
        f"most {run['rounds']} rounds; threads: {', '.join(map(str, run['threads']))}; torch "
        f"{machine['torch']}, Python {machine['python']}, {machine['processor']}, "
        f"{machine['cores']} cores; load {machine['load before']:.1f} before and "
        f"{machine.get('load after', 0):.1f} after. {_quietness(run)}", "",
        "Every candidate of a table ran once a round, in a new order each round, beside plain "
        "torch in the same process; other libraries in environments of their own with the same "
        "torch. Ratios are medians over the median of the reference (ratio 1). On one thread "
        "times are processor times. Names of other libraries are in italics.", "",
    ]  # fmt: skip


def markdown(run: Run) -> str:
    rows = run["rows"]
    lines = [*_head(run), *goals(rows), "", *like_for_like(rows), "", *_peers(run)]

    def key(row: Row) -> tuple[int, str, str]:
        return row.get("threads", 1), row["group"], row["case"]

    order = {k: i for i, k in reversed(list(enumerate(key(r) for r in rows)))}
    for (count, group, case), part in groupby(sorted(rows, key=lambda r: order[key(r)]), key=key):
        extra = f", {count} threads" if count > 1 else ""
        lines += ["", f"## {group}: {case}{extra}", "", *_table(run, list(part))]
    return "\n".join([*lines, ""])


def write(run: Run) -> None:
    (HERE / "RESULTS.md").write_text(
        markdown(run).replace("## Goals", "![train steps](train_step.png)\n\n## Goals", 1)
    )
    chart.draw(run["rows"], HERE / "train_step.png")


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text()))
