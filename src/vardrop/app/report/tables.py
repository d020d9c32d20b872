"""What a run wrote, as text and tables for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vardrop.app.report.score_texts import MEANINGS, number, title as score_title

_SIZES = {
    "score": "what was watched while weights were removed",
    "threshold": "of log alpha, or of what the method judges units by",
    "sparsity": "fraction of the weights that went",
    "compression": "weights before over weights after",
    "macs_before": "multiplications per prediction, before",
    "macs_after": "and after; they set the latency",
    "bytes": "size of the file of the small net",
    "packed_bytes": "size of the coded file, to be sent or stored",
}
_CLASSES = 20  # a larger table of confusions would not be read


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
    """A cell of a table; a number carries its full precision for sorting.

    `note` stands below the text, and `shade` is how dark the cell is, from 0 to 1.
    """

    text: str
    number: float | None = None
    note: str = ""
    shade: float = 0.0


class Table(NamedTuple):
    """A table; each column has its name and whether numbers stand in it."""

    title: str
    columns: list[tuple[str, bool]]
    rows: list[list[Cell]]
    sorts: bool = True
    text: str = ""


def table(title: str, rows: Sequence[Mapping[str, Any]], text: str = "") -> Table:
    """A table of mappings, with a column for every name that occurs.

    >>> table("Sizes", [{"run": "a", "weights": 1000}, {"run": "b"}]).columns
    [('run', False), ('weights', True)]
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    numeric = {name for row in rows for name, value in row.items() if _is_number(value)}
    columns = [(score_title(name), name in numeric) for name in names]
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    return Table(title, columns, cells, text=text)


def compared(title: str, by_column: Mapping[str, Mapping[str, Any]], text: str = "") -> Table:
    """Columns of values under names that they share, a row per name, explained where it is known.

    >>> found = compared("On test data", {"a": {"rmse": 0.31}, "b": {"rmse": 0.35, "mae": 0.2}})
    >>> [name for name, _ in found.columns], [cell.text for cell in found.rows[1]]
    (['', 'a', 'b'], ['MAE', '–', '0.2000'])
    """
    names = list(dict.fromkeys(name for values in by_column.values() for name in values))
    rows = []
    for name in names:
        note = MEANINGS[name].sentence if name in MEANINGS else _SIZES.get(name, "")
        cells = [_score(values[name]) if name in values else _GAP for values in by_column.values()]
        rows.append([Cell(score_title(name), note=note), *cells])
    numeric = [any(row[i].number is not None for row in rows) for i in range(1, len(by_column) + 1)]
    return Table(title, [("", False), *zip(by_column, numeric, strict=True)], rows, False, text)


def confusions(title: str, classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Table:
    """True classes down, predicted ones across; of many classes only the commonest mistakes.

    >>> [cell.text for cell in confusions("", ["a", "b"], [[3, 1], [0, 2]]).rows[0]]
    ['a', '3', '1']
    """
    if len(classes) <= _CLASSES:
        rows = [
            [Cell(name), *(Cell(f"{n:,}", n, shade=n / max(1, sum(line))) for n in line)]
            for name, line in zip(classes, counts, strict=True)
        ]
        columns = [("true \\ predicted", False), *((name, True) for name in classes)]
        text = "Rows by their true class, down, and the most probable class, across."
        return Table(title, columns, rows, False, text)
    wrong: list[dict[str, Any]] = [
        {"true class": classes[i], "predicted": classes[j], "rows": n}
        for i, line in enumerate(counts)
        for j, n in enumerate(line)
        if i != j and n
    ]
    commonest = sorted(wrong, key=lambda row: -row["rows"])[:_CLASSES]
    return table(title, commonest, f"The commonest mistakes, at most {_CLASSES}.")


_GAP = Cell("\N{EN DASH}", math.nan)  # sorts as NaN


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _score(value: Any) -> Cell:
    if value is None:
        return Cell("undefined", math.nan)
    return _cell(value)


def _cell(value: Any) -> Cell:
    if value is None:
        return _GAP
    if not _is_number(value):
        return Cell(show(value))
    return Cell(f"{value:,}" if isinstance(value, int) else number(value), value)
