"""The pictures of runs laid out: one run's in a grid, several runs' side by side."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes

from vardrop.app.report.gallery import KINDS, Kind, Parts
from vardrop.app.report.pictures.canvas import png
from vardrop.app.store import StoredRun

Drawn = Mapping[Kind, Mapping[str, Parts]]


@dataclass(frozen=True)
class Card:
    """A picture with its label and caption; without an image where a run has none to show."""

    label: str
    caption: str
    style: str
    alt: str = ""
    image: str = ""


@dataclass(frozen=True)
class Grid:
    """Cards in so many columns, with a heading where there is one."""

    cards: list[Card]
    columns: int
    heading: str = ""
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A section of pictures, and the titles of those that no run has the data for."""

    title: str
    grids: list[Grid]
    missing: list[str]


def sections(runs: Mapping[str, StoredRun]) -> list[Section]:
    """All pictures of the runs: one run's in a grid, several runs' side by side, kind by kind."""
    return [_section(title, runs) for title in dict.fromkeys(kind.section for kind in KINDS)]


def _section(title: str, runs: Mapping[str, StoredRun]) -> Section:
    drawn = {
        kind: {name: kind.of(run) if kind.suits(run) else {} for name, run in runs.items()}
        for kind in KINDS
        if kind.section == title
    }
    grids = (_alone if len(runs) == 1 else _side_by_side)(drawn, runs)
    missing = [
        kind.title
        for kind, found in drawn.items()
        if not any(found.values()) and any(map(kind.suits, runs.values()))
    ]
    return Section(title, [grid for grid in grids if grid.cards], missing)


def _alone(drawn: Drawn, runs: Mapping[str, StoredRun]) -> list[Grid]:
    cards = [
        _card(kind, name, part, ax, kind.title, kind.says(runs[name]))
        for kind, found in drawn.items()
        for name, parts in found.items()
        for part, ax in parts.items()
    ]
    return [Grid(cards, 1)]


def _side_by_side(drawn: Drawn, runs: Mapping[str, StoredRun]) -> list[Grid]:
    grids = []
    for kind, found in drawn.items():
        every = dict.fromkeys(part for parts in found.values() for part in parts)
        alike = {kind.says(runs[name]) for name, parts in found.items() if parts}
        shared = alike.pop() if len(alike) == 1 else ""
        cards = [
            _card(kind, name, part, parts.get(part), name, "" if shared else kind.says(runs[name]))
            for part in every
            for name, parts in found.items()
        ]
        grids.append(Grid(cards, len(found), kind.title, shared))
    return grids


def _card(kind: Kind, name: str, part: str, ax: Axes | None, label: str, caption: str = "") -> Card:
    label = f"{label}: {part}" if part else label
    style = "photo" if kind.photo else "chart"
    if ax is None:
        return Card(label, caption, style)
    about = f"{kind.title}, {part}," if part else kind.title
    alt = f"{about} of run {name}. {ax.get_title(loc='left')}".strip()
    return Card(label, caption, style, alt, base64.b64encode(png(ax, clear=kind.photo)).decode())
