"""CSV and Parquet files: read, look at each column, learn the preprocessing."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vardrop.data.preprocessing import (
    Category,
    Column,
    Number,
    Preprocessing,
    Task,
    label,
    numbers,
)
from vardrop.errors import VardropError, needed

if TYPE_CHECKING:
    import pandas

SUFFIXES = (".csv", ".parquet", ".pq")
_MOST_CATEGORIES = 50
_MOST_CLASSES = 20  # distinct whole numbers up to which a numeric target is a class


def read_table(path: str | Path) -> pandas.DataFrame:
    """Read a CSV or Parquet file; an error names what is wrong with it."""
    pandas = needed("pandas")
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise VardropError(
            f"Expected a file that ends in {', '.join(SUFFIXES)}, but got {str(path)!r}."
        )
    if not path.is_file():
        raise VardropError(f"Expected the file {path}, but it is not there.")
    try:
        if path.suffix.lower() == ".csv":
            table = pandas.read_csv(path, skipinitialspace=True)
        else:
            table = pandas.read_parquet(path)
    except pandas.errors.EmptyDataError:
        raise VardropError(f"Expected {path} to hold a table, but it is empty.") from None
    except Exception as broken:
        reason = " ".join(str(broken).split())[:200]
        raise VardropError(f"Expected {path} to be a table, but got: {reason}.") from broken
    if len(table) == 0:
        raise VardropError(f"Expected {path} to have rows, but it has only a header.")
    return table.reset_index(drop=True)


def check_target(table: pandas.DataFrame, target: str | None, source: str) -> str:
    """The name of the target column, if the table has it."""
    known = ", ".join(map(repr, map(str, table.columns)))
    if target is None:
        raise VardropError(
            f"Expected a target for {source}, but got none. Name one of its columns: {known}."
        )
    if target not in table.columns:
        raise VardropError(
            f"Expected {source} to have the target column '{target}', but it has {known}."
        )
    missing = table[target].isna()
    if bool(missing.any()):
        raise VardropError(
            f"Expected a value in every row of the target column '{target}' of {source}, but row "
            f"{int(missing.to_numpy().argmax()) + 1} has none. Take out such rows."
        )
    if table[target].nunique() < 2:
        raise VardropError(
            f"Expected the target column '{target}' of {source} to vary, but it is constant."
        )
    return target


def infer_task(values: pandas.Series, source: str) -> Task:
    """Classification for texts, truth values and few whole numbers; regression otherwise."""
    import pandas

    found = pandas.to_numeric(values, errors="coerce")
    if pandas.api.types.is_bool_dtype(values):
        return "classification"
    if bool(found.notna().all()):
        whole = bool((found == found.round()).all())
        return "classification" if whole and found.nunique() <= _MOST_CLASSES else "regression"
    if found.notna().mean() >= 0.5:
        numbers(values, source)  # mostly numbers: says which row is none
    return "classification"


def learn(
    table: pandas.DataFrame,
    rows: list[int],
    target: str,
    task: Task,
    drop: Sequence[str],
    source: str,
) -> Preprocessing:
    """Learn the preprocessing from the training rows of a table; all rows name the classes."""
    part = table.iloc[rows]
    names = [n for n in table.columns if n != target and n not in drop]
    if not names:
        raise VardropError(f"Expected {source} to have columns besides the target, but got none.")
    _check_varying(part, names, source)
    columns = tuple(_column(part[name], source) for name in names)
    if task == "regression":
        values = numbers(part[target], source)
        _, mean, std = _scale(values, source)
        return Preprocessing(target, task, columns, (), mean, std or 1.0)
    classes = sorted({label(v) for v in table[target]}, key=_order)
    if len(classes) > max(_MOST_CATEGORIES, _MOST_CLASSES):
        raise VardropError(
            f"Expected at most {_MOST_CATEGORIES} classes in column '{target}' of {source}, but "
            f"got {len(classes)}. For numbers, ask for a regression."
        )
    return Preprocessing(target, task, columns, tuple(classes))


def _check_varying(part: pandas.DataFrame, names: list[str], source: str) -> None:
    if not (constant := [name for name in names if part[name].nunique() < 2]):
        return
    which = "column" if len(constant) == 1 else "columns"
    shown = ", ".join(f"'{name}'" for name in constant)
    raise VardropError(
        f"Expected {which} {shown} of {source} to vary, but got values that are constant in the "
        f"training part. {_leave_out(constant)}"
    )


def _leave_out(names: list[str]) -> str:
    """How to do without columns, as it is typed and as it is written."""
    typed = " ".join(f"--drop {shlex.quote(str(name))}" for name in names)
    return f"Leave out what is no use by {typed} (in Python drop={list(map(str, names))})."


def _scale(values: pandas.Series, source: str) -> tuple[float, float, float]:
    """Median, mean and deviation, missing values filled by the median, if they are finite."""
    with needed("numpy").errstate(over="ignore", invalid="ignore"):
        median = float(values.median())
        filled = values.fillna(median)
        mean, std = float(filled.mean()), float(filled.std(ddof=0))
    if not all(map(math.isfinite, (median, mean, std))):
        raise VardropError(
            f"Expected column '{values.name}' of {source} to have a finite median, mean and "
            f"deviation, but got {median:g}, {mean:g} and {std:g}. Scale it down."
        )
    return median, mean, std


def _column(values: pandas.Series, source: str) -> Column:
    import pandas

    if pandas.api.types.is_numeric_dtype(values):
        found = numbers(values, source)
        median, mean, std = _scale(found, source)
        if std == 0:
            raise VardropError(
                f"Expected column '{values.name}' of {source} to vary by more than rounding, but "
                f"got a deviation of 0. {_leave_out([str(values.name)])}"
            )
        return Number(str(values.name), median, mean, std, bool(found.isna().any()))
    categories = sorted({str(v) for v in values.dropna()})
    if len(categories) > _MOST_CATEGORIES:
        raise VardropError(
            f"Expected at most {_MOST_CATEGORIES} categories in column '{values.name}' of "
            f"{source}, but got {len(categories)}, such as {categories[0]!r}. Make it a number, or "
            f"do without it. {_leave_out([str(values.name)])}"
        )
    return Category(str(values.name), tuple(categories))


def _order(name: str) -> tuple[int, float, str]:
    """Numbers first, by size, then texts."""
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name


def describe(found: Preprocessing) -> str:
    """One line per column: what was inferred."""
    lines = [f"target   {found.target}: {found.task}"]
    if found.classes:
        lines[0] += f" into {', '.join(found.classes)}"
    for c in found.columns:
        kind = "number  " if isinstance(c, Number) else "category"
        detail = (
            f"median {c.median:.4g}{', with missing values' if c.missing else ''}"
            if isinstance(c, Number)
            else ", ".join(c.categories)
        )
        lines.append(f"{kind} {c.name}: {detail}")
    return "\n".join(lines)
