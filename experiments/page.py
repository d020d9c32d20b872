"""The pages of results, written from the files in `results/` alone."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from experiments.runner import Experiment, finished, result_path
from experiments.verdicts import RULES, VERDICTS, Item, count_verdicts
from vardrop._core.files import read_json, write_atomically
from vardrop.app.report import canvas

Row = Mapping[str, Any]
_COLOURS = {
    "better": canvas.GREEN,
    "reached": canvas.BLUE,
    "trade-off": canvas.OTHERS[3],
    "behind": canvas.RED,
}

_INTRO = """# Results

This page compares vardrop with the numbers of the papers. Values of vardrop ("ours") are means ±
standard errors over seeds that were fixed in advance. The page is written from the files in
`results/` by `vardrop reproduce --page`. `vardrop reproduce --list` lists all experiments,
`vardrop reproduce NAME` runs one, and `--quick` runs a version that takes about a minute.

"""


def rows(experiments: dict[str, Experiment], results: Path) -> list[dict[str, Any]]:
    """For each experiment its description, its `result` or None, and the result's `digest`.

    A result that was measured with other arguments than the description states is left out.
    """
    table = []
    for experiment in experiments.values():
        path, row = result_path(experiment, results), asdict(experiment)
        has_result = bool(finished(experiment, path))
        row["result"] = read_json(path) if has_result else None
        row["digest"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if has_result else ""
        table.append(row)
    return table


def write_pages(table: Sequence[Row], items: Sequence[Item], docs: Path) -> Path:
    """Write `results.md`, a page for each paper and the pictures below `docs`."""
    folder = docs / "results"
    folder.mkdir(parents=True, exist_ok=True)
    for row in table:
        if (image := plot(row)) is not None:
            write_atomically(folder / picture(row), image)
    for paper, group in group_by_paper(table).items():
        write_atomically(folder / f"{paper}.md", paper_page(group).encode())
        judged = [item for item in items if _paper(item.row) == paper]
        if (image := plot_items(judged)) is not None:
            write_atomically(folder / f"{paper}.png", image)
    write_atomically(docs / "results.md", summary_page(table, items).encode())
    return docs / "results.md"


def group_by_paper(table: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each folder of descriptions."""
    groups: dict[str, list[Row]] = {}
    for row in table:
        groups.setdefault(_paper(row), []).append(row)
    return groups


def _paper(row: Row) -> str:
    return str(row["name"]).partition("/")[0]


def _run(row: Row) -> str:
    return str(row["name"]).partition("/")[2]


def picture(row: Row) -> str:
    """The file name of an experiment's plot."""
    return str(row["name"]).replace("/", "-") + ".png"


def summary_page(table: Sequence[Row], items: Sequence[Item]) -> str:
    """`results.md`: headline claims, verdicts, a picture for each paper, links to the details."""
    counts = count_verdicts(items)
    passed = counts["better"] + counts["reached"]
    text = _INTRO + "## Headline claims\n\n| claim | paper | ours | seeds | verdict |\n"
    text += "|---|--:|--:|--:|---|\n"
    for item in items:
        if item.claim:
            text += f"| [{item.claim}]({_link(item.row)}) | {_values(item)} | {item.verdict} |\n"
    text += f"\n## All judged items\n\n{passed} of {len(items)} items are reached or better: "
    text += ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    text += f".\n\n{RULES}" + _causes(items)
    text += "## Plots\n\nOur judged values divided by the paper's values, with standard errors.\n\n"
    groups = group_by_paper(table)
    drawn = {_paper(item.row) for item, _ in _drawable(items)}
    for paper, group in groups.items():
        if paper in drawn:
            text += f"### {group[0]['paper']}\n\n![{group[0]['paper']}](results/{paper}.png)\n\n"
    text += "## Details\n\n"
    for paper, group in groups.items():
        text += f"- [{paper}](results/{paper}.md): {group[0]['paper']}\n"
    return text


def _values(item: Item) -> str:
    """The cells paper, ours and seeds of an item."""
    paper = ", ".join(_number(item.row["expected"][figure]) for figure in item.directions)
    result = item.row["result"]
    if result is None:
        return f"{paper} | | 0"
    ours = ", ".join(format_mean(result["figures"][figure]) for figure in item.directions)
    return f"{paper} | {ours} | {len(result['runs'])}"


def _link(row: Row) -> str:
    return f"results/{_paper(row)}.md#{_run(row)}"


def _causes(items: Sequence[Item]) -> str:
    """A table of the items that are not reached, with the cause, one line per experiment."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        if item.verdict in ("trade-off", "behind"):
            groups.setdefault(item.row["name"], []).append(item)
    text = "### Not reached\n\n| item | paper | ours | seeds | cause |\n|---|--:|--:|--:|---|\n"
    for group in groups.values():
        paper, ours, seeds = zip(*(_values(item).split(" | ") for item in group), strict=True)
        names = "<br>".join(f"[{item.name}]({_link(item.row)})" for item in group)
        text += f"| {names} | {'<br>'.join(paper)} | {'<br>'.join(ours)} | {seeds[0]} "
        text += f"| {group[0].row['cause']} |\n"
    return text + "\n" if groups else ""


def paper_page(group: Sequence[Row]) -> str:
    """The page of a paper: a table of all experiments, then notes and a picture for each."""
    title = re.sub("^no single paper: (.)", lambda first: first[1].upper(), group[0]["paper"])
    text = f"# {title}\n\n| experiment | value | paper | ours | seeds |\n"
    text += "|---|---|--:|--:|--:|\n" + "".join(map(_table_line, group))
    for row in group:
        text += f'\n### <a id="{_run(row)}"></a>{row["title"]}\n\nSource: {row["source"]}. '
        text += f"`vardrop reproduce {row['name']}`, {row['minutes']:g} minutes. {row['notes']}\n"
        if row["result"] is not None and row["plot"]:
            text += f"\n![{row['title']}]({picture(row)})\n"
    return text


def _table_line(row: Row) -> str:
    figures = [*row["expected"], *row["headline"]]
    paper = [_number(row["expected"][f]) if f in row["expected"] else "" for f in figures]
    ours, seeds = ["not run"], f"0 of {len(row['seeds'])}"
    if row["result"] is not None:
        results, runs = row["result"]["figures"], len(row["result"]["runs"])
        ours = [format_mean(results[f]) if f in results else "" for f in figures]
        seeds = str(runs) if runs == len(row["seeds"]) else f"{runs} of {len(row['seeds'])}"
    cells = ("<br>".join(column) for column in (figures, paper, ours))
    return f"| [{_run(row)}](#{_run(row)}) | {' | '.join(cells)} | {seeds} |\n"


def format_mean(result: Mapping[str, Any]) -> str:
    """Mean ± standard error, the error with one digit (two if the first is 1 or 2)."""
    mean, error = result["mean"], result["standard_error"] or 0.0
    if 0 < abs(mean) < 1e-9:
        return "< 1e-9"
    if error <= 1e-6 * abs(mean):
        return _number(mean)
    digits = -math.floor(math.log10(error / 3))
    if digits > 5:
        return f"{mean:.2g} ± {error:.1g}"
    return " ± ".join(_group_digits(round(v, digits), max(digits, 0)) for v in (mean, error))


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else _group_digits(value, 0)


def _group_digits(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}".replace(",", " ")


def _drawable(items: Sequence[Item]) -> list[tuple[Item, str]]:
    """The judged values with a result and a paper's value that one can divide by."""
    measured = [item for item in items if item.row["result"] is not None]
    return [(item, f) for item in measured for f in item.directions if item.row["expected"][f]]


def plot_items(items: Sequence[Item]) -> bytes | None:
    """A PNG of the judged values divided by the paper's; None if nothing can be drawn."""
    points = _drawable(items)
    if not points:
        return None
    ax = canvas.axes(None, 5.6, 0.9 + 0.22 * len(points))
    for place, (item, figure) in enumerate(reversed(points)):
        paper, ours = item.row["expected"][figure], item.row["result"]["figures"][figure]
        error = abs((ours["standard_error"] or 0.0) / paper)
        colour = _COLOURS[item.verdict]
        ax.errorbar(ours["mean"] / paper, place, xerr=error, fmt="o", ms=4, color=colour)
    ax.axvline(1.0, color=canvas.GREY, linewidth=0.8)
    labels = [canvas.short(item.label(figure), 60) for item, figure in reversed(points)]
    ax.set_yticks(range(len(points)), labels, fontsize=canvas.SMALL, parse_math=False)
    digests = "".join(dict.fromkeys(item.row["digest"] for item, _ in points))
    return canvas.png(canvas.tidy(ax, "ours / paper"), dpi=90, metadata={"Description": digests})


def plot(row: Row) -> bytes | None:
    """A small PNG that names the digest of its data, or None if there is nothing to draw.

    `[plot]` of a description has either `bars`, a part of the names of the figures to draw, or `x`
    and `y`, the fields of the curve, with `by` for one line each and `log` for the axes "x", "y",
    "xy".
    """
    if row["result"] is None or not row["plot"]:
        return None
    ax = _bars(row) if "bars" in row["plot"] else _curves(row)
    log = row["plot"].get("log", "")
    ax.set_xscale("log" if "x" in log else "linear")
    if "y" in log:
        ax.set_yscale("log")
    return canvas.png(ax, dpi=90, metadata={"Description": row["digest"]})


def _bars(row: Row) -> Axes:
    part = row["plot"]["bars"]
    results = {key: result for key, result in row["result"]["figures"].items() if part in key}
    ax = canvas.axes(None, 5.6, 1.0 + 0.3 * len(results))
    places = dict(zip(results, range(len(results), 0, -1), strict=True))
    errors = [result["standard_error"] or 0.0 for result in results.values()]
    means = [result["mean"] for result in results.values()]
    ax.barh(list(places.values()), means, xerr=errors, color=canvas.BLUE, label="ours")
    if paper := [(row["expected"][key], places[key]) for key in results if key in row["expected"]]:
        ax.plot(*zip(*paper, strict=True), "D", color=canvas.RED, label="paper")
    names = [canvas.short(key, 44) for key in results]
    ax.set_yticks(list(places.values()), names, fontsize=canvas.SMALL, parse_math=False)
    canvas.tidy(ax)
    ax.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=canvas.SMALL
    )
    return ax


def _curves(row: Row) -> Axes:
    spec, palette = row["plot"], (canvas.BLUE, *canvas.OTHERS, canvas.GREY)
    ax = canvas.axes(None, 5.6, 3.2)
    colours: dict[str, str] = {}
    for run in row["result"]["runs"]:
        for label, points in _points(spec, run["curve"]).items():
            name = None if label in colours else label
            colour = colours.setdefault(label, palette[len(colours) % len(palette)])
            ax.plot(*zip(*points, strict=True), color=colour, linewidth=1.2, label=name)
    canvas.tidy(ax, spec["x"], "" if len(spec["y"]) > 1 else spec["y"][0])
    if len(colours) > 1:
        for text in ax.legend(frameon=False, fontsize=canvas.SMALL).get_texts():
            text.set_parse_math(False)
    return ax


def _points(spec: Row, curve: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """The points of each line: a field of the curve, for each value of `by`."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for record in curve:
        for y in spec["y"]:
            if record.get(y) is not None and spec["x"] in record:
                label = str(record[spec["by"]]) if "by" in spec else y
                lines.setdefault(label, []).append((record[spec["x"]], record[y]))
    return lines
