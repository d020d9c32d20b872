"""What the commands print: tables, or JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from vardrop._core.checks import printable
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


def say(text: str) -> None:
    """Print a line without control characters, which names from files may hold."""
    print(printable(text))


def _print_event(event: str, run: Run, values: Mapping[str, Any]) -> None:
    print(json.dumps({"event": event, "directory": str(run.directory), **values}))


def methods(listed: Sequence[Method], as_json: bool) -> None:
    """Print the named methods, one line each."""
    width = max(len(method.name) for method in listed)
    for method in listed:
        paper = f" [{method.paper}]" if method.paper else ""
        text = f"{method.name:<{width}}  {method.summary}{paper}"
        print(json.dumps(method._asdict()) if as_json else text)


def run(run: Run, as_json: bool) -> None:
    """Print the scores of a run, and its directory, in the first process only."""
    if os.environ.get("RANK", "0") != "0":
        return
    results, count = run.results, run.about.sizes["test"]
    if as_json:
        return _print_event("result", run, results)
    on = f"{count:,} test examples" if count else "held-out examples"
    _print_scores(f"{run.config.net} on {run.about.name}, scores on {on}", results)
    for line in filter(None, [run.advice, f"run: {run.directory}"]):
        say(line)


def rows(run: Run, scored: Mapping[str, Any], as_json: bool) -> None:
    """Print the scores of a run on new rows."""
    if as_json:
        return _print_event("rows", run, scored)
    on = f"{scored['rows']:,} rows of {scored['data']}"
    _print_scores(f"{run.config.net} of {run.directory}, scores on {on}", scored)


def _print_scores(head: str, results: Mapping[str, Any]) -> None:
    columns = score_columns(results)
    table = Table("score", *(Column(name, justify="right") for name in columns), "better")
    lines = {
        title(name): (name, [number(scores.get(name)) for scores in columns.values()])
        for name in next(iter(columns.values()), {})
    }
    for data, scores in results.get("ood", {}).items():
        gaps = [""] * (len(columns) - 1)
        lines |= {f"{data}: {title(k)}": (k, [number(v), *gaps]) for k, v in scores.items()}
    for label, (name, cells) in lines.items():
        table.add_row(label, *cells, SCORES[name].better if name in SCORES else "")
    say(head)
    Console().print(table)
    for line in results.get("notes", []):
        say(line)


def compression(run: Run, plan: ShrinkPlan, as_json: bool) -> None:
    """Print what was removed, layer by layer, and the scores on test data."""
    results = run.results["compression"]
    if as_json:
        return _print_event("compression", run, results)
    say(str(plan))
    if results["macs_after"] > _FALLEN * results["macs_before"]:
        say(
            "The MACs hardly fell: removing weights saves bytes (vardrop.pack), not latency. "
            f"For latency: vardrop compress {run.directory} --macs 0.5"
        )
    say(f"threshold {results['threshold']:.4g}, {_test_scores(results)}")
    say(f"small model: {run.directory / SMALL}, {results['bytes']:,} bytes")
    packed = results["packed_bytes"]
    fewer = f"{plan.total('bytes')[0] / packed:.0f} times fewer than before"
    say(f"packed: {run.directory / PACKED}, {packed:,} bytes, {fewer}")


def slim(run: Run, report: Slimmed, as_json: bool) -> None:
    """Print the budget that a model was trained to, and the scores on test data."""
    results = run.results["compression"]
    if as_json:
        return _print_event("compression", run, results)
    repeated = {*report.notes, report.plan.proof}  # the report says them too
    layers = [line for line in str(report.plan).splitlines() if line not in repeated]
    say("\n".join([*layers, str(report), _test_scores(results)]))
    say(f"small model: {run.directory / SMALL}")


def _test_scores(results: Mapping[str, Any]) -> str:
    before, after = (number(results[f"test_score_{when}"]) for when in ("before", "after"))
    return f"{results['score']} on test data {before} -> {after}"


def comparison(
    compared: Comparison, scores: Sequence[str] | None, out: Path | None, as_json: bool
) -> None:
    """Print a comparison, and where it was written."""
    if as_json:
        print(
            json.dumps(to_json_safe({"event": "comparison", **compared.to_json()}), allow_nan=False)
        )
        return
    from vardrop.app.report.comparison import FILE, PICTURE

    say(compared.table(scores))
    if out is not None:
        say(f"written: {out / FILE} and {out / PICTURE}")
