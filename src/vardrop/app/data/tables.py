"""CSV and Parquet files: read a table, infer the type of each column, learn the preprocessing."""

from __future__ import annotations

import csv
import functools
import math
import shlex
from collections import Counter
from collections.abc import Collection, Hashable
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Literal

from vardrop._core.checks import list_names, suggest
from vardrop._core.errors import VardropError, import_optional, report_errors
from vardrop._core.files import check_readable
from vardrop.app.data.preprocessing import (
    CategoryColumn,
    Column,
    DateColumn,
    NumberColumn,
    Preprocessing,
    Roles,
    Task,
    is_number,
    label,
    row_number,
    to_dates,
    to_days,
    to_numbers,
)

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

_TEXT, _PARQUET = (".csv", ".tsv", ".txt"), (".parquet", ".pq")
SUFFIXES = (*(f"{text}{packed}" for packed in ("", ".gz", ".bz2") for text in _TEXT), *_PARQUET)
_DELIMITERS = ",;\t|"
_MISSING = ("?", "-")  # in addition to pandas' list
_FEW_CATEGORIES = 50  # the most that have a column each; more have an embedding
_MOST_CLASSES = 50
_CODES = 20  # the most numbers from 0 or 1 on, without a gap, that are names of classes
_NAMES = 0.9  # a column with more different texts than this fraction names the rows
_MOSTLY = 0.5  # from this fraction of numbers or dates on, the other cells are mistakes
# Texts that another `decimal`, `thousands` or `date_format` would read, and money and per cent.
_NUMBER = r"[-+(]?\s*[$€£¥]?\s*\d{1,3}(?:[.,'\s]?\d{3})*(?:[.,]\d+)?\s*[%$€£¥)]*"
_DATE = r"(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](?:\d{2}|\d{4}))(?:\D.*)?"


def is_table(path: str | Path) -> bool:
    """Whether a file of this name can be read as a table."""
    return str(path).lower().endswith(SUFFIXES)


def read_table(
    path: str | Path, roles: Roles | None = None, texts: Collection[str] = ()
) -> pandas.DataFrame:
    """Read a CSV or Parquet file, compressed or not.

    A CSV file is UTF-8 or Windows-1252, or UTF-16 with its byte-order mark. Missing values are
    the defaults of `pandas.read_csv`, `?` and `-`.

    Args:
        path: the file.
        roles: with `sep`, `decimal` and `thousands` of a CSV file; see `Roles`.
        texts: columns of a CSV file to read as texts, even if all their cells are numbers.
    """
    path, pandas = Path(path), import_optional("pandas")
    if not is_table(path):
        endings = ", ".join(SUFFIXES)
        raise VardropError(f"Expected a file that ends in {endings}, but got {str(path)!r}.")
    check_readable(path)
    parquet = path.suffix.lower() in _PARQUET
    with report_errors(
        lambda e: f"Expected {path} to be a table, but got: {shorten(str(e), 200)}."
    ):
        try:
            table = (
                pandas.read_parquet(path) if parquet else _read_csv(path, roles or Roles(), texts)
            )
        except pandas.errors.EmptyDataError:
            raise VardropError(f"Expected {path} to hold a table, but it is empty.") from None
    if not parquet and all(map(is_number, table.columns)):
        problem = f"the first line of {path} has numbers: {', '.join(table.columns[:5])}"
        raise VardropError(f"Expected names of columns, but {problem}. Put a line above them.")
    return check_frame(table, str(path))


def _read_csv(path: Path, roles: Roles, texts: Collection[str]) -> pandas.DataFrame:
    read = functools.partial(import_optional("pandas").read_csv, path, skipinitialspace=True)
    numbers = {"decimal": roles.decimal, "thousands": roles.thousands, "na_values": _MISSING}
    whole_lines = {"sep": "\x1f", "header": None, "quoting": csv.QUOTE_NONE, "dtype": str}
    for encoding, errors in (("utf-16", "strict"), ("utf-8-sig", "strict"), ("cp1252", "replace")):
        options = {"encoding": encoding, "encoding_errors": errors}
        try:
            lines = read(nrows=20, keep_default_na=False, **whole_lines, **options)[0].tolist()
            sep = roles.sep or ","
            with suppress(csv.Error):  # raised if no delimiter is found
                sep = roles.sep or csv.Sniffer().sniff("\n".join(lines), _DELIMITERS).delimiter
            names = next(csv.reader(lines, delimiter=sep, skipinitialspace=True))
            types = {name: str for name in names if name.strip() in texts}
            table = read(sep=sep, dtype=types, low_memory=False, **numbers, **options)
        except UnicodeError:  # of another encoding; a file without a byte-order mark is not UTF-16
            continue
        # pandas renames a second 'y' to 'y.1', which would be a copy of the target.
        pairs = zip(names, table.columns, strict=True)
        return table.set_axis([name or unnamed for name, unnamed in pairs], axis=1)
    raise AssertionError("cp1252 replaces bytes that it cannot decode")


def check_frame(table: pandas.DataFrame, source: str) -> pandas.DataFrame:
    """A table with text as column names and rows numbered from 0, if it is not empty."""
    names = [str(name).strip() for name in table.columns]
    if len(table) == 0:
        raise VardropError(f"Expected {source} to have rows, but it has only names of columns.")
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        problem = f"but got {list_names(twice)} more than once"
        raise VardropError(f"Expected columns of {source} with different names, {problem}.")
    return table.set_axis(names, axis=1).reset_index(drop=True)


def check_columns(table: pandas.DataFrame, roles: Roles, source: str) -> str:
    """The name of the target. Raises an error if a column is missing or the target is constant."""
    names = list_names(list(table.columns))
    if roles.target is None:
        raise VardropError(f"Expected a target for {source}, but got none. Name one of {names}.")
    if absent := [column for column in roles.apart if column not in table.columns]:
        problem = f"Expected {source} to have the column '{absent[0]}', but it has {names}."
        raise VardropError(problem + suggest(absent[0], table.columns))
    target = table[roles.target]
    column, missing = f"the target column '{roles.target}' of {source}", target.isna()
    if bool(missing.any()):
        row = row_number(target, int(missing.to_numpy().argmax()))
        reason = f"row {row} has none ({int(missing.sum())} in all). Remove these rows."
        raise VardropError(f"Expected a value in every row of {column}, but {reason}")
    if target.nunique() < 2:
        raise VardropError(f"Expected {column} to vary, but it is constant.")
    return roles.target


def infer_task(target: pandas.Series, source: str) -> tuple[Task, str]:
    """The task that suits a target, and a note if the other one is possible.

    Texts, truth values, two numbers, and up to 20 whole numbers from 0 or 1 on without a gap are
    classes. Other numbers are a regression.
    """
    if import_optional("pandas").api.types.is_bool_dtype(target) or _kind(target, None) != "number":
        return "classification", ""
    distinct = to_numbers(target, source).unique().tolist()
    if len(distinct) == 2:
        return "classification", ""
    if len(distinct) > _CODES or not all(map(float.is_integer, distinct)):
        return "regression", ""
    first, last = distinct[0], distinct[-1]
    if first in (0, 1) and last - first == len(distinct) - 1:
        span = f"{first:g} to {last:g}"
        return "classification", f"numbers {span} taken for classes; --task regression for amounts"
    return "regression", f"{len(distinct)} whole numbers; --task classification for classes"


def fit_preprocessing(
    table: pandas.DataFrame, rows: list[int], roles: Roles, task: Task, source: str, note: str = ""
) -> Preprocessing:
    """Learn the preprocessing from the training rows of a table, the classes from all rows."""
    target, names = str(roles.target), [n for n in table.columns if n not in roles.apart]
    if not names:
        raise VardropError(f"Expected {source} to have columns besides the target, but got none.")
    columns, dropped = _learn_columns(table[names], rows, roles.date_format, source)
    where = f"column '{target}' of {source}"
    if task == "regression":
        _, mean, std = _scale(to_numbers(table[target], source)[rows], where)
        return Preprocessing(target, task, columns, (), mean, std or 1.0, dropped, note)
    labels = set(map(label, table[target]))
    numbers = sorted(filter(is_number, labels), key=float)
    classes = (*numbers, *sorted(labels - set(numbers)))
    if len(classes) > _MOST_CLASSES:
        problem = f"Expected at most {_MOST_CLASSES} classes in {where}, but got {len(classes)}."
        raise VardropError(f"{problem} For numbers set task='regression'.")
    return Preprocessing(target, task, columns, classes, dropped=dropped, note=note)


def _learn_columns(
    table: pandas.DataFrame, rows: list[int], date_format: str | None, source: str
) -> tuple[tuple[Column, ...], tuple[tuple[str, str], ...]]:
    """The columns, and the dropped ones with the reason. One error reports all problems."""
    learned: dict[str, Column | str] = {}
    problems: dict[str, str] = {}
    for name, cells in table.items():
        try:
            learned[str(name)] = _learn_column(cells, rows, date_format, source)
        except VardropError as problem:
            problems[str(name)] = str(problem)
    if problems:
        typed = " ".join(f"--drop {shlex.quote(name)}" for name in problems)
        remedy = f"To leave columns out, use {typed} (in Python drop={list(problems)})."
        raise VardropError(f"{' '.join(problems.values())} {remedy}")
    columns = tuple(column for column in learned.values() if not isinstance(column, str))
    dropped = tuple((name, why) for name, why in learned.items() if isinstance(why, str))
    if not columns:
        reasons = ", ".join(f"'{name}' {why}" for name, why in dropped)
        raise VardropError(f"Expected {source} to have columns to learn from, but got: {reasons}.")
    return columns, dropped


def _kind(cells: pandas.Series, date_format: str | None) -> Literal["number", "date", "category"]:
    """The type of a column. A text column of mostly numbers or dates counts as one of them.

    Its other cells raise an error later.
    """
    pandas = import_optional("pandas")
    if pandas.api.types.is_numeric_dtype(cells):
        return "number"
    if pandas.api.types.is_datetime64_any_dtype(cells):
        return "date"
    texts = cells.dropna().map(str).astype("str").str.strip()
    numbers = pandas.to_numeric(texts, errors="coerce").notna() | texts.str.fullmatch(_NUMBER)
    if float(numbers.mean()) >= _MOSTLY:
        return "number"
    dates = to_dates(texts, date_format).notna() | texts.str.fullmatch(_DATE)
    return "date" if float(dates.mean()) >= _MOSTLY else "category"


def _learn_column(
    cells: pandas.Series, rows: list[int], date_format: str | None, source: str
) -> Column | str:
    """Read the cells of all rows, and learn from the training rows.

    Returns:
        The column, or the reason why the training rows have no information.
    """
    name, where = str(cells.name), f"column '{cells.name}' of {source}"
    objects = cells if cells.dtype.kind in "Oc" else ()
    if strange := [v for v in objects if not isinstance(v, Hashable) or isinstance(v, complex)]:
        raise VardropError(f"Expected numbers, texts or dates in {where}, but got {strange[0]!r}.")
    kind, seen = _kind(cells, date_format), cells.iloc[rows]
    distinct, missing = seen.nunique(), bool(seen.isna().any())
    if distinct == 0:
        return "is empty"
    if distinct == 1 and not missing:
        return "is constant"
    if kind == "number":
        median, mean, std = _scale(to_numbers(cells, source)[rows], where)
        return NumberColumn(name, median, mean, std or 1.0, missing)
    if kind == "date":
        days = to_days(cells, date_format, source)[rows]
        mean, hours = float(days.nanmean()), bool((days.nan_to_num() % 1 != 0).any())
        std = float((days - mean).square().nanmean().sqrt()) or 1.0
        return DateColumn(name, mean, std, hours, missing, date_format)
    if distinct > max(_FEW_CATEGORIES, _NAMES * len(seen)):
        return "names the rows: almost every value is another one"
    categories = tuple(sorted({str(v) for v in seen.dropna()}))
    return CategoryColumn(name, categories, embedded=len(categories) > _FEW_CATEGORIES)


def _scale(numbers: Tensor, column: str) -> tuple[float, float, float]:
    """Median, mean and standard deviation, with the median instead of missing numbers."""
    cells = import_optional("pandas").Series(numbers.numpy())
    with import_optional("numpy").errstate(over="ignore", invalid="ignore"):
        filled = cells.fillna(cells.median())
        scale = float(cells.median()), float(filled.mean()), float(filled.std(ddof=0))
    if not all(map(math.isfinite, scale)):
        raise VardropError(f"Expected {column} to have a finite mean and scale. Scale it down.")
    return scale


def describe(preprocessing: Preprocessing, roles: Roles | None = None) -> str:
    """One line per column with its inferred type, the dropped columns, and the format of the file.

    Args:
        preprocessing: the learned preprocessing.
        roles: the format of the file, if it was read from one.
    """
    target = f"target   {preprocessing.target}: {preprocessing.task}"
    if preprocessing.classes:
        target += f" into {', '.join(preprocessing.classes)}"
    if preprocessing.note:
        target += f" ({preprocessing.note})"
    lines = [target, *(f"{c.kind:8} {c.name}: {c}" for c in preprocessing.columns)]
    lines += [f"left out {name}: {why}" for name, why in preprocessing.dropped]
    if roles is not None:
        sep = "inferred from the file" if roles.sep is None else repr(roles.sep)
        marks = f"decimal {roles.decimal!r}, thousands {roles.thousands!r}"
        dates = roles.date_format or "ISO 8601"
        lines.insert(0, f"read by  sep {sep}, {marks}, dates {dates}")
    return "\n".join(lines)
