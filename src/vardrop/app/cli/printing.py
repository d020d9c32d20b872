"""What the commands print: tables, or JSON lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from vardrop._core.checks import printable
from vardrop._core.files import plain
from vardrop.app.runs import Run
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


def standing(run: Run) -> None:
    """Print one line on stderr if the training was interrupted."""
    if run.standing:
        print(f"vardrop: {printable(run.standing)}", file=sys.stderr)


def methods(found: Sequence[Method], as_json: bool) -> None:
    """Print the named methods, one line each."""
    if as_json:
        for method in found:
            print(json.dumps(method._asdict()))
        return
    width = max(len(method.name) for method in found)
    for method in found:
        paper = f" [{method.paper}]" if method.paper else ""
        print(f"{method.name:<{width}}  {method.summary}{paper}")


def run(run: Run, as_json: bool) -> None:
    """Print the scores of a run, and its directory, in the first process only."""
    if os.environ.get("RANK", "0") != "0":
        return
    results = run.results
    if as_json:
        return _print_event("result", run, results)
    count = run.about.sizes["test"]
    on = f"{count:,} test examples" if count else "held-out examples"
    say(f"{run.config.net} on {run.about.name}, scores on {on}")
    _table(results)
    for line in [*results.get("notes", []), *filter(None, [run.advice])]:
        say(line)
    say(f"run: {run.directory}")


def rows(run: Run, found: Mapping[str, Any], as_json: bool) -> None:
    """Print the scores of a run on new rows."""
    if as_json:
        return _print_event("rows", run, found)
    say(f"{run.config.net} of {run.directory}, scores on {found['rows']:,} rows of {found['data']}")
    _table(found)
    for line in found["notes"]:
        say(line)


def _table(results: Mapping[str, Any]) -> None:
    table, columns = Table(), score_columns(results)
    table.add_column("score")
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("better")
    for name in next(iter(columns.values()), {}):
        cells = (number(scores.get(name)) for scores in columns.values())
        table.add_row(title(name), *cells, _better(name))
    for data, scores in results.get("ood", {}).items():
        for name, value in scores.items():
            gaps = [""] * (len(columns) - 1)
            table.add_row(f"{data}: {title(name)}", number(value), *gaps, _better(name))
    Console().print(table)


def _better(name: str) -> str:
    return SCORES[name].better if name in SCORES else ""


def compression(run: Run, plan: ShrinkPlan, as_json: bool) -> None:
    """Print what was removed, layer by layer, and the scores on test data."""
    found = run.results["compression"]
    if as_json:
        return _print_event("compression", run, found)
    say(str(plan))
    if found["macs_after"] > _FALLEN * found["macs_before"]:
        print(
            "The MACs hardly fell: removing weights saves bytes (vardrop.pack), not latency. "
            f"For latency: vardrop compress {run.directory} --macs 0.5"
        )
    print(f"threshold {found['threshold']:.4g}, {_test_scores(found)}")
    say(f"small model: {run.directory / 'small.safetensors'}, {found['bytes']:,} bytes")
    packed = found["packed_bytes"]
    fewer = f"{plan.total('bytes')[0] / packed:.0f} times fewer than before"
    say(f"packed: {run.directory / 'small.vdp'}, {packed:,} bytes, {fewer}")


def slimmed(run: Run, found: Slimmed, as_json: bool) -> None:
    """Print the budget that a model was trained to, and the scores on test data."""
    kept = run.results["compression"]
    if as_json:
        return _print_event("compression", run, kept)
    said = {*found.notes, found.plan.proof}  # in both
    layers = [line for line in str(found.plan).splitlines() if line not in said]
    say("\n".join([*layers, str(found)]))
    print(_test_scores(kept))
    say(f"small model: {run.directory / 'small.safetensors'}")


def _test_scores(found: Mapping[str, Any]) -> str:
    before, after = (number(found[f"test_score_{when}"]) for when in ("before", "after"))
    return f"{found['score']} on test data {before} -> {after}"


def comparison(
    found: Comparison, scores: Sequence[str] | None, out: Path | None, as_json: bool
) -> None:
    """Print a comparison, and where it was written."""
    if as_json:
        print(json.dumps(plain({"event": "comparison", **found.to_json()}), allow_nan=False))
        return
    from vardrop.app.report.comparison import FILE, PICTURE

    say(found.table(scores))
    if out is not None:
        say(f"written: {out / FILE} and {out / PICTURE}")
