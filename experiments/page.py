"""The page of results: the papers' figures beside ours, written from what was measured alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.plots import plot
from vardrop.files import write_atomically

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

| # | experiment | figure | paper | ours | seeds | time |
|--:|---|---|--:|--:|--:|--:|
"""


def write_page(rows: Sequence[Row], docs: Path) -> Path:
    """Write `results.md` and `results/*.png` below `docs`; the path of the page.

    Args:
        rows: what `rows` returns.
        docs: a directory.
    """
    pictures = docs / "results"
    pictures.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if (drawn := plot(row)) is not None:
            write_atomically(pictures / picture(row), drawn)
    write_atomically(docs / "results.md", text(rows).encode())
    return docs / "results.md"


def picture(row: Row) -> str:
    """The file name of an experiment's plot."""
    return str(row["name"]).replace("/", "-") + ".png"


def text(rows: Sequence[Row]) -> str:
    """The page as Markdown."""
    table = "".join(line for row in rows for line in _lines(row))
    return _HEAD + table + "".join(_section(row) for row in rows)


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
