"""The output of the commands: tables, or JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from vardrop._core.errors import printable
from vardrop._core.files import to_json_safe
from vardrop.app.runs import Run
from vardrop.app.runs.compress import PACKED, SMALL
from vardrop.app.runs.models import Method
from vardrop.app.score_texts import SCORES, number, score_columns, title
from vardrop.compression import ShrinkPlan
from vardrop.tuning import Slimmed

if TYPE_CHECKING:
    from vardrop.app.report import Comparison

_FALLEN = 0.95  # the fraction of the MACs above which a model counts as slow as before


def print_line(text: str) -> None:
    """Print a line without control characters, which names from files may contain."""
    print(printable(text))


def _print_event(event: str, run: Run, content: Mapping[str, Any]) -> None:
    print(json.dumps({"event": event, "directory": str(run.directory), **content}))


def methods(listed: Sequence[Method], as_json: bool) -> None:
    """Print the recommended methods, then all of them with their papers."""
    if as_json:
        return print("\n".join(json.dumps(method._asdict()) for method in listed))
    width = max(len(method.name) for method in listed)
    first = [f"  {method.name:<{width}}  {method.use}" for method in listed if method.use]
    print("\n".join(["Recommended:", *first, "", "All methods:"]))
    for method in listed:
        print(f"  {method.name:<{width}}  {method.summary}")
        if method.paper:
            print(f"{'':{width + 4}}{method.paper}")


def run(run: Run, as_json: bool) -> None:
    """Print the scores of a run, and its directory, in the first process only."""
    if os.environ.get("RANK", "0") != "0":
        return
    stored, count = run.results, run.about.sizes["test"]
    if as_json:
        return _print_event("result", run, stored)
    on = f"{count:,} test examples" if count else "held-out examples"
    _print_scores(f"{run.config.net} on {run.about.name}, scores on {on}", stored)
    for line in filter(None, [run.advice, f"run: {run.directory}"]):
        print_line(line)


def rows(run: Run, scored: Mapping[str, Any], as_json: bool) -> None:
    """Print the scores of a run on new examples."""
    if as_json:
        return _print_event("rows", run, scored)
    on = f"{scored['rows']:,} rows of {scored['data']}"
    _print_scores(f"{run.config.net} of {run.directory}, scores on {on}", scored)


def _print_scores(head: str, scored: Mapping[str, Any]) -> None:
    columns = score_columns(scored)
    table = Table("score", *(Column(name, justify="right") for name in columns), "better")
    lines = [
        (title(name), name, [number(s[name]) if name in s else "" for s in columns.values()])
        for name in next(iter(columns.values()), {})
    ]
    gaps = [""] * (len(columns) - 1)
    for images, areas in scored.get("ood", {}).items():
        lines += [(f"{images}: {title(k)}", k, [number(v), *gaps]) for k, v in areas.items()]
    for label, name, cells in lines:
        table.add_row(label, *cells, SCORES[name].better if name in SCORES else "")
    print_line(head)
    Console().print(table)
    for note in scored.get("notes", []):
        print_line(note)


def compression(run: Run, report: ShrinkPlan | Slimmed, as_json: bool) -> None:
    """Print the removed weights of each layer, or the budget, and the scores on test data."""
    stored = run.results["compression"]
    if as_json:
        return _print_event("compression", run, stored)
    before, after = (number(stored[f"test_score_{when}"]) for when in ("before", "after"))
    scores = f"{stored['score']} on test data {before} -> {after}"
    small = f"small model: {run.directory / SMALL}"
    if isinstance(report, Slimmed):
        repeated = {*report.notes, report.plan.proof}  # they are in the report too
        layers = [line for line in str(report.plan).splitlines() if line not in repeated]
        return print_line("\n".join([*layers, str(report), scores, small]))
    print_line(str(report))
    if stored["macs_after"] > _FALLEN * stored["macs_before"]:
        print_line(
            "The MACs hardly fell: removing weights saves bytes (vardrop.pack), not latency. "
            f"For latency: vardrop compress {run.directory} --macs 0.5"
        )
    packed = stored["packed_bytes"]
    fewer = f"{report.total('bytes')[0] / packed:.0f} times fewer than before"
    print_line(f"threshold {stored['threshold']:.4g}, {scores}")
    print_line(f"{small}, {stored['bytes']:,} bytes")
    print_line(f"packed: {run.directory / PACKED}, {packed:,} bytes, {fewer}")


def comparison(
    compared: Comparison, scores: Sequence[str] | None, out: Path | None, as_json: bool
) -> None:
    """Print a comparison, and the files that were written."""
    if as_json:
        content = to_json_safe({"event": "comparison", **compared.to_json()})
        return print(json.dumps(content, allow_nan=False))
    from vardrop.app.report.comparison import FILE, PICTURE

    print_line(compared.table(scores))
    if out is not None:
        print_line(f"written: {out / FILE} and {out / PICTURE}")
