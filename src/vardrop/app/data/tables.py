"""CSV and Parquet files: read, look at each column, learn the preprocessing."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vardrop._core.checks import nearest
from vardrop._core.errors import VardropError, needed
from vardrop.app.data.parsing import as_numbers, day_first, decimal_mark, is_date, texts
from vardrop.app.data.preprocessing import (
    Category,
    Column,
    Date,
    ManyCategories,
    Number,
    Preprocessing,
    Task,
    days,
    label,
    numbers,
    row_number,
)

if TYPE_CHECKING:
    import pandas

SUFFIXES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet", ".pq")
_FEW_CATEGORIES, _MOST_CATEGORIES = 50, 100_000  # one column each; an embedding for all
_MOST_CLASSES = 50
_CODES = 20  # numbers from 0 or 1 on without a gap, up to which they are names of classes
_NAMES = 0.9  # fraction of different texts from which on a column names the rows
_NUMBERS = 0.9  # fraction of numbers from which on the other texts are mistakes
_SNIFFED = 1 << 16


def is_table(path: str | Path) -> bool:
    """Whether a file of this name can be read as a table."""
    return str(path).lower().endswith(SUFFIXES)


def read_table(path: str | Path) -> pandas.DataFrame:
    """Read a CSV or Parquet file, packed by gzip or not; an error names what is wrong with it.

    The encoding follows from the first bytes (UTF-8, UTF-16) or is Windows-1252, the delimiter from
    the first lines: a comma, a semicolon, a tab or a bar.
    """
    path = Path(path)
    check_file(path)
    pandas = needed("pandas")
    try:
        table = _text(path) if not path.name.lower().endswith((".parquet", ".pq")) else None
        table = pandas.read_parquet(path) if table is None else table
    except pandas.errors.EmptyDataError:
        raise VardropError(f"Expected {path} to hold a table, but it is empty.") from None
    except Exception as broken:
        reason = " ".join(str(broken).split())[:200]
        raise VardropError(f"Expected {path} to be a table, but got: {reason}.") from broken
    if len(table) == 0:
        raise VardropError(f"Expected {path} to have rows, but it has only a header.")
    check_header(table, path)
    return table.set_axis([str(name).strip() for name in table.columns], axis=1).reset_index(
        drop=True
    )


def check_file(path: Path) -> None:
    """Raise where there is no such file, or its name is not that of a table."""
    if not is_table(path):
        raise VardropError(
            f"Expected a file that ends in {', '.join(SUFFIXES)}, but got {str(path)!r}."
        )
    if not path.is_file():
        raise VardropError(f"Expected the file {path}, but it is not there.")


def _text(path: Path) -> pandas.DataFrame:
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if path.suffix.lower() == ".gz" else raw
    text = _decoded(raw)
    return needed("pandas").read_csv(
        io.StringIO(text), sep=delimiter(text, path), skipinitialspace=True, low_memory=False
    )


def _decoded(raw: bytes) -> str:
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return raw.decode("utf-16")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return raw.decode("cp1252", errors="replace")


def delimiter(text: str, path: Path) -> str:
    """The mark that divides the first lines into the same number of cells, more than one."""
    if ".tsv" in path.name.lower():
        return "\t"
    lines = [line for line in text[:_SNIFFED].splitlines()[:50] if line.strip()]
    if len(text) > _SNIFFED and len(lines) > 1:
        lines = lines[:-1]  # it may be cut
    found = {}
    for mark in (",", ";", "\t", "|"):
        cells = [len(row) for row in csv.reader(lines, delimiter=mark, skipinitialspace=True)]
        if cells and cells[0] > 1:
            found[mark] = (sum(n == cells[0] for n in cells) / len(cells), cells[0])
    return max(found, key=lambda mark: found[mark]) if found else ","


def check_header(table: pandas.DataFrame, path: Path, whole: bool = True) -> None:
    """Raise where columns have one name, or numbers for names; `whole` where all are there."""
    names = [str(name).strip() for name in table.columns]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise VardropError(
            f"Expected columns of {path} with names of their own, but got "
            f"{', '.join(map(repr, twice))} more than once. Rename them."
        )
    if whole and all(is_number(name) for name in names):
        raise VardropError(
            f"Expected the first line of {path} to name the columns, but got numbers: "
            f"{', '.join(names[:5])}. Put a line with names above them."
        )


def is_number(text: str) -> bool:
    """Whether a text can be read as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


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
            f"{nearest(target, table.columns)}"
        )
    check_no_gaps(table[target], target, source)
    if table[target].nunique() < 2:
        raise VardropError(
            f"Expected the target column '{target}' of {source} to vary, but it is constant."
        )
    return target


def check_no_gaps(values: pandas.Series, target: str, source: str) -> None:
    """Raise where a row has no target."""
    missing = texts(values).isna()
    if bool(missing.any()):
        raise VardropError(
            f"Expected a value in every row of the target column '{target}' of {source}, but row "
            f"{row_number(values, int(missing.to_numpy().argmax()))} has none ("
            f"{int(missing.sum())} in all). Take out such rows."
        )


def infer_task(values: pandas.Series, source: str) -> tuple[Task, str]:
    """The task that a target asks for, and what to say of it where it could be meant otherwise.

    Classification for texts, truth values, two numbers, and whole numbers from 0 or 1 on without a
    gap, up to 20; regression otherwise.
    """
    pandas = needed("pandas")
    if pandas.api.types.is_bool_dtype(values):
        return "classification", ""
    found = as_numbers(values, decimal_mark(values))
    share = float(found.notna().mean())
    if share < _NUMBERS:
        return "classification", ""
    if share < 1:
        numbers(values, source, decimal_mark(values))  # says which row is none
    distinct = sorted(found.unique())
    if len(distinct) == 2:
        return "classification", ""
    whole = all(value == round(value) for value in distinct)
    codes = whole and distinct[0] in (0, 1) and distinct[-1] - distinct[0] == len(distinct) - 1
    if codes and len(distinct) <= _CODES:
        span = f"{distinct[0]:g} to {distinct[-1]:g}"
        return "classification", f"numbers {span} taken for classes; --task regression for amounts"
    if whole and len(distinct) <= _CODES:
        return "regression", f"{len(distinct)} whole numbers; --task classification for classes"
    return "regression", ""


def learn(
    table: pandas.DataFrame,
    rows: list[int],
    target: str,
    task: Task,
    apart: Sequence[str],
    source: str,
    note: str = "",
) -> Preprocessing:
    """Learn the preprocessing from the training rows of a table; all rows name the classes."""
    part = table.iloc[rows]
    names = [n for n in table.columns if n != target and n not in apart]
    if not names:
        raise VardropError(f"Expected {source} to have columns besides the target, but got none.")
    columns, dropped = _columns(part, table, names, source)
    if task == "regression":
        decimal = decimal_mark(part[target])
        _, mean, std = _scale(numbers(part[target], source, decimal), source)
        scale = (mean, std or 1.0, decimal)
        return Preprocessing(target, task, columns, (), *scale, dropped, note)
    classes = sorted({label(v) for v in table[target]}, key=_order)
    if len(classes) > _MOST_CLASSES:
        raise VardropError(
            f"Expected at most {_MOST_CLASSES} classes in column '{target}' of {source}, but got "
            f"{len(classes)}. For numbers, ask for a regression."
        )
    return Preprocessing(target, task, columns, tuple(classes), dropped=dropped, note=note)


def _columns(
    part: pandas.DataFrame, table: pandas.DataFrame, names: list[str], source: str
) -> tuple[tuple[Column, ...], tuple[tuple[str, str], ...]]:
    """What each column is, and those that are left out; what is wrong with any is told at once."""
    found: list[Column] = []
    dropped: list[tuple[str, str]] = []
    problems: dict[str, str] = {}
    for name in names:
        try:
            if why := _useless(part[name]):
                dropped.append((name, why))
            else:
                found.append(_column(part[name], source))
                found[-1].apply(table[name], source)  # what the other rows have that it cannot be
        except VardropError as problem:
            problems[name] = str(problem)
    if problems:
        several = f"Expected other columns of {source}: " if len(problems) > 1 else ""
        raise VardropError(f"{several}{' '.join(problems.values())} {_leave_out(list(problems))}")
    if not found:
        told = ", ".join(f"'{name}' {why}" for name, why in dropped)
        raise VardropError(f"Expected {source} to have columns to learn from, but got: {told}.")
    return tuple(found), tuple(dropped)


def _useless(values: pandas.Series) -> str:
    """Why a column says nothing in the training part; empty where it may."""
    numeric = values.dtype.kind in "biuf"
    own = values if numeric else texts(values)
    distinct = own.nunique()
    if distinct == 0:
        return "is empty"
    if distinct == 1 and not bool(own.isna().any()):
        return "is constant"
    if numeric or distinct <= max(_FEW_CATEGORIES, _NAMES * len(own)) or is_date(values):
        return ""
    share = float(as_numbers(values, decimal_mark(values)).notna().mean())
    return "" if share >= _NUMBERS else "names the rows: almost every value is another one"


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
    name, pandas = str(values.name), needed("pandas")
    if not pandas.api.types.is_numeric_dtype(values) and is_date(values):
        return _date(values, source)
    decimal = decimal_mark(values) if values.dtype.kind not in "biuf" else "."
    found = as_numbers(values, decimal)
    there = texts(values).notna() if values.dtype.kind not in "biuf" else values.notna()
    if float(found[there].notna().mean()) >= _NUMBERS:
        found = numbers(values, source, decimal)  # says which row is none
        median, mean, std = _scale(found, source)
        if std == 0 and not bool(found.isna().any()):
            raise VardropError(
                f"Expected column '{name}' of {source} to vary by more than rounding, but got a "
                "deviation of 0."
            )
        return Number(name, median, mean, std or 1.0, bool(found.isna().any()), decimal)
    categories = tuple(sorted({str(v) for v in values.dropna()}))
    if len(categories) <= _FEW_CATEGORIES:
        return Category(name, categories)
    if len(categories) > _MOST_CATEGORIES:
        raise VardropError(
            f"Expected at most {_MOST_CATEGORIES} categories in column '{name}' of {source}, but "
            f"got {len(categories)}, such as {categories[0]!r}."
        )
    return ManyCategories(name, categories)


def _date(values: pandas.Series, source: str) -> Date:
    first = day_first(values) if values.dtype.kind != "M" else False
    found = days(values, first, source)
    there = found[~found.isnan()]
    hours = bool((there != there.floor()).any())
    std = float(there.std(correction=0)) or 1.0
    return Date(str(values.name), float(there.mean()), std, hours, first, len(there) < len(found))


def _order(name: str) -> tuple[int, float, str]:
    """Numbers first, by size, then texts."""
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name


def describe(found: Preprocessing) -> str:
    """One line per column: what was inferred, and what was left out."""
    lines = [f"target   {found.target}: {found.task}"]
    if found.classes:
        lines[0] += f" into {', '.join(found.classes)}"
    if found.note:
        lines[0] += f" ({found.note})"
    kinds = {Number: "number  ", Date: "date    "}
    lines += [f"{kinds.get(type(c), 'category')} {c.name}: {c}" for c in found.columns]
    return "\n".join([*lines, *(f"left out {name}: {why}" for name, why in found.dropped)])
