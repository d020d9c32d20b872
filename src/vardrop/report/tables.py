"""Numbers and names as HTML; everything that comes from a file is escaped here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


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


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    """A table cell; a number carries its full precision for sorting, a gap sorts as NaN."""
    if value is None:
        return '<td class="number" data-value="nan">&ndash;</td>'
    if not _number(value):
        return f"<td>{escape(show(value))}</td>"
    text = f"{value:,}" if isinstance(value, int) else show(value)
    return f'<td class="number" data-value="{value}">{escape(text)}</td>'


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table whose columns sort when their heading is pressed."""
    body = [list(row) for row in rows]
    heads = []
    for i, name in enumerate(head):
        side = ' class="number"' if any(_number(row[i]) for row in body) else ""
        label = escape(name.replace("_", " "))
        heads.append(f'<th scope="col"{side}><button type="button">{label}</button></th>')
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in body)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{"".join(heads)}</tr></thead>\n'
        f"<tbody>\n{lines}</tbody></table></div>\n"
    )


def records(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of mappings, with a column for every name that occurs."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return table(names, ([row.get(name) for name in names] for row in rows))


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


def words(text: str) -> str:
    """A command whose words stay whole where a line breaks, for options begin with a hyphen."""
    return "<code>" + " ".join(f"<span>{escape(word)}</span>" for word in text.split()) + "</code>"


def scores(by_run: Mapping[str, Mapping[str, Any]]) -> str:
    """Scores of one run as a list; of several runs as one row each, to be sorted."""
    flat = {name: flatten(values) for name, values in by_run.items()}
    if len(flat) == 1:
        (values,) = flat.values()
        pairs = ((name.replace("_", " "), value) for name, value in values.items())
        return table(("score", "value"), pairs)
    return records([{"run": name, **values} for name, values in flat.items()])


def facts(pairs: Mapping[str, str]) -> str:
    """A list of names and what they stand for; the second is HTML already."""
    items = "".join(f"<dt>{escape(name)}</dt><dd>{text}</dd>\n" for name, text in pairs.items())
    return f"<dl>\n{items}</dl>\n"
