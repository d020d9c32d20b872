"""The roles of the columns of a table, and their preprocessing, which is stored as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from vardrop._core.checks import (
    check_choice,
    check_number,
    check_type,
    describe_value,
    list_names,
    suggest,
)
from vardrop._core.errors import VardropError, import_optional

if TYPE_CHECKING:
    import pandas
    from numpy.typing import NDArray

Task = Literal["classification", "regression"]
VERSION = 1
YEAR, WEEK, DAY = 365.2425, 7.0, 1.0  # periods of dates, in days
_TRUTH = {"True", "False"}  # pandas reads true, TRUE and True alike


@dataclass(frozen=True)
class Roles:
    """The roles of the columns of a table, and the format of its cells.

    Args:
        target: the column to predict.
        task: classification or regression, inferred from the target by default.
        drop: columns to leave out.
        id: a column with the names of the rows, copied to the predictions. It is not an input.
        weight: a column with the weight of each row. Weight 2 counts as two rows.
        split: a column with the part of each row: train, validation or test.
        group: rows with the same value in this column stay in one part.
        time: the latest rows by this column are the test part, the rows before them validation.
        stratify: each part has about the same fraction of every class.
        sep: the delimiter of a CSV file, inferred from its first lines by default.
        decimal: the decimal mark of a CSV file.
        thousands: the mark between thousands in a CSV file, none by default.
        date_format: the format of dates in texts, such as %d/%m/%Y. The default is ISO 8601.
    """

    target: str | None = None
    task: Task | None = None
    drop: tuple[str, ...] = ()
    id: str | None = None
    weight: str | None = None
    split: str | None = None
    group: str | None = None
    time: str | None = None
    stratify: bool = True
    sep: str | None = None
    decimal: str = "."
    thousands: str | None = None
    date_format: str | None = None

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(Roles) if f.name not in ("task", "drop", "stratify")):
            check_type(name, getattr(self, name), str | None, "a text, such as a column's name")
        for name in self.drop:
            check_type("drop", name, str, "a list of names of columns")
        check_type("stratify", self.stratify, bool, "True or False")
        if self.task is not None:
            check_choice("task", self.task, get_args(Task))
        if self.sep == "\\t":  # typed in a shell
            object.__setattr__(self, "sep", "\t")
        marks = [mark for mark in (self.sep, self.decimal, self.thousands) if mark is not None]
        if len({*marks}) < len(marks) or any(len(mark) != 1 for mark in marks):
            named = "`sep`, `decimal` and `thousands`"
            raise VardropError(f"Expected {named} to be different characters, but got {marks}.")
        if self.group is not None and self.time is not None:
            raise VardropError("`group` cannot be combined with `time`. Choose one of them.")

    @property
    def apart(self) -> tuple[str, ...]:
        """The columns that are not inputs."""
        named = (self.target, self.id, self.weight, self.split, self.group, self.time)
        return (*self.drop, *(name for name in named if name is not None))


@dataclass(frozen=True)
class NumberColumn:
    """A numeric column, scaled to mean 0 and standard deviation 1; the median replaces gaps.

    With `missing` a second column marks the missing values.
    """

    kind = "number"
    name: str
    median: float
    mean: float
    std: float
    missing: bool

    @property
    def width(self) -> int:
        """The number of columns of the tensor."""
        return 1 + self.missing

    def apply(self, cells: pandas.Series, source: str) -> Tensor:
        """The columns of the tensor, (N, width)."""
        numbers = to_numbers(cells, source)
        gaps = numbers.isnan()
        scaled = (torch.where(gaps, self.median, numbers) - self.mean) / self.std
        return torch.stack([scaled, gaps][: self.width], 1).float()

    def __str__(self) -> str:
        return f"median {self.median:.4g}{', with missing values' if self.missing else ''}"


@dataclass(frozen=True)
class CategoryColumn:
    """A column of categories: one 0/1 column each, all 0 for a missing or unknown category.

    With `embedded` it is one column with the number of the category, from 1 on, for an embedding.
    There 0 is a missing or unknown category.
    """

    kind = "category"
    name: str
    categories: tuple[str, ...]
    embedded: bool = False

    @property
    def width(self) -> int:
        """The number of columns of the tensor."""
        return 1 if self.embedded else len(self.categories)

    def codes(self, cells: pandas.Series) -> Tensor:
        """The number of the category of each cell, -1 for none."""
        index = import_optional("pandas").Index(list(self.categories), dtype=object)
        names = cells.map(str, na_action="ignore").astype(object)
        return torch.tensor(index.get_indexer(names.where(names.notna(), None)))

    def apply(self, cells: pandas.Series, source: str) -> Tensor:
        """The columns of the tensor, (N, width)."""
        codes = self.codes(cells).unsqueeze(1)
        return (codes + 1 if self.embedded else codes == torch.arange(self.width)).float()

    def __str__(self) -> str:
        first = ", ".join(self.categories[:3])
        some = f"{len(self.categories)} with an embedding: {first}, ..."
        return some if self.embedded else ", ".join(self.categories)


@dataclass(frozen=True)
class DateColumn:
    """A column of dates: scaled days since 2000-01-01, and their place in the year and the week.

    Texts are read with `date_format`, ISO 8601 if that is None. With `hours` there is the place in
    the day too. With `missing` a last column marks the missing values.
    """

    kind = "date"
    name: str
    mean: float
    std: float
    hours: bool
    missing: bool
    date_format: str | None = None

    @property
    def periods(self) -> tuple[float, ...]:
        """The periods whose sine and cosine are columns, in days."""
        return (YEAR, WEEK, DAY) if self.hours else (YEAR, WEEK)

    @property
    def width(self) -> int:
        """The number of columns of the tensor."""
        return 1 + 2 * len(self.periods) + self.missing

    def apply(self, cells: pandas.Series, source: str) -> Tensor:
        """The columns of the tensor, (N, width)."""
        days = to_days(cells, self.date_format, source)
        gaps = days.isnan()
        filled = torch.where(gaps, self.mean, days)
        angles = [2 * math.pi * filled / period for period in self.periods]
        waves = [wave for angle in angles for wave in (angle.sin(), angle.cos())]
        parts = [(filled - self.mean) / self.std, *waves, gaps]
        return torch.stack(parts[: self.width], 1).float()

    def __str__(self) -> str:
        return f"{self.date_format or 'ISO 8601'}{', with hours' if self.hours else ''}"


Column = NumberColumn | CategoryColumn | DateColumn
_KINDS: dict[str, type[Column]] = {column.kind: column for column in get_args(Column)}


@dataclass(frozen=True)
class Preprocessing:
    """The columns of a table, its target and the target's scale, learned from the training rows.

    Args:
        target: the name of the target column.
        task: classification or regression.
        columns: the columns that are inputs.
        classes: the names of the classes, empty for regression.
        target_mean, target_std: scale of the target of a regression.
        dropped: columns that were left out, each with the reason.
        note: a remark on how the target was read.
    """

    target: str
    task: Task
    columns: tuple[Column, ...]
    classes: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_std: float = 1.0
    dropped: tuple[tuple[str, str], ...] = ()
    note: str = ""

    @property
    def features(self) -> int:
        """The number of columns of the tensor of inputs."""
        return sum(column.width for column in self.columns)

    @property
    def embeddings(self) -> dict[int, int]:
        """How many category numbers the embedded columns have, by place in the tensor."""
        places = accumulate((column.width for column in self.columns), initial=0)
        return {
            place: 1 + len(column.categories)
            for place, column in zip(places, self.columns, strict=False)
            if isinstance(column, CategoryColumn) and column.embedded
        }

    @property
    def text_columns(self) -> set[str]:
        """Columns that are texts in any file, also if all their cells look like numbers.

        Truth values with gaps are not among them, because pandas reads `true` and `TRUE` as True.
        """
        texts = {c.name: c.categories for c in self.columns if isinstance(c, CategoryColumn)}
        if not all(map(is_number, self.classes)):
            texts[self.target] = self.classes
        dates = {c.name for c in self.columns if isinstance(c, DateColumn)}
        return dates | {name for name, words in texts.items() if not _TRUTH.issuperset(words)}

    def inputs(self, table: pandas.DataFrame, source: str) -> Tensor:
        """The inputs (N, features) of any table with these columns."""
        if missing := [c.name for c in self.columns if c.name not in table.columns]:
            names = f"{list_names(missing)}.{suggest(missing[0], table.columns)}"
            raise VardropError(f"Expected the columns of the training in {source}, but no {names}")
        return torch.cat([c.apply(table[c.name], source) for c in self.columns], 1)

    def targets(self, cells: pandas.Series, source: str) -> Tensor:
        """Class numbers (N,), or scaled numbers (N, 1)."""
        if self.task == "regression":
            numbers = to_numbers(cells, source)
            return ((numbers - self.target_mean) / self.target_std).float().unsqueeze(1)
        index = import_optional("pandas").Index(list(self.classes), dtype=object)
        codes = torch.tensor(index.get_indexer([label(cell) for cell in cells]))
        wanted = f"the classes {list_names(self.classes)} in column '{self.target}' of {source}"
        check_cells(cells, (codes < 0).numpy(), wanted)
        return codes

    def unseen(self, table: pandas.DataFrame) -> Iterator[str]:
        """A sentence on every column with categories or gaps that are new to the model."""
        for column in self.columns:
            cells = table[column.name]
            if isinstance(column, CategoryColumn):
                new = cells[(column.codes(cells) < 0).numpy() & cells.notna().to_numpy()]
                first = ", ".join(new.map(str).unique()[:3])
                text = f"{len(new)} rows with a new category ({first}), taken for none"
            else:
                new = cells[cells.isna() & (not column.missing)]
                text = f"{len(new)} missing values, filled as in training"
            if len(new):
                yield f"Column '{column.name}': {text}."

    def to_json(self) -> dict[str, Any]:
        """The preprocessing as plain dictionaries."""
        columns = [{"kind": c.kind, **asdict(c)} for c in self.columns]
        return {"version": VERSION, **asdict(self), "columns": columns}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Preprocessing:
        """The preprocessing that `to_json` described."""
        content: dict[str, Any] = _tuples(stored)
        if (version := content.pop("version", None)) != VERSION:
            raise VardropError(f"Expected preprocessing of version {VERSION}, but got {version!r}.")
        columns = tuple(_KINDS[c.pop("kind")](**c) for c in content["columns"])
        preprocessing = cls(**content | {"columns": columns})
        for part in (preprocessing, *columns):
            _check_fields(part)
        names = [column.name for column in columns]
        if not names or len(set(names)) < len(names):
            raise VardropError(f"Expected columns that differ in their names, but got {names}.")
        return preprocessing


def _check_fields(part: Preprocessing | Column) -> None:
    """Raise an error unless the fields can have been learned from a table."""
    for name, kind in get_type_hints(type(part)).items():
        content = getattr(part, name)
        if kind is float:
            check_number(name, content, above=0 if name.endswith("std") else None)
        elif get_origin(kind) is Literal:
            check_choice(name, content, get_args(kind))
        else:
            check_type(name, content, tuple if get_origin(kind) is tuple else kind, f"{kind}")
    for name in ("categories", "classes"):
        texts = getattr(part, name, ())
        if not all(isinstance(text, str) for text in texts) or len(set(texts)) < len(texts):
            raise VardropError(f"Expected `{name}` to be different texts, but got {texts!r}.")
    for pair in getattr(part, "dropped", ()):
        if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise VardropError(f"Expected a column and a reason in `dropped`, but got {pair!r}.")


def _tuples(stored: Any) -> Any:
    """JSON with tuples instead of lists."""
    if isinstance(stored, dict):
        return {name: _tuples(part) for name, part in stored.items()}
    return tuple(map(_tuples, stored)) if isinstance(stored, list) else stored


def label(cell: object) -> str:
    """The name of a class: whole numbers without a fraction, so that 1 and 1.0 are one class."""
    return str(int(cell) if isinstance(cell, float) and cell.is_integer() else cell)


def is_number(text: str) -> bool:
    """Whether a text can be read as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def to_numbers(column: pandas.Series, source: str) -> Tensor:
    """A column in double precision, NaN for missing cells. An error shows other cells."""
    numbers = import_optional("pandas").to_numeric(column, errors="coerce").astype("float64")
    wrong = (numbers.isna() & column.notna()) | numbers.isin([math.inf, -math.inf])
    remedy = "Set `decimal` or `thousands` of the file (--decimal, --thousands), or correct them."
    check_cells(column, wrong, f"numbers in column '{column.name}' of {source}", remedy)
    return torch.tensor(numbers.to_numpy())


def to_dates(column: pandas.Series, date_format: str | None) -> pandas.Series:
    """A column as times in UTC without a time zone, NaT for other cells."""
    pandas = import_optional("pandas")
    if not pandas.api.types.is_datetime64_any_dtype(column):
        column = column.map(str, na_action="ignore").astype(object)
    options = {"format": date_format or "ISO8601", "errors": "coerce", "utc": True}
    return pandas.to_datetime(column, **options).dt.tz_localize(None)


def to_days(column: pandas.Series, date_format: str | None, source: str) -> Tensor:
    """Days since 2000-01-01, NaN for missing dates. An error shows cells that are not dates."""
    pandas, dates = import_optional("pandas"), to_dates(column, date_format)
    kind = f"dates of the format {date_format!r}" if date_format else "ISO dates (2020-01-31)"
    wanted = f"{kind} in column '{column.name}' of {source}"
    remedy = "Set `date_format` (--date-format), such as %d/%m/%Y, or correct them."
    check_cells(column, dates.isna() & column.notna(), wanted, remedy)
    days = (dates - pandas.Timestamp("2000-01-01")) / pandas.Timedelta(days=1)
    return torch.tensor(days.to_numpy("float64"))


def check_cells(column: pandas.Series, wrong: NDArray[Any], wanted: str, remedy: str = "") -> None:
    """Raise an error that shows the first wrong cells, if there are any."""
    if bool(wrong.any()):
        rows = import_optional("numpy").flatnonzero(wrong)
        texts = [describe_value(str(column.iloc[i])) for i in rows[:3]]
        cells = [f"{t} in row {row_number(column, i)}" for t, i in zip(texts, rows, strict=False)]
        count = f" ({len(rows)} in all)" if len(rows) > 3 else ""
        problem = f"Expected {wanted}, but got {', '.join(cells)}{count}."
        raise VardropError(f"{problem} {remedy}".rstrip())


def row_number(column: pandas.Series, position: int) -> int:
    """The row of the file that a cell comes from, counted from 1. Parts keep their index."""
    row = column.index[position]
    return (int(row) if isinstance(row, Integral) else position) + 1
