"""The page of results: the papers' figures beside ours, written from what was measured alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from experiments.runner import Experiment, finished, result_path
from experiments.verdicts import summary
from vardrop._core.files import read_json, write_atomically
from vardrop.app.report.canvas import (
    BLUE,
    GREY,
    OTHERS,
    SMALL,
    axes,
    png,
    short,
    tidy,
)

Row = Mapping[str, Any]

_HEAD = """# Results

The papers' figures beside ours. `vardrop reproduce --page` writes this page and its plots from the
files in `results/`; edit the descriptions in `experiments/`, never the page. Seeds were stated in
advance; ours is mean ± standard error over them, and time is CPU minutes of one thread, all seeds.
`vardrop reproduce NAME` runs one of them in a clone, `vardrop reproduce --list` names them all, and
each is a function that can be called from the clone's root:

```python
from experiments.kingma import kl_approximations

print(kl_approximations(seed=0)["figures"])
```

"""

_TABLE = """## All figures

| # | experiment | figure | paper | ours | seeds | time |
|--:|---|---|--:|--:|--:|--:|
"""


def rows(known: dict[str, Experiment], results: Path) -> list[dict[str, Any]]:
    """For each experiment its description, its `result` or None, and the result's `digest`.

    A result that was measured with other arguments than the description states is left out.
    """
    found = []
    for experiment in known.values():
        path, row = result_path(experiment, results), asdict(experiment)
        done = bool(finished(experiment, path))
        row["result"] = read_json(path) if done else None
        row["digest"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if done else ""
        found.append(row)
    return found


def write_page(table: Sequence[Row], docs: Path) -> Path:
    """Write `results.md` and `results/*.png` below `docs`; the path of the page.

    Args:
        table: what `rows` returns.
        docs: a directory.
    """
    pictures = docs / "results"
    pictures.mkdir(parents=True, exist_ok=True)
    for row in table:
        if (drawn := plot(row)) is not None:
            write_atomically(pictures / picture(row), drawn)
    write_atomically(docs / "results.md", text(table).encode())
    return docs / "results.md"


def picture(row: Row) -> str:
    """The file name of an experiment's plot."""
    return str(row["name"]).replace("/", "-") + ".png"


def text(table: Sequence[Row]) -> str:
    """The page as Markdown."""
    lines = "".join(line for row in table for line in _lines(row))
    return (
        _HEAD
        + summary(table)
        + _splits(table)
        + _TABLE
        + lines
        + "".join(_section(row) for row in table)
    )


def _splits(table: Sequence[Row]) -> str:
    """One table of the NLL by method and data set, of the runs on the standard splits."""
    own = [r for r in table if r["function"] == "standard_splits" and r["result"] is not None]
    if not own:
        return ""
    named, published = "NLL, sparse VD", ("NLL, MC dropout", "NLL, ensemble")
    ours = [r["result"]["figures"][named]["mean"] for r in own]
    theirs = [min(r["expected"][key] for key in published) for r in own]
    lower = sum(a < b for a, b in zip(ours, theirs, strict=True))
    text = (
        "## UCI regression: NLL by method\n\nMean and standard error over the standard splits; "
        "lower is better. Sparse VD, the method named in advance, is below both published figures "
        f"on {lower} of {len(own)} tables.\n\n"
    )
    names = [f"[{str(r['name']).partition('/')[2]}](#{_anchor(r)})" for r in own]
    text += f"| method | {' | '.join(names)} |\n|---|{'--:|' * len(own)}\n"
    for key in (k for k in own[0]["result"]["figures"] if k.startswith("NLL, ")):
        cells = " | ".join(_mean(r["result"]["figures"][key]) for r in own)
        text += f"| {key.removeprefix('NLL, ')} | {cells} |\n"
    for key in published:
        cells = " | ".join(_number(r["expected"][key]) for r in own)
        text += f"| published: {key.removeprefix('NLL, ')} | {cells} |\n"
    return text + "\n"


def _lines(row: Row) -> list[str]:
    """The lines of an experiment in the table, a figure each."""
    number, title = row["row"] or "-", f"[{row['title']}](#{_anchor(row)})"
    keys = [*row["expected"], *row["headline"]]
    lines = []
    for i, key in enumerate(keys):
        first = f"| {number} | {title} " if i == 0 else "| | "
        paper = _number(row["expected"][key]) if key in row["expected"] else "-"
        lines.append(f"{first}| {key} | {paper} | {_measured(row, key, i == 0)} |\n")
    return lines


def _measured(row: Row, key: str, first: bool) -> str:
    result = row["result"]
    if result is None:
        return "not run yet | | " if first else " | | "
    runs = result["runs"]
    count = str(len(runs)) + ("" if len(runs) == len(row["seeds"]) else f" of {len(row['seeds'])}")
    cells = f"{count} | {_time([run['cpu_seconds'] for run in runs])}"
    figure = result["figures"].get(key)
    return f"{'-' if figure is None else _mean(figure)} | {cells if first else ' | '}"


def _time(seconds: Sequence[float | None]) -> str:
    """All runs together; nothing where one of them was not timed."""
    known = [s for s in seconds if s is not None]
    if len(known) < len(seconds):
        return "-"
    return f"{sum(known) / 60:.0f} min" if sum(known) >= 60 else f"{sum(known):.0f} s"


def _mean(figure: Mapping[str, Any]) -> str:
    """Mean ± standard error, the error with two digits and the mean with as many decimals."""
    mean, error = figure["mean"], figure["standard_error"]
    if not error:
        return _number(mean) + ("" if error is None else " ± 0")
    if error < 1e-4:
        return f"{mean:.2g} ± {error:.2g}"
    digits = 1 - math.floor(math.log10(error))
    return " ± ".join(_grouped(round(v, digits), max(digits, 0)) for v in (mean, error))


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else _grouped(value, 0)


def _grouped(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}".replace(",", " ")


def _anchor(row: Row) -> str:
    return str(row["name"]).replace("/", "-")


def _section(row: Row) -> str:
    """What there is to say about one experiment: source, notes, every figure, the plot."""
    lines = [f'\n<a id="{_anchor(row)}"></a>\n\n### {row["title"]}\n']
    lines.append(f"{row['paper']}; {row['source']}. `vardrop reproduce {row['name']}`\n")
    if row["notes"]:
        lines.append(f"{row['notes']}\n")
    if row["result"] is not None:
        shown = {*row["expected"], *row["headline"]}
        more = {k: f for k, f in row["result"]["figures"].items() if k not in shown}
        if more:
            cells = "".join(f"| {key} | {_mean(f)} |\n" for key, f in more.items())
            lines.append(f"| figure | ours |\n|---|--:|\n{cells}")
        if row["plot"]:
            lines.append(f"![{row['title']}](results/{picture(row)})\n")
        lines.append(f"<!-- results/{row['name']}.json {row['digest']} -->\n")
    return "\n".join(lines)


def plot(row: Row) -> bytes | None:
    """A small PNG that names the digest of its data, or None where there is nothing to draw.

    `[plot]` of a description has either `bars`, a part of the names of the figures to draw, or `x`
    and `y`, the fields of the curve, with `by` for a line each and `log` for the axes "x", "y",
    "xy".
    """
    if row["result"] is None or not row["plot"]:
        return None
    ax = _bars(row) if "bars" in row["plot"] else _curves(row)
    return png(ax, dpi=90, metadata={"Description": row["digest"]})


def _bars(row: Row) -> Axes:
    part = row["plot"]["bars"]
    found = {k: f for k, f in row["result"]["figures"].items() if part in k}
    ax = axes(None, 5.6, 1.0 + 0.3 * len(found))
    places = range(len(found), 0, -1)
    errors = [f["standard_error"] or 0.0 for f in found.values()]
    ax.barh(places, [f["mean"] for f in found.values()], xerr=errors, color=BLUE, label="ours")
    paper = [
        (row["expected"][k], p) for k, p in zip(found, places, strict=True) if k in row["expected"]
    ]
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
        for label, points in _points(spec, run["curve"]).items():
            known = label in colours
            palette = (BLUE, *OTHERS, GREY)
            colour = colours.setdefault(label, palette[len(colours) % len(palette)])
            ax.plot(
                *zip(*points, strict=True),
                color=colour,
                linewidth=1.2,
                label=None if known else label,
            )
    _scale(ax, spec.get("log", ""))
    tidy(ax, spec["x"], "" if len(spec["y"]) > 1 else spec["y"][0])
    if len(colours) > 1:
        for text in ax.legend(frameon=False, fontsize=SMALL).get_texts():
            text.set_parse_math(False)
    return ax


def _points(spec: Row, curve: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
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
