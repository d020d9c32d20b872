"""CSV and Parquet files: read a table, decide what each column is, learn the preprocessing."""

from __future__ import annotations

import csv
import math
import shlex
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vardrop._core.checks import nearest
from vardrop._core.errors import VardropError, needed
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

_PARQUET = (".parquet", ".pq")
SUFFIXES = (*(f"{t}{c}" for c in ("", ".gz", ".bz2", ".xz") for t in (".csv", ".tsv", ".txt")),
            *_PARQUET)  # fmt: skip
_DELIMITERS = ",;\t|"
_MISSING = ("?", "-")  # besides pandas' own list
_FEW_CATEGORIES, _MOST_CATEGORIES = 50, 100_000  # one column each; an embedding for all
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
    those of `pandas.read_csv`, `?` and `-`.

    Args:
        path: the file.
        roles: with `sep`, `decimal` and `thousands` of a CSV file; see `Roles`.
        texts: columns of a CSV file to read as texts, even if all their cells are numbers.
    """
    path = Path(path)
    if not is_table(path):
        raise VardropError(
            f"Expected a file that ends in {', '.join(SUFFIXES)}, but got {str(path)!r}."
        )
    if not path.is_file():
        raise VardropError(f"Expected the file {path}, but it is not there.")
    pandas = needed("pandas")
    try:
        if path.suffix.lower() in _PARQUET:
            table = pandas.read_parquet(path)
        else:
            table = _read_csv(path, roles or Roles(), texts)
    except pandas.errors.EmptyDataError:
        raise VardropError(f"Expected {path} to hold a table, but it is empty.") from None
    except (OSError, ValueError, EOFError, NotImplementedError, zlib.error) as broken:
        if isinstance(broken, VardropError):
            raise
        reason = " ".join(str(broken).split())[:200]
        raise VardropError(f"Expected {path} to be a table, but got: {reason}.") from broken
    if len(table) == 0:
        raise VardropError(f"Expected {path} to have rows, but it has only a header.")
    names = _column_names(table, path)
    return table.set_axis(names, axis=1).reset_index(drop=True)


def _read_csv(path: Path, roles: Roles, texts: Collection[str]) -> pandas.DataFrame:
    read = needed("pandas").read_csv
    for encoding, errors in (("utf-16", "strict"), ("utf-8-sig", "strict"), ("cp1252", "replace")):
        options: dict[str, Any] = {"encoding": encoding, "encoding_errors": errors}
        try:
            options |= {"sep": roles.sep or _sniff(path, options), "skipinitialspace": True}
            names = _column_names(read(path, nrows=0, **options), path)
            return read(
                path,
                header=0,
                names=names,
                decimal=roles.decimal,
                thousands=roles.thousands,
                na_values=_MISSING,
                dtype=dict.fromkeys(set(texts) & set(names), str),
                low_memory=False,
                **options,
            )
        except UnicodeError:  # not of this encoding; without its mark a file is not UTF-16
            continue
    raise AssertionError("cp1252 replaces what it cannot decode")


def _sniff(path: Path, options: dict[str, Any]) -> str:
    """The delimiter of a file, from its first lines; a comma if they do not show any."""
    whole = {"sep": "\x1f", "header": None, "quoting": csv.QUOTE_NONE, "keep_default_na": False}
    lines = needed("pandas").read_csv(path, nrows=20, dtype=str, **whole, **options)[0]
    try:
        return csv.Sniffer().sniff("\n".join(lines), _DELIMITERS).delimiter
    except csv.Error:
        return ","


def _column_names(table: pandas.DataFrame, path: Path) -> list[str]:
    """The names of the columns without blanks around them; an error if they are not usable."""
    names = [str(name).strip() for name in table.columns]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise VardropError(
            f"Expected columns of {path} with different names, but got "
            f"{', '.join(map(repr, twice))} more than once. Rename them."
        )
    if all(map(is_number, names)):
        raise VardropError(
            f"Expected the first line of {path} to name the columns, but got numbers: "
            f"{', '.join(names[:5])}. Put a line with names above them."
        )
    return names


def check_target(table: pandas.DataFrame, target: str | None, source: str) -> str:
    """The name of the target column, if the table has it and it can be learned."""
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
    values = table[target]
    if bool((missing := values.isna()).any()):
        raise VardropError(
            f"Expected a value in every row of the target column '{target}' of {source}, but row "
            f"{row_number(values, int(missing.to_numpy().argmax()))} has none ("
            f"{int(missing.sum())} in all). Take out such rows."
        )
    if values.nunique() < 2:
        raise VardropError(
            f"Expected the target column '{target}' of {source} to vary, but it is constant."
        )
    return target


def infer_task(values: pandas.Series, source: str) -> tuple[Task, str]:
    """The task that a target asks for, and a note if it could be meant otherwise.

    Classification for texts, truth values, two numbers, and whole numbers from 0 or 1 on without a
    gap, up to 20; regression otherwise.
    """
    if needed("pandas").api.types.is_bool_dtype(values) or _kind(values, None) != "number":
        return "classification", ""
    distinct = sorted(to_numbers(values, source).unique())
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


def learn_preprocessing(
    table: pandas.DataFrame, rows: list[int], roles: Roles, task: Task, source: str, note: str = ""
) -> Preprocessing:
    """Learn the preprocessing from the training rows of a table; all rows name the classes."""
    target, train = str(roles.target), table.iloc[rows]
    names = [name for name in table.columns if name not in roles.apart]
    if not names:
        raise VardropError(f"Expected {source} to have columns besides the target, but got none.")
    columns, dropped = _learn_columns(train[names], table, roles.date_format, source)
    if task == "regression":
        _, mean, std = _scale(to_numbers(train[target], source), source)
        return Preprocessing(target, task, columns, (), mean, std or 1.0, dropped, note)
    classes = sorted({label(v) for v in table[target]}, key=_class_order)
    if len(classes) > _MOST_CLASSES:
        raise VardropError(
            f"Expected at most {_MOST_CLASSES} classes in column '{target}' of {source}, but got "
            f"{len(classes)}. For numbers, ask for a regression."
        )
    return Preprocessing(target, task, columns, tuple(classes), dropped=dropped, note=note)


def _learn_columns(
    train: pandas.DataFrame, table: pandas.DataFrame, date_format: str | None, source: str
) -> tuple[tuple[Column, ...], tuple[tuple[str, str], ...]]:
    """Each column, and those that are left out with the reason; one error for all that is wrong."""
    columns: list[Column] = []
    dropped: list[tuple[str, str]] = []
    problems: dict[str, str] = {}
    for name, values in train.items():
        kind = _kind(values, date_format)
        if reason := _drop_reason(values, kind):
            dropped.append((str(name), reason))
            continue
        try:
            columns.append(_learn_column(values, kind, date_format, source))
            columns[-1].apply(table[name], source)  # the other rows may have cells that it is not
        except VardropError as problem:
            problems[str(name)] = str(problem)
    if problems:
        typed = " ".join(f"--drop {shlex.quote(name)}" for name in problems)
        raise VardropError(
            f"{' '.join(problems.values())} To leave columns out, use {typed} (in Python "
            f"drop={list(problems)})."
        )
    if not columns:
        reasons = ", ".join(f"'{name}' {why}" for name, why in dropped)
        raise VardropError(f"Expected {source} to have columns to learn from, but got: {reasons}.")
    return tuple(columns), tuple(dropped)


def _kind(values: pandas.Series, date_format: str | None) -> Literal["number", "date", "category"]:
    """What a column is; a text column that is mostly numbers or dates is taken for one of them.

    Its other cells are an error later: nothing is guessed.
    """
    pandas = needed("pandas")
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


def _learn_column(values: pandas.Series, kind: str, date_format: str | None, source: str) -> Column:
    name = str(values.name)
    if kind == "date":
        days = to_days(values, date_format, source)
        there = days[~days.isnan()]
        hours = bool((there != there.floor()).any())
        std = float(there.std(correction=0)) or 1.0
        return DateColumn(
            name, float(there.mean()), std, hours, len(there) < len(days), date_format
        )
    if kind == "number":
        numbers = to_numbers(values, source)
        median, mean, std = _scale(numbers, source)
        missing = bool(numbers.isna().any())
        if std == 0 and not missing:
            raise VardropError(
                f"Expected column '{name}' of {source} to vary by more than rounding, but got a "
                "standard deviation of 0."
            )
        return NumberColumn(name, median, mean, std or 1.0, missing)
    categories = tuple(sorted({str(v) for v in values.dropna()}))
    if len(categories) > _MOST_CATEGORIES:
        raise VardropError(
            f"Expected at most {_MOST_CATEGORIES} categories in column '{name}' of {source}, but "
            f"got {len(categories)}, such as {categories[0]!r}."
        )
    return CategoryColumn(name, categories, embedded=len(categories) > _FEW_CATEGORIES)


def _scale(values: pandas.Series, source: str) -> tuple[float, float, float]:
    """Median, mean and standard deviation, with the median for missing values, if finite."""
    with needed("numpy").errstate(over="ignore", invalid="ignore"):
        median = float(values.median())
        filled = values.fillna(median)
        mean, std = float(filled.mean()), float(filled.std(ddof=0))
    if not all(map(math.isfinite, (median, mean, std))):
        raise VardropError(
            f"Expected column '{values.name}' of {source} to have a finite median, mean and "
            f"standard deviation, but got {median:g}, {mean:g} and {std:g}. Scale it down."
        )
    return median, mean, std


def _class_order(name: str) -> tuple[bool, float, str]:
    """Numbers first, by size, then texts."""
    return (False, float(name), name) if is_number(name) else (True, 0.0, name)


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
