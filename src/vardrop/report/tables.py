"""What a run wrote, as text and tables for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


def show(value: Any) -> str:
    """A JSON value in one line of text, values of the library as `Type(field=value)`.

    >>> show({"type": "Normal", "version": 1, "scale": 0.1})
    'Normal(scale=0.1)'
    >>> show({"torch": "2.13.0", "seeds": [0, 1]}), show(0.123456), show(None)
    ('torch 2.13.0, seeds 0, 1', '0.1235', 'none')
    """
    if isinstance(value, Mapping) and "type" in value:
        named = {k: v for k, v in value.items() if k not in ("type", "version")}
        fields = {k: v for k, v in named.items() if v is not None and v is not False}
        return f"{value['type']}({', '.join(f'{k}={show(v)}' for k, v in fields.items())})"
    if isinstance(value, Mapping):
        known = {k: v for k, v in value.items() if v is not None and v is not False and v != []}
        return ", ".join(f"{k} {show(v)}" for k, v in known.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(show, value))
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "none" if value is None else str(value)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with the names joined.

    >>> flatten({"entropy": {"auroc": 0.9}, "cases": 10})
    {'entropy auroc': 0.9, 'cases': 10}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        nested = isinstance(value, Mapping) and "type" not in value
        flat |= flatten(value, f"{name} ") if nested else {name: value}
    return flat


def beside(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose quantities stand before and after, with the two next to each other.

    >>> beside({"name": "fc", "before": {"weights": 9, "bytes": 36}, "after": {"weights": 1}})
    {'name': 'fc', 'weights before': 9, 'weights after': 1, 'bytes before': 36, 'bytes after': None}
    """
    before, after = row.get("before"), row.get("after")
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return flatten(row)
    flat = flatten({k: v for k, v in row.items() if k not in ("before", "after")})
    for key, value in before.items():
        flat |= {f"{key} before": value, f"{key} after": after.get(key)}
    return flat


class Cell(NamedTuple):
    """A cell of a table; a number carries its full precision for sorting."""

    text: str
    number: float | None = None


class Table(NamedTuple):
    """A table; each column has its name and whether numbers stand in it."""

    title: str
    columns: list[tuple[str, bool]]
    rows: list[list[Cell]]


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of mappings, with a column for every name that occurs.

    >>> table("Sizes", [{"run": "a", "weights": 1000}, {"run": "b"}]).columns
    [('run', False), ('weights', True)]
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [
        (name.replace("_", " "), any(_is_number(row.get(name)) for row in rows)) for name in names
    ]
    return Table(title, columns, [[_cell(row.get(name)) for name in names] for row in rows])


def score_table(title: str, by_run: Mapping[str, Mapping[str, Any]]) -> Table:
    """Scores of one run as a list; of several runs as one row each, to be sorted."""
    flat = {name: flatten(values) for name, values in by_run.items()}
    if not any(flat.values()):
        return table(title, [])
    if len(flat) == 1:
        (values,) = flat.values()
        return table(title, [{"score": n.replace("_", " "), "value": v} for n, v in values.items()])
    return table(title, [{"run": name, **values} for name, values in flat.items()])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> Cell:
    if value is None:  # sorts as NaN
        return Cell("\N{EN DASH}", math.nan)
    if not _is_number(value):
        return Cell(show(value))
    return Cell(f"{value:,}" if isinstance(value, int) else show(value), value)
