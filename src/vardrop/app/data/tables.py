"""CSV and Parquet files: read a table, decide what each column is, learn the preprocessing."""

from __future__ import annotations

import csv
import math
import shlex
import zlib
from collections.abc import Collection, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vardrop._core.checks import suggest
from vardrop._core.errors import VardropError, import_optional
from vardrop.app.data.preprocessing import (
    CategoryColumn,
    Column,
    DateColumn,
    NumberColumn,
    Preprocessing,
    Task,
    is_number,
    label,
    row_number,
    to_dates,
    to_days,
    to_numbers,
)
from vardrop.app.data.splits import Roles

if TYPE_CHECKING:
    import pandas

_TEXT, _PARQUET = (".csv", ".tsv", ".txt"), (".parquet", ".pq")
SUFFIXES = (*(f"{text}{packed}" for packed in ("", ".gz", ".bz2") for text in _TEXT), *_PARQUET)
_DELIMITERS = ",;\t|"
_MISSING = ("?", "-")  # besides pandas' own list
_FEW_CATEGORIES = 50  # up to which each has a column; more have an embedding
_MOST_CLASSES = 50
_CODES = 20  # numbers from 0 or 1 on without a gap, up to which they are names of classes
_NAMES = 0.9  # fraction of different texts from which on a column names the rows
_MOSTLY = 0.5  # fraction of numbers or dates from which on the other cells are mistakes
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
    if not path.is_file():
        raise VardropError(f"Expected the file {path}, but it is not there.")
    parquet = path.suffix.lower() in _PARQUET
    try:
        table = pandas.read_parquet(path) if parquet else _read_csv(path, roles or Roles(), texts)
    except pandas.errors.EmptyDataError:
        raise VardropError(f"Expected {path} to hold a table, but it is empty.") from None
    except (OSError, ValueError, EOFError, NotImplementedError, zlib.error) as broken:
        reason = " ".join(str(broken).split())[:200]
        raise VardropError(f"Expected {path} to be a table, but got: {reason}.") from broken
    table = check_frame(table, str(path))
    if all(map(is_number, table.columns)):
        problem = f"the first line of {path} has numbers: {', '.join(table.columns[:5])}"
        raise VardropError(f"Expected names of columns, but {problem}. Put a line above them.")
    return table


def check_frame(table: pandas.DataFrame, source: str) -> pandas.DataFrame:
    """A table with texts as names and rows numbered from 0; an error if it cannot be used."""
    names = [str(name).strip() for name in table.columns]
    if len(table) == 0:
        raise VardropError(f"Expected {source} to have rows, but it has only names of columns.")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise VardropError(f"Expected columns of {source} with different names, but got {twice}.")
    return table.set_axis(names, axis=1).reset_index(drop=True)


def _read_csv(path: Path, roles: Roles, texts: Collection[str]) -> pandas.DataFrame:
    read = import_optional("pandas").read_csv
    numbers = {"decimal": roles.decimal, "thousands": roles.thousands, "na_values": _MISSING}
    for encoding, errors in (("utf-16", "strict"), ("utf-8-sig", "strict"), ("cp1252", "replace")):
        options: dict[str, Any] = {"encoding": encoding, "encoding_errors": errors}
        try:
            options |= {"sep": roles.sep or _sniff(path, options), "skipinitialspace": True}
            header = read(path, nrows=0, **options).columns
            types = {name: str for name in header if name.strip() in texts}
            return read(path, dtype=types, low_memory=False, **numbers, **options)
        except UnicodeError:  # not of this encoding; without its mark a file is not UTF-16
            continue
    raise AssertionError("cp1252 replaces what it cannot decode")


def _sniff(path: Path, options: dict[str, Any]) -> str:
    """The delimiter of a file, from its first lines; a comma if they do not show any."""
    lines_as_cells = {
        "sep": "\x1f",
        "header": None,
        "quoting": csv.QUOTE_NONE,
        "keep_default_na": False,
    }
    lines = import_optional("pandas").read_csv(
        path, nrows=20, dtype=str, **lines_as_cells, **options
    )[0]
    try:
        return csv.Sniffer().sniff("\n".join(lines), _DELIMITERS).delimiter
    except csv.Error:
        return ","


def check_columns(table: pandas.DataFrame, roles: Roles, source: str) -> str:
    """The name of the target; an error if a column with a role is absent, or the target useless."""
    names = ", ".join(map(repr, table.columns))
    if roles.target is None:
        raise VardropError(f"Expected a target for {source}, but got none. Name one of {names}.")
    if absent := [column for column in roles.apart if column not in table.columns]:
        problem = f"Expected {source} to have the column '{absent[0]}', but it has {names}."
        raise VardropError(problem + suggest(absent[0], table.columns))
    target = table[roles.target]
    column, missing = f"the target column '{roles.target}' of {source}", target.isna()
    if bool(missing.any()):
        row = row_number(target, int(missing.to_numpy().argmax()))
        reason = f"row {row} has none ({int(missing.sum())} in all). Take out such rows."
        raise VardropError(f"Expected a value in every row of {column}, but {reason}")
    if target.nunique() < 2:
        raise VardropError(f"Expected {column} to vary, but it is constant.")
    return roles.target


def infer_task(values: pandas.Series, source: str) -> tuple[Task, str]:
    """The task that a target asks for, and a note if it could be meant otherwise.

    Classification for texts, truth values, two numbers, and whole numbers from 0 or 1 on without a
    gap, up to 20; regression otherwise.
    """
    if import_optional("pandas").api.types.is_bool_dtype(values) or _kind(values, None) != "number":
        return "classification", ""
    distinct = sorted(to_numbers(values, source).unique())
    if len(distinct) == 2:
        return "classification", ""
    integers = all(value == round(value) for value in distinct)
    codes = integers and distinct[0] in (0, 1) and distinct[-1] - distinct[0] == len(distinct) - 1
    if codes and len(distinct) <= _CODES:
        span = f"{distinct[0]:g} to {distinct[-1]:g}"
        return "classification", f"numbers {span} taken for classes; --task regression for amounts"
    if integers and len(distinct) <= _CODES:
        return "regression", f"{len(distinct)} whole numbers; --task classification for classes"
    return "regression", ""


def fit_preprocessing(
    table: pandas.DataFrame, rows: list[int], roles: Roles, task: Task, source: str, note: str = ""
) -> Preprocessing:
    """Learn the preprocessing from the training rows of a table; all rows name the classes."""
    target, names = str(roles.target), [n for n in table.columns if n not in roles.apart]
    if not names:
        raise VardropError(f"Expected {source} to have columns besides the target, but got none.")
    columns, dropped = _learn_columns(table[names], rows, roles.date_format, source)
    if task == "regression":
        _, mean, std = _scale(to_numbers(table[target], source).iloc[rows], source)
        return Preprocessing(target, task, columns, (), mean, std or 1.0, dropped, note)
    labels = {label(value) for value in table[target]}
    numbers = sorted(filter(is_number, labels), key=float)
    classes = (*numbers, *sorted(labels - set(numbers)))
    if len(classes) > _MOST_CLASSES:
        problem = f"Expected at most {_MOST_CLASSES} classes in column '{target}' of {source}"
        raise VardropError(f"{problem}, but got {len(classes)}. For numbers, ask for a regression.")
    return Preprocessing(target, task, columns, classes, dropped=dropped, note=note)


def _learn_columns(
    table: pandas.DataFrame, rows: list[int], date_format: str | None, source: str
) -> tuple[tuple[Column, ...], tuple[tuple[str, str], ...]]:
    """Each column, and those that are left out with the reason; one error for all that is wrong."""
    columns: list[Column] = []
    dropped: dict[str, str] = {}
    problems: dict[str, str] = {}
    for name, values in table.items():
        cells = values if values.dtype.kind in "Oc" else ()
        if strange := [v for v in cells if not isinstance(v, Hashable) or isinstance(v, complex)]:
            text = f"numbers, texts or dates in column '{name}' of {source}, but got {strange[0]!r}"
            problems[str(name)] = f"Expected {text}."
            continue
        kind = _kind(values, date_format)
        if reason := _drop_reason(values.iloc[rows], kind):
            dropped[str(name)] = reason
            continue
        try:
            columns.append(_learn_column(values, rows, kind, date_format, source))
        except VardropError as problem:
            problems[str(name)] = str(problem)
    if problems:
        typed = " ".join(f"--drop {shlex.quote(name)}" for name in problems)
        remedy = f"To leave columns out, use {typed} (in Python drop={list(problems)})."
        raise VardropError(f"{' '.join(problems.values())} {remedy}")
    if not columns:
        reasons = ", ".join(f"'{name}' {why}" for name, why in dropped.items())
        raise VardropError(f"Expected {source} to have columns to learn from, but got: {reasons}.")
    return tuple(columns), tuple(dropped.items())


def _kind(values: pandas.Series, date_format: str | None) -> Literal["number", "date", "category"]:
    """What a column is; a text column that is mostly numbers or dates is taken for one of them.

    Its other cells are an error later: nothing is guessed.
    """
    pandas = import_optional("pandas")
    if pandas.api.types.is_numeric_dtype(values):
        return "number"
    if pandas.api.types.is_datetime64_any_dtype(values):
        return "date"
    texts = values.dropna().map(str).astype("str").str.strip()
    numbers = pandas.to_numeric(texts, errors="coerce").notna() | texts.str.fullmatch(_NUMBER)
    if float(numbers.mean()) >= _MOSTLY:
        return "number"
    dates = to_dates(texts, date_format).notna() | texts.str.fullmatch(_DATE)
    return "date" if float(dates.mean()) >= _MOSTLY else "category"


def _drop_reason(values: pandas.Series, kind: str) -> str:
    """Why a column says nothing in the training rows; empty if it may."""
    distinct = values.nunique()
    if distinct == 0:
        return "is empty"
    if distinct == 1 and not bool(values.isna().any()):
        return "is constant"
    if kind == "category" and distinct > max(_FEW_CATEGORIES, _NAMES * len(values)):
        return "names the rows: almost every value is another one"
    return ""


def _learn_column(
    values: pandas.Series, rows: list[int], kind: str, date_format: str | None, source: str
) -> Column:
    """Read the cells of all rows; learn from the training rows."""
    name, missing = str(values.name), bool(values.iloc[rows].isna().any())
    if kind == "date":
        days = to_days(values, date_format, source)[rows]
        mean, hours = float(days.nanmean()), bool((days.nan_to_num() % 1 != 0).any())
        std = float((days - mean).square().nanmean().sqrt()) or 1.0
        return DateColumn(name, mean, std, hours, missing, date_format)
    if kind == "number":
        median, mean, std = _scale(to_numbers(values, source).iloc[rows], source)
        return NumberColumn(name, median, mean, std or 1.0, missing)
    categories = tuple(sorted({str(v) for v in values.iloc[rows].dropna()}))
    return CategoryColumn(name, categories, embedded=len(categories) > _FEW_CATEGORIES)


def _scale(values: pandas.Series, source: str) -> tuple[float, float, float]:
    """Median, mean and standard deviation, with the median for missing values, if finite."""
    with import_optional("numpy").errstate(over="ignore", invalid="ignore"):
        filled = values.fillna(values.median())
        median, mean, std = float(values.median()), float(filled.mean()), float(filled.std(ddof=0))
    if not all(map(math.isfinite, (median, mean, std))):
        column = f"column '{values.name}' of {source}"
        raise VardropError(f"Expected {column} to have a finite mean and scale. Scale it down.")
    return median, mean, std


def describe(preprocessing: Preprocessing, roles: Roles | None = None) -> str:
    """One line per column: what was inferred, what was left out, and how the file was read."""
    target = f"target   {preprocessing.target}: {preprocessing.task}"
    if preprocessing.classes:
        target += f" into {', '.join(preprocessing.classes)}"
    if preprocessing.note:
        target += f" ({preprocessing.note})"
    kinds = {NumberColumn: "number  ", CategoryColumn: "category", DateColumn: "date    "}
    columns = [f"{kinds[type(c)]} {c.name}: {c}" for c in preprocessing.columns]
    dropped = [f"left out {name}: {why}" for name, why in preprocessing.dropped]
    reading = [] if roles is None else [f"read by  {roles.reading}"]
    return "\n".join([*reading, target, *columns, *dropped])
