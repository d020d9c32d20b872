"""Descriptions of experiments: TOML files that state what is run, and what the paper found."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vardrop.errors import VardropError


@dataclass(frozen=True)
class Experiment:
    """One line of the reproduction table, as its TOML file states it."""

    name: str
    row: int  # in the table of results; 0 for what is beside it
    title: str
    paper: str
    source: str  # where the paper's figures stand
    function: str
    seeds: tuple[int, ...]
    minutes: float  # expected, all seeds, one thread
    arguments: dict[str, Any]
    expected: dict[str, float]  # the paper's figures, by the names of ours
    headline: tuple[str, ...]  # figures of ours that the table shows beside those
    quick: dict[str, Any]  # arguments of the minutes-long version
    bounds: dict[str, tuple[float, float]]  # that the quick version must keep
    plot: dict[str, Any]  # how to draw the curve
    notes: str


_REQUIRED = ("title", "paper", "source", "function", "seeds", "minutes", "bounds")


def load(path: Path) -> Experiment:
    """Read one description."""
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise VardropError(f"Expected {path} to be TOML, but got: {error}.") from error
    if missing := [key for key in _REQUIRED if key not in data]:
        raise VardropError(f"Expected {path} to have {', '.join(missing)}, but got {sorted(data)}.")
    if "expected" not in data and "headline" not in data:
        raise VardropError(
            f"Expected {path} to have `expected`, the paper's figures, or `headline`, the names of "
            f"figures to show without them, but got {sorted(data)}."
        )
    return Experiment(
        name=f"{path.parent.name}/{path.stem}",
        row=data.get("row", 0),
        title=data["title"],
        paper=data["paper"],
        source=data["source"],
        function=data["function"],
        seeds=tuple(data["seeds"]),
        minutes=float(data["minutes"]),
        arguments=data.get("arguments", {}),
        expected=data.get("expected", {}),
        headline=tuple(data.get("headline", ())),
        quick=data.get("quick", {}),
        bounds={k: (v[0], v[1]) for k, v in data["bounds"].items()},
        plot=data.get("plot", {}),
        notes=data.get("notes", ""),
    )


def experiments(directory: Path) -> dict[str, Experiment]:
    """All descriptions below a directory, by name, in the order of the table."""
    found = [load(path) for path in sorted(directory.glob("*/*.toml"))]
    if not found:
        raise VardropError(
            f"Expected descriptions `*/*.toml` in {directory}, but got none. "
            "Run it where the project lies, or say --experiments."
        )
    return {e.name: e for e in sorted(found, key=lambda e: e.row or len(found))}


def named(known: dict[str, Experiment], name: str) -> Experiment:
    """The experiment of a name; an error names the nearest."""
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=3, cutoff=0.4) or list(known)
    raise VardropError(
        f"Expected the name of an experiment such as {', '.join(near)}, but got {name!r}. "
        "`vardrop reproduce --list` shows all."
    )
