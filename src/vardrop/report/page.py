"""The report: runs, their tables and pictures, in one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from vardrop.errors import VardropError
from vardrop.files import check_apart, write_atomically
from vardrop.report.gallery import sections
from vardrop.report.run import StoredRun, read_run
from vardrop.report.tables import Table, beside, flatten, score_table, show, table

Runs = Mapping[str, StoredRun]


def report(run_directories: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write one self-contained HTML file about one run, or about several side by side.

    Args:
        run_directories: what `vardrop fit --out` wrote; only read here.
        out: the file to write; without it `report.html` in the first run directory.

    Returns:
        the path of the file.

    >>> import json, pathlib, tempfile
    >>> from vardrop.report import report
    >>> run = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (run / "config.json").write_text(json.dumps({"command": "vardrop fit digits"}))
    >>> report([run]).name
    'report.html'
    """
    if not run_directories:
        raise VardropError(
            "Expected `run_directories` to name at least one run, but got none. "
            "Pass the directory that `vardrop fit --out` wrote."
        )
    runs = _named([read_run(Path(path)) for path in run_directories])
    target = Path(run_directories[0]) / "report.html" if out is None else Path(out)
    if target.is_dir():
        raise VardropError(
            f"Expected `out` to be a file, but got the directory {target}. "
            f"Pass {target / 'report.html'}."
        )
    read = (file for run in runs.values() for file in run.path.iterdir())
    check_apart(target, (file for file in read if file.suffix != ".html"))
    page = _page(runs)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise VardropError(
            f"Expected to make the directory {target.parent}, but got: {failure.strerror}."
        ) from failure
    write_atomically(target, page.encode())
    return target


def _named(runs: Sequence[StoredRun]) -> dict[str, StoredRun]:
    """Runs by the name of their directory, or by its path where names are not distinct."""
    names = [run.path.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    return dict(zip(names, runs, strict=True))


def _page(runs: Runs) -> str:
    environment = jinja2.Environment(
        autoescape=True,  # everything that comes from a file
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = files("vardrop.report").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        title=", ".join(runs),
        facts={name: _facts(run) for name, run in runs.items()},
        tables=_tables(runs),
        sections=sections(runs),
        loading=[_loading(run) for run in runs.values()],
    )


def _facts(run: StoredRun) -> dict[str, str]:
    """What was run, by name."""
    pairs = {
        key.replace("_", " "): show(value)
        for key, value in run.config.items()
        if key != "version" and value is not None and value is not False and value != []
    }
    if run.history:
        seconds = sum(float(row.get("seconds") or 0) for row in run.history)
        pairs["trained"] = f"{len(run.history)} epochs, {seconds:,.1f} seconds"
    return pairs


def _tables(runs: Runs) -> list[Table]:
    several = len(runs) > 1
    found = [score_table("On test data", _results(runs, "metrics"))]
    outside: list[dict[str, Any]] = []
    for name, run in runs.items():
        for dataset, values in (run.results.get("ood") or {}).items():
            row = flatten(values) if isinstance(values, Mapping) else {"score": values}
            outside.append({**({"run": name} if several else {}), "data": dataset, **row})
    if outside:
        found.append(table("Out of distribution", outside))
    found.append(score_table("Compression", _results(runs, "compression")))
    for name, run in runs.items():
        layers = (run.results.get("compression") or {}).get("layers")
        if isinstance(layers, list) and layers and all(isinstance(row, dict) for row in layers):
            title = f"Layers of {name}" if several else "Layers"
            found.append(table(title, [beside(row) for row in layers]))
    return found


def _results(runs: Runs, part: str) -> dict[str, dict[str, Any]]:
    """A part of the results by run; a list of layers has a table of its own."""
    found = {name: run.results.get(part) or {} for name, run in runs.items()}
    return {n: {k: v for k, v in r.items() if k != "layers"} for n, r in found.items()}


def _loading(run: StoredRun) -> str:
    """The code that loads a run."""
    own = ", net" if run.config.get("own_net") else ""
    return "\n".join(
        (
            "import vardrop as vd",
            f"run = vd.load_run({str(run.path)!r}{own})",
            "prediction = run.predict(x)",
        )
    )
