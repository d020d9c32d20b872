"""The command that sets runs, or methods, beside each other."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vardrop._core.errors import VardropError
from vardrop.app.cli import options as o, printing
from vardrop.app.cli.commands import app, observer
from vardrop.app.runs import Settings, compare_methods, compare_runs, method_named
from vardrop.app.runs.config import free_directory
from vardrop.app.runs.models import check_net_name
from vardrop.app.score_texts import check_scores

if TYPE_CHECKING:
    from vardrop.app.report import Comparison


@app.command(
    epilog=o.examples(
        "vardrop compare runs/a runs/b runs/c",
        "vardrop compare iris --methods none,l0,sparse_vd --seeds 5 --out runs/iris-methods",
    )
)
@o.with_settings("seed", "compare")
def compare(
    context: typer.Context,
    things: o.THINGS = None,
    methods: o.METHODS_ = None,
    seeds: o.SEEDS = 5,
    scores: o.SCORES = None,
    out: o.COMPARISON_OUT = None,
    net: o.NET = None,
    validation: o.VALIDATION = None,
    test: o.TEST = None,
    data_dir: o.DATA_DIR = None,
    where: o.WHERE = None,
    exclude: o.EXCLUDE = None,
    json: o.JSON = False,
    config: o.CONFIG = None,
    **more: Any,
) -> None:
    """Compare runs on the same data; or fit methods with several seeds and compare those."""
    parts = {"net": net, "validation": validation, "test": test, "directory": data_dir}
    given = {**parts, "where": where, "exclude": exclude, **more}
    given = {name: value for name, value in given.items() if value is not None}
    if methods is None:
        _check_runs(things or [], given)
        found = compare_runs(things or [])
        with o.usage():
            found.select(o.listed(scores))
        if out is not None:
            found.write(out, o.listed(scores))
    else:
        with o.usage():
            check_scores(o.listed(scores) or ())
        found, out = _compared_methods(context, things or [], methods, seeds, out, json, given)
        found.write(out, o.listed(scores))
    printing.comparison(found, o.listed(scores), out, json)


def _check_runs(things: list[str], given: Mapping[str, Any]) -> None:
    if given:
        option = next(iter(given)).replace("_", "-")
        raise typer.BadParameter(
            f"Expected --methods with --{option}, because runs are compared as they are, but got "
            "none. Name the methods."
        )
    if len(things) < 2:
        raise typer.BadParameter(
            "Expected two or more runs, or data and --methods. Try `vardrop compare iris --methods "
            "none,l0`."
        )


def _compared_methods(
    context: typer.Context,
    things: list[str],
    methods: str,
    seeds: int,
    out: Path | None,
    json: bool,
    given: Mapping[str, Any],
) -> tuple[Comparison, Path]:
    if len(things) != 1:
        raise typer.BadParameter(
            f"Expected one data set with --methods, but got {', '.join(things) or 'none'}."
        )
    names = [name for name in o.listed(methods) or () if name != "auto"]
    with o.usage():
        settings = {f.name: given[f.name] for f in fields(Settings) if f.name in given}
        Settings.from_json(settings).torch_device()
        for name in names:
            method_named(name)
        if "net" in given:
            check_net_name(given["net"])
    path = out or free_directory(f"{Path(things[0]).stem}-comparison")
    watch = observer(context, json, None)
    try:
        wanted = o.listed(methods) or []
        found = compare_methods(things[0], wanted, seeds, out=path, observer=watch, **given)
    except KeyboardInterrupt:
        typed = f"--out {shlex.quote(str(path))}"
        raise VardropError(f"stopped. The same command with {typed} goes on.") from None
    return found, path
