"""The report: runs, their tables and pictures, in one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from vardrop._core.errors import VardropError
from vardrop._core.files import check_apart, write_atomically
from vardrop.app.report.cards import sections
from vardrop.app.report.score_texts import BASELINES
from vardrop.app.report.summary import Figure, facts, figures, predicts, remarks
from vardrop.app.report.tables import Table, beside, compared, confusions, flatten, table
from vardrop.app.store import StoredRun, read_run

Runs = Mapping[str, StoredRun]
_NAMED = 4  # runs that the title still names
_GROUPS = ("data", "settings", "sizes", "versions")


def report(run_directories: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write one self-contained HTML file about one run, or about several side by side.

    Args:
        run_directories: what `vardrop fit --out` wrote; only read here.
        out: the file to write; without it `report.html` in the first run directory.

    Returns:
        the path of the file.

    >>> import pathlib, tempfile
    >>> from vardrop._core.files import sealed, write_json
    >>> from vardrop.app.report import report
    >>> run = pathlib.Path(tempfile.mkdtemp())
    >>> write_json(run / "config.json", sealed({"command": "vardrop fit digits"}))
    >>> report([run]).name
    'report.html'
    """
    if not run_directories:
        raise VardropError(
            "Expected `run_directories` to name at least one run, but got none. "
            "Pass the directory that `vardrop fit --out` wrote."
        )
    runs = named([read_run(Path(path)) for path in run_directories])
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


def named(runs: Sequence[StoredRun]) -> dict[str, StoredRun]:
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
    text = files("vardrop.app.report").joinpath("page.html").read_text(encoding="utf-8")
    same, other = _facts(runs)
    return environment.from_string(text).render(
        title=", ".join(runs) if len(runs) <= _NAMED else f"{len(runs)} runs",
        headlines=(headlines := {name: _headline(run) for name, run in runs.items()}),
        leads=_leads(headlines),
        short=_short(headlines),
        same=same,
        other=other,
        tables=_tables(runs),
        sections=sections(runs),
        loading=[_loading(run) for run in runs.values()],
    )


class _Headline(NamedTuple):
    sentence: str
    figures: list[Figure]
    remarks: list[str]


def _headline(run: StoredRun) -> _Headline:
    return _Headline(predicts(run), figures(run), remarks(run))


def _leads(headlines: Mapping[str, _Headline]) -> dict[str, list[str]]:
    """What the runs predict, each sentence once, with the names of those that it is about."""
    found: dict[str, list[str]] = {}
    for name, headline in headlines.items():
        found.setdefault(headline.sentence, []).append(name)
    return found


def _short(headlines: Mapping[str, _Headline]) -> Table:
    """The figures of several runs, a column each; those of one run need no table."""
    several = headlines if len(headlines) > 1 else {}
    by_run = {name: {f.question: f.value for f in h.figures} for name, h in several.items()}
    return compared("Side by side", by_run)


def _facts(runs: Runs) -> tuple[dict[str, str], Table]:
    """What all runs have in common, and a table of the rest with a column per run."""
    found = {name: facts(run, apart=len(runs) > 1) for name, run in runs.items()}
    first = next(iter(found.values()))
    same = {k: v for k, v in first.items() if all(f.get(k) == v for f in found.values())}
    rest = {name: {k: v for k, v in f.items() if k not in same} for name, f in found.items()}
    joined: dict[str, list[str]] = {}
    for key, text in same.items():  # settings that are apart, in one line again
        group, _, name = key.partition(" ")
        whole = group in _GROUPS and bool(name)
        joined.setdefault(group if whole else key, []).append(f"{name} {text}" if whole else text)
    return {k: ", ".join(texts) for k, texts in joined.items()}, compared("What differs", rest)


def _tables(runs: Runs) -> list[Table]:
    found = [compared("On test data", _scores(runs)), *_held_out(runs)]
    for name, run in runs.items():
        of = f" of {name}" if len(runs) > 1 else ""
        rows, counts = run.results.get("by_class"), run.results.get("confusion")
        classes = [str(c) for c in run.config.get("classes") or []]
        if rows and all(isinstance(row, dict) for row in rows):
            found.append(table(f"By class{of}", rows, "Each class against the rest."))
        if counts and len(classes) == len(counts):
            found.append(confusions(f"Confusions{of}", classes, counts))
    outside = {
        f"{name}, {dataset}" if len(runs) > 1 else dataset: flatten(values)
        for name, run in runs.items()
        for dataset, values in (run.results.get("ood") or {}).items()
        if isinstance(values, Mapping)
    }
    if outside:
        found.append(compared("Out of distribution", outside))
    return [*found, *_sizes(runs)]


def _scores(runs: Runs) -> dict[str, Mapping[str, Any]]:
    """Scores by run, then those of what needs no net, once where all runs share them."""
    found = {_column(runs, name): run.results.get("metrics") or {} for name, run in runs.items()}
    baselines = {name: dict(run.results.get("baseline") or {}) for name, run in runs.items()}
    alike = len({str(scores) for scores in baselines.values()}) == 1
    for name, scores in baselines.items():
        kind, own = BASELINES.get(str(scores.pop("name", ""))), found[_column(runs, name)]
        if kind is not None:
            found[kind if alike else f"{kind}, {name}"] = {k: scores.get(k) for k in own}
    return found


def _column(runs: Runs, name: str) -> str:
    return name if len(runs) > 1 else BASELINES["net"]


def _held_out(runs: Runs) -> list[Table]:
    """Scores on held-out rows of the net, of the plain net and of none."""
    columns: dict[str, Mapping[str, Any]] = {}
    for who, label in BASELINES.items():
        held = {name: (run.results.get("held_out") or {}).get(who) for name, run in runs.items()}
        scores = {name: found for name, found in held.items() if isinstance(found, Mapping)}
        if who == "net":
            columns |= {_column(runs, name): found for name, found in scores.items()}
        elif len({str(found) for found in held.values()}) == 1:
            columns |= dict.fromkeys([label][: len(scores)], next(iter(scores.values()), {}))
        else:
            columns |= {f"{label}, {name}": found for name, found in scores.items()}
    text = "Rows of the training data that were held out to choose and to compare."
    return [compared("On held-out rows", columns, text)] if columns else []


def _sizes(runs: Runs) -> list[Table]:
    """What compression did, as a whole and layer by layer."""
    whole = {name: run.results.get("compression") or {} for name, run in runs.items()}
    known = {
        _column(runs, name): flatten({k: v for k, v in found.items() if k != "layers"})
        for name, found in whole.items()
    }
    text = "" if any(known.values()) else "Not done yet: try `vardrop compress`."
    found = [compared("Compression", known, text)]
    for name, run in runs.items():
        layers = whole[name].get("layers") or run.results.get("layers") or []
        if layers and all(isinstance(row, dict) for row in layers):
            title = f"Layers of {name}" if len(runs) > 1 else "Layers"
            found.append(table(title, [_layer(run, beside(row)) for row in layers]))
    return found


def _layer(run: StoredRun, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table of layers; the kind stands with a name that is but a number."""
    name = str(row.get("name", ""))
    label = run.label(name)
    return {k: v for k, v in {**row, "name": label}.items() if k != "kind" or label == name}


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
