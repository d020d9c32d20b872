"""The results of a run as a Markdown page and a chart: python benchmarks/results.py <run.json>."""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import chart
from goals import COMPILED, FUSED, GOALS, LAST, OURS, TRAIN, Goal
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


# The methods of the first table, and the names of their candidates without layout and optimizer.
METHODS = {
    "`variance_layer()`": ("variance_layer",),
    "`variational_dropout()`": ("variational_dropout A",),
    "one weight sample per batch": ("weight_sample, exact KL", "weight_sample, KL value every 10"),
    "`bayes_by_backprop()`": ("bayes_by_backprop (LRT)",),
    "`sparse_vd()`": ("sparse_vd (LRT, exact KL)", "sparse_vd, KL value every 10", "sparse_vd"),
}
SAMPLES = 32


def _best_step(rows: list[Row], case: str, names: tuple[str, ...], compiled: bool) -> float | None:
    """The least time of a step with fused Adam, in the better memory layout."""
    forms = {name + COMPILED * compiled + layout + FUSED for name in names for layout in ("", LAST)}
    times = [
        float(row["ms"]) for row in rows
        if (row["group"], row["case"]) == (TRAIN, case) and row.get("threads", 1) == 1
        and row["candidate"] in forms and "environment" not in row and row.get("ms")
    ]  # fmt: skip
    return min(times, default=None)


def step_cost(rows: list[Row]) -> list[str]:
    """The time of a training step of each method, relative to plain torch at its best."""
    own = [r for r in rows if r["group"] == TRAIN and "environment" not in r]
    plain = {
        case: _best_step(rows, case, ("plain",), False) for case in {r["case"]: 0 for r in own}
    }
    cases = {case: time for case, time in plain.items() if time}
    names = [case.rpartition(" b")[0] for case in cases]
    lines = [
        "## Cost of a training step", "",
        "Forward pass, backward pass and step of the optimizer. 1.0 is plain torch in its faster "
        "memory layout with the same optimizer (fused Adam), one thread. In parentheses: the step "
        "compiled with `vd.compile`. The value of the KL is computed at every step or at every "
        "tenth step, whichever is faster. Its gradient is exact at every step.", "",
        f"| method | {' | '.join(names)} |", "|---|" + "---:|" * len(names),
        f"| plain torch | {' | '.join('1.0' for _ in names)} |",
    ]  # fmt: skip
    for method, candidates in METHODS.items():
        cells = []
        for case, time in cases.items():
            eager, compiled = (_best_step(rows, case, candidates, c) for c in (False, True))
            text = "-" if eager is None else f"{eager / time:.1f}"
            cells.append(f"{text} ({compiled / time:.1f})" if compiled else text)
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def prediction_cost(measured: dict[str, dict[str, float]]) -> list[str]:
    """The time of a prediction of a class model, in plain forward passes at their best."""
    lines = [
        "## Cost of a prediction", "",
        f"A prediction with {SAMPLES} samples of a model class, in forward passes of plain torch "
        "in its faster memory layout. `vd.predict` prepares the model in every call. "
        "`vd.Predictor` prepares it once, so use it for many small batches. Flipout (and every "
        "estimator with whole weights) samples one function for all examples.", "",
        "| model, batch | plain, ms | `vd.predict` | `vd.Predictor` | `vd.Predictor`, Flipout |",
        "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for case, ratios in measured.items():
        best = min(ratios["plain"], ratios.get("plain" + LAST, 1.0))
        names = ("predict, class", "Predictor, class", "Predictor, class, Flipout")
        cells = [_number(ratios[name] / best, 0) if name in ratios else "-" for name in names]
        name, _, batch = case.rpartition(" b")
        time = _number(ratios["plain, ms"] * best)
        lines.append(f"| {name}, {batch} | {time} | {' | '.join(cells)} |")
    return lines


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
        "## Appendix: goals and profiles", "",
        "| what | case | best other library | goal | measured | reached |",
        "|---|---|---|---:|---:|---|",
    ]  # fmt: skip
    answers = [_goal(goal, rows) for goal in GOALS]
    lines += [line for line, _ in answers]
    if missed := [why for _, why in answers if why]:
        lines += ["", "The operations that take the time where a goal was missed:", ""]
        lines += missed
    return lines


def like_for_like(rows: list[Row]) -> list[str]:
    """Every library's step over ours, measured in turns in one process, each in its best layout."""
    lines = [
        "## Other libraries", "",
        "The time of a training step of each library divided by the time of vardrop. Both ran in "
        "one process with the same optimizer and kind of noise, computed the value of the KL at "
        "every step, and used their faster memory layout. Above 1, vardrop is faster.", "",
        "| library | model | time relative to vardrop |", "|---|---|---:|",
    ]  # fmt: skip
    best: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if row["group"] == TRAIN and row.get("threads") == 1 and "environment" in row:
            key = row["environment"], row["case"], row["candidate"].removesuffix(LAST)
            best[key] = min(row["ratio"], best.get(key, row["ratio"]))
    for (environment, case, name), ratio in best.items():
        eager = {n: r for (e, c, n), r in best.items() if (e, c) == (environment, case)}
        ours = [r for n, r in eager.items() if OURS in n and COMPILED not in n]
        if of_peer(name) and ours:
            same_kl = ours[1] if name.endswith("ARD") and len(ours) > 1 else ours[0]
            lines.append(f"| {name} | {case} | {_number(ratio / same_kl)} |")
    return lines


def _peers(run: Run) -> list[str]:
    lines = ["### Checks", "", "| library | state |", "|---|---|"]
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
        "## How it was measured", "",
        f"{run['date']}, {'quick' if run['quick'] else 'full'} run of {minutes:.0f} minutes, at "
        f"most {run['rounds']} rounds; threads: {', '.join(map(str, run['threads']))}; torch "
        f"{machine['torch']}, Python {machine['python']}, {machine['processor']}, "
        f"{machine['cores']} cores; load {machine['load before']:.1f} before and "
        f"{machine.get('load after', 0):.1f} after. {_quietness(run)}", "",
        "Every candidate of a table ran once per round, in a new order in each round, in one "
        "process with plain torch. Other libraries ran in separate environments with the same "
        "torch. Ratios are medians divided by the median of the reference (ratio 1). With one "
        "thread, times are processor times. Names of other libraries are in italics. "
        "[How the benchmarks work](README.md) has the details.", "",
    ]  # fmt: skip


def markdown(run: Run) -> str:
    rows = run["rows"]
    measured = json.loads((HERE / "predict.json").read_text())
    lines = [
        "# Benchmarks", "",
        "How much longer training and prediction take than with plain torch, on CPU.", "",
        *step_cost(rows), "", *prediction_cost(measured), "", *like_for_like(rows), "",
        "![Time of a training step by library](train_step.png)", "", *_peers(run), "", *_head(run),
        "The tables below have all measurements of the run.",
    ]  # fmt: skip

    def key(row: Row) -> tuple[int, str, str]:
        return row.get("threads", 1), row["group"], row["case"]

    order = {k: i for i, k in reversed(list(enumerate(key(r) for r in rows)))}
    for (count, group, case), part in groupby(sorted(rows, key=lambda r: order[key(r)]), key=key):
        extra = f", {count} threads" if count > 1 else ""
        lines += ["", f"## {group}: {case}{extra}", "", *_table(run, list(part))]
    return "\n".join([*lines, "", *goals(rows), ""])


def write(run: Run) -> None:
    """Write the page and its chart; those of a quick run, which is less exact, to build/."""
    folder = HERE.parent / "build" / "benchmarks" if run["quick"] else HERE
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "RESULTS.md").write_text(markdown(run))
    chart.draw(run["rows"], folder / "train_step.png")
    print(folder / "RESULTS.md")


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text()))
