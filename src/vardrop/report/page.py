"""The report: runs, their tables and pictures, in one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from vardrop.errors import VardropError
from vardrop.files import check_apart, write_atomically
from vardrop.report.figures import grid, section
from vardrop.report.gallery import KINDS
from vardrop.report.run import Run, read_run
from vardrop.report.tables import beside, facts, flatten, records, scores, show, words

Runs = Mapping[str, Run]


def report(run_directories: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write one self-contained HTML file about one run, or about several side by side.

    Args:
        run_directories: what `vardrop fit --out` wrote; only read here.
        out: the file to write; without it `report.html` in the first run directory.

    Returns:
        The path of the file.

    Example:
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


def _named(runs: Sequence[Run]) -> dict[str, Run]:
    """Runs by the name of their directory, or by its path where names are not distinct."""
    names = [run.path.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    return dict(zip(names, runs, strict=True))


def _page(runs: Runs) -> str:
    sections = {"What was run": _what_was_run(runs), "Scores": _scores(runs)}
    for name in dict.fromkeys(kind.section for kind in KINDS):
        sections[name] = section(runs, [kind for kind in KINDS if kind.section == name])
    sections["Load the model"] = _loading(runs)
    body, links = [], []
    for i, (name, html) in enumerate(sections.items()):
        links.append(f'<a href="#part{i}">{name}</a>')
        body.append(f'<section id="part{i}">\n<h2>{name}</h2>\n{html}</section>\n')
    template = files("vardrop.report").joinpath("page.html").read_text(encoding="utf-8")
    title = escape(", ".join(runs))
    return Template(template).substitute(title=title, links="\n".join(links), body="\n".join(body))


def _what_was_run(runs: Runs) -> str:
    cards = []
    for name, run in runs.items():
        pairs = {}
        for key, value in run.config.items():
            if key == "version" or value is None or value is False or value == []:
                continue
            text = words(show(value)) if key == "command" else escape(show(value))
            pairs[key.replace("_", " ")] = text
        if run.history:
            seconds = sum(float(row.get("seconds") or 0) for row in run.history)
            pairs["trained"] = f"{len(run.history)} epochs, {seconds:,.1f} seconds"
        cards.append(f'<article class="card"><h3>{escape(name)}</h3>\n{facts(pairs)}</article>')
    return grid(cards, len(runs))


def _scores(runs: Runs) -> str:
    several = len(runs) > 1
    blocks = [_score_table(runs, "metrics", "On test data")]
    outside: list[dict[str, Any]] = []
    for name, run in runs.items():
        for dataset, values in (run.results.get("ood") or {}).items():
            row = flatten(values) if isinstance(values, Mapping) else {"score": values}
            outside.append({**({"run": name} if several else {}), "data": dataset, **row})
    if outside:
        blocks.append("<h3>Out of domain</h3>\n" + records(outside))
    blocks.append(_score_table(runs, "compression", "Compression"))
    for name, run in runs.items():
        layers = (run.results.get("compression") or {}).get("layers")
        if isinstance(layers, list) and layers and all(isinstance(row, dict) for row in layers):
            title = f"Layers of {escape(name)}" if several else "Layers"
            blocks.append(f"<h3>{title}</h3>\n" + records([beside(row) for row in layers]))
    return '<div class="tables">\n' + "".join(f"<div>{b}</div>\n" for b in blocks) + "</div>\n"


def _score_table(runs: Runs, part: str, title: str) -> str:
    found = {name: run.results.get(part) or {} for name, run in runs.items()}
    # A list of layers has a table of its own.
    plain = {n: {k: v for k, v in s.items() if k != "layers"} for n, s in found.items()}
    if not any(plain.values()):
        return f'<p class="missing">{title}: the runs hold no such results.</p>\n'
    return f"<h3>{title}</h3>\n" + scores(plain)


def _loading(runs: Runs) -> str:
    cards = []
    for run in runs.values():
        own = ", net" if run.config.get("own_net") else ""
        lines = (
            "import vardrop as vd",
            f"run = vd.load_run({str(run.path)!r}{own})",
            "prediction = run.predict(x)",
        )
        cards.append(f"<pre><code>{escape(chr(10).join(lines))}</code></pre>")
    return "\n".join(cards)
