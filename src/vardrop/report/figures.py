"""Pictures as HTML: one run's in a grid, several runs' side by side with a row for every kind."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from matplotlib.axes import Axes

from vardrop.report.gallery import Kind, Parts
from vardrop.report.pictures.canvas import png
from vardrop.report.run import Run

_NOTHING = '<p class="missing">Nothing to show for this run.</p>'


def grid(cards: Sequence[str], columns: int) -> str:
    """Cards in so many columns, fewer on a small screen; as many as fit where it is one."""
    if columns == 1:
        return '<div class="grid">\n' + "\n".join(cards) + "\n</div>\n"
    opening = f'<div class="grid several" style="--columns: {min(columns, 4)}">\n'
    return opening + "\n".join(cards) + "\n</div>\n"


def section(runs: Mapping[str, Run], kinds: Sequence[Kind]) -> str:
    """A section of pictures, with a sentence about those that no run has the data for."""
    drawn = {
        kind: {name: kind.of(run) if kind.suits(run) else {} for name, run in runs.items()}
        for kind in kinds
    }
    html = _alone(drawn) if len(runs) == 1 else _side_by_side(drawn)
    missing = [
        kind.title
        for kind, found in drawn.items()
        if not any(found.values()) and any(map(kind.suits, runs.values()))
    ]
    if missing:
        html += f'<p class="missing">Left out for want of data: {"; ".join(missing)}.</p>\n'
    return html


def _alone(drawn: Mapping[Kind, Mapping[str, Parts]]) -> str:
    cards = [
        _card(kind, name, part, ax, (kind.title, part), kind.caption)
        for kind, found in drawn.items()
        for name, parts in found.items()
        for part, ax in parts.items()
    ]
    return grid(cards, 1) if cards else ""


def _side_by_side(drawn: Mapping[Kind, Mapping[str, Parts]]) -> str:
    html = ""
    for kind, found in drawn.items():
        every = dict.fromkeys(part for parts in found.values() for part in parts)
        cards = [
            _card(kind, name, part, parts.get(part), (name, part))
            for part in every
            for name, parts in found.items()
        ]
        if cards:
            heading = f"<h3>{escape(kind.title)}</h3>\n<p>{escape(kind.caption)}</p>\n"
            html += heading + grid(cards, len(found))
    return html


def _card(
    kind: Kind, name: str, part: str, ax: Axes | None, label: tuple[str, str], caption: str = ""
) -> str:
    """A picture with its caption, or a word about its absence."""
    picture = _NOTHING if ax is None else _image(kind, name, part, ax)
    text = escape(": ".join(filter(None, label)))
    below = f"<figcaption><b>{text}</b> {escape(caption)}</figcaption>"
    return f'<figure class="card">{picture}\n{below}</figure>'


def _image(kind: Kind, name: str, part: str, ax: Axes) -> str:
    about = f"{kind.title}, {part}," if part else kind.title
    alt = escape(f"{about} of run {name}. {ax.get_title(loc='left')}".strip())
    style = "photo" if kind.photo else "chart"
    data = base64.b64encode(png(ax)).decode()
    return f'<img class="{style}" alt="{alt}" src="data:image/png;base64,{data}">'
