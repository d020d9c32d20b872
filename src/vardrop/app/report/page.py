"""The report: runs, their scores and pictures in one self-contained HTML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from vardrop._core.errors import VardropError
from vardrop._core.files import check_not_in_use, write_atomically
from vardrop.app import store
from vardrop.app.report import summary
from vardrop.app.report.comparison import Comparison, compare_stored
from vardrop.app.report.gallery import PICTURES, make_card
from vardrop.app.score_texts import MODEL, SCORES, number, score_columns, title
from vardrop.app.store import StoredRun, make_directory, name_runs, read_run
from vardrop.metrics.intervals import Estimate

Runs = Mapping[str, StoredRun]
_NAMED = 4  # runs that the title still names
_HIDDEN = ("version", "rows")  # of the configuration
_SCORES = "Scores with 95% intervals"
_GAP = "\N{EN DASH}"


class Cell(NamedTuple):
    """A cell of a table, with a note below its text and a shade from 0 to 1."""

    text: str
    note: str = ""
    shade: float = 0.0


class Table(NamedTuple):
    """A table. The first column holds the names of the rows."""

    columns: list[str]
    rows: list[list[Cell]]
    text: str = ""


def report(run_directories: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write one self-contained HTML file about one or several runs.

    Args:
        run_directories: directories that `vardrop fit --out` wrote.
        out: the file to write, `report.html` in the first run directory by default.

    Returns:
        The path of the file.

    >>> import pathlib, tempfile
    >>> from vardrop._core.files import with_checksum, write_json
    >>> from vardrop.app.report import report
    >>> run = pathlib.Path(tempfile.mkdtemp())
    >>> write_json(run / "config.json", with_checksum({"command": "vardrop fit digits"}))
    >>> report([run]).name
    'report.html'
    """
    if not run_directories:
        raise VardropError("Expected `run_directories` to name at least one run, but got none.")
    runs = name_runs([read_run(Path(path)) for path in run_directories])
    target = Path(run_directories[0]) / "report.html" if out is None else Path(out)
    inputs = (file for run in runs.values() for file in run.path.iterdir())
    check_not_in_use(target, (file for file in inputs if file.suffix != ".html"))
    compared, several = compare_stored(runs), len(runs) > 1
    pictures = [(p.title, p.caption, cards) for p in PICTURES if (cards := [*p.cards(runs)])]
    if several and compared.select():
        pictures.insert(0, ("", "", [make_card(_SCORES, _SCORES, compared.plot())]))
    main, others = _score_tables(runs, compared)
    page = render(
        title=", ".join(runs) if len(runs) <= _NAMED else f"{len(runs)} runs",
        runs=runs,
        verdicts={name: summary.verdict(name, run, compared) for name, run in runs.items()},
        describe=summary.describe,
        notes=[*summary.notes(runs), *compared.notes],
        scores=main,
        others=others,
        first=pictures[0][2].pop(0) if pictures else None,
        pictures=pictures,
        confusions={
            f"Confusion of {name}" if several else "Confusion": _confusion_table(run)
            for name, run in runs.items()
            if run.results.get("confusion")
        },
        facts=_fact_table(runs),
    )
    make_directory(target.parent)
    write_atomically(target, page.encode())
    return target


def render(**parts: Any) -> str:
    """A page from its parts: `title`, `notes`, tables and pictures. Their text is escaped.

    Args:
        parts: the variables of the template; those that are left out are empty.
    """
    options: dict[str, Any] = {"autoescape": True, "undefined": jinja2.ChainableUndefined}
    environment = jinja2.Environment(**options, trim_blocks=True, lstrip_blocks=True)
    text = files("vardrop.app.report").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(**parts)


def _score_tables(runs: Runs, compared: Comparison) -> tuple[Table, Table]:
    """The main scores of the runs and their baselines with sizes, and the other scores."""
    labels = {name: name if len(runs) > 1 else MODEL for name in runs}
    columns: dict[str, dict[str, Cell]] = {label: {} for label in labels.values()}
    for name, run in runs.items():
        by_label, column = score_columns(run.results), columns[labels[name]]
        for key, score in by_label.pop(MODEL, {}).items():
            low, high = compared.scores[name].get(key, Estimate(math.nan))[2:]
            interval = "" if low is None else f"[{number(low)}, {number(high)}]"
            note = f"{interval}\n{compared.difference_text(name, key)}".strip()
            column[key] = Cell(number(score), note)
        for images, areas in (run.results.get("ood") or {}).items():
            column |= {f"{title(k)}, {images}": Cell(number(v)) for k, v in areas.items()}
        column |= {k.replace("_", " "): Cell(f"{v:,}") for k, v in compared.sizes[name].items()}
        for label, scores in by_label.items():
            cells = {k: Cell(number(v)) for k, v in scores.items()}
            same = columns.get(label, cells) == cells  # baselines are often shared
            columns[label if same else f"{label}, {name}"] = cells
    keys = dict.fromkeys(key for cells in columns.values() for key in cells)
    names = {k: Cell(s.title, f"{s.text}; {s.better} is better") for k, s in SCORES.items()}
    rows = {
        k: [names.get(k, Cell(k)), *(c.get(k, Cell(_GAP)) for c in columns.values())] for k in keys
    }
    shown = {*compared.select(), "nll_held_out"} if compared.select() else {*keys}
    main = [row for k, row in rows.items() if k in shown or k not in SCORES]
    others = [row for k, row in rows.items() if row not in main]
    text = "In brackets: 95% intervals over the test examples."
    if compared.differences:
        text += f" Below them: the difference from {compared.reference} with its interval."
    return Table(["", *columns], main, text), Table(["", *columns], others, text)


def _confusion_table(run: StoredRun) -> Table:
    classes = [str(name) for name in run.config["classes"]]
    rows = [
        [Cell(name), *(Cell(f"{n:,}", shade=n / max(1, sum(line))) for n in line)]
        for name, line in zip(classes, run.results["confusion"], strict=True)
    ]
    text = "Test examples by true class (down) and most probable class (across)."
    return Table(["", *classes], rows, text)


def _fact_table(runs: Runs) -> Table:
    """The configuration and training time, or the settings that differ between several runs."""
    facts: dict[str, dict[str, str]] = {}
    for name, run in runs.items():
        config = {k: v for k, v in run.config.items() if k not in _HIDDEN and store.is_set(v)}
        config["method"] = store.method_name(run.config.get("method"))
        entries = store.flatten(config) if len(runs) > 1 else config
        facts[name] = {key.replace("_", " "): store.show(entry) for key, entry in entries.items()}
        if run.history:
            facts[name]["trained"] = f"{len(run.history)} epochs, {run.seconds:,.1f} seconds"
    keys = dict.fromkeys(key for pairs in facts.values() for key in pairs)
    rows = [
        [Cell(key), *(Cell(pairs.get(key, _GAP)) for pairs in facts.values())]
        for key in keys
        if len(runs) == 1 or len({pairs.get(key) for pairs in facts.values()}) > 1
    ]
    return Table(["", *runs] if len(runs) > 1 else [], rows)
