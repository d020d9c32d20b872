"""The results of a run as a Markdown page and a chart: python benchmarks/results.py <run.json>."""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from goals import GOALS
from measuring import Row
from peer_layers import BUILDS

HERE = Path(__file__).parent
PEERS = {name for builds in BUILDS.values() for name in builds}
Run = dict[str, Any]


def _number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if value < 100 else f"{value:.0f}"


def _marks(run: Run, candidate: str) -> str:
    for record in run["peers"].values():
        if candidate in record.get("checks", {}):
            return "; ".join(record["checks"][candidate]["marks"]) or "checks pass"
    return ""


def _once(rows: list[Row]) -> list[Row]:
    """Plain torch ran beside every library: its first row stands for all."""
    seen: set[str] = set()
    return [r for r in rows if not (r["candidate"] in seen or seen.add(r["candidate"]))]  # type: ignore


def _table(run: Run, rows: list[Row]) -> list[str]:
    lines = ["| candidate | ratio | quartiles | ms | remarks |", "|---|---:|---:|---:|---|"]
    for row in sorted(_once(rows), key=lambda r: (r.get("ratio") is None, r.get("ratio") or 0)):
        name = row["candidate"]
        spread = f"{_number(row['low'])}-{_number(row['high'])}" if "low" in row else ""
        time = _number(row["ms"], 3) if "ms" in row else ""
        remarks = "; ".join(t for t in (row.get("note", ""), _marks(run, name)) if t)
        label = f"*{name}*" if name in PEERS else name
        lines.append(f"| {label} | {_number(row.get('ratio'))} | {spread} | {time} | {remarks} |")
    return lines


def _goals(rows: list[Row]) -> list[str]:
    lines = [
        "## Goals",
        "",
        "| what | case | measured | goal | reached |",
        "|---|---|---:|---:|---|",
    ]
    for goal in GOALS:
        value = goal.measured(rows)
        reached = "not measured" if value is None else "yes" if value <= goal.bound else "no"
        lines.append(
            f"| {goal.text} | {goal.case} | {_number(value)} | {goal.bound:g} | {reached} |"
        )
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


def markdown(run: Run) -> str:
    machine, rows = run["machine"], run["rows"]
    threads = ", ".join(str(n) for n in run["threads"])
    lines = [
        "# Benchmarks", "",
        f"{run['date']}, {'quick' if run['quick'] else 'full'} run of at most {run['rounds']} "
        f"rounds; threads: {threads}; torch {machine['torch']}, {machine['processor']}, "
        f"load {machine['load before']:.1f} before and {machine.get('load after', 0):.1f} after.",
        "",
        "Every candidate of a table ran once a round, in a new order each round, beside plain "
        "torch in the same process; other libraries in environments of their own with the same "
        "torch. "
        "Ratios are medians over the median of the reference (ratio 1). On one thread times are "
        "processor times. Names of other libraries are in italics.",
        "", *_goals(rows), "", *_peers(run),
    ]  # fmt: skip

    def key(row: Row) -> tuple[int, str, str]:
        return row.get("threads", 1), row["group"], row["case"]

    order = {k: i for i, k in reversed(list(enumerate(key(r) for r in rows)))}
    for (count, group, case), part in groupby(sorted(rows, key=lambda r: order[key(r)]), key=key):
        extra = f", {count} threads" if count > 1 else ""
        lines += ["", f"## {group}: {case}{extra}", "", *_table(run, list(part))]
    return "\n".join([*lines, ""])


def chart(run: Run, path: Path) -> None:
    """Bars of the train-step ratios, ours and others."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [
        r for r in run["rows"]
        if r["group"] == "train step" and r.get("ratio") and r.get("threads", 1) == 1
    ]  # fmt: skip
    cases = list(dict.fromkeys(r["case"] for r in rows))
    figure, axes = plt.subplots(1, len(cases), figsize=(6 * len(cases), 9), squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        part = sorted(_once([r for r in rows if r["case"] == case]), key=lambda r: -r["ratio"])
        names, values = [r["candidate"] for r in part], [r["ratio"] for r in part]
        spread = [
            [max(0.0, r["ratio"] - r["low"]) for r in part],
            [max(0.0, r["high"] - r["ratio"]) for r in part],
        ]
        colours = [
            "tab:gray" if n.startswith("plain") else "tab:orange" if n in PEERS else "tab:blue"
            for n in names
        ]
        axis.barh(names, values, xerr=spread, color=colours, ecolor="black")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.tick_params(axis="y", labelsize=7)
        axis.set(title=case, xlabel="time of a train step, plain net with default Adam = 1")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(run: Run) -> None:
    (HERE / "RESULTS.md").write_text(
        markdown(run).replace("## Goals", "![train steps](train_step.png)\n\n## Goals", 1)
    )
    chart(run, HERE / "train_step.png")


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text()))
