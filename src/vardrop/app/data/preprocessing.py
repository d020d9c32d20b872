"""From a table to tensors: what the training part showed, stored and applied to every table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from vardrop._core.checks import check_choice, check_number, check_type, nearest
from vardrop._core.errors import VardropError, needed
from vardrop.app.data.parsing import Decimal, as_dates, as_numbers, texts, wrong

if TYPE_CHECKING:
    import pandas

Task = Literal["classification", "regression"]
VERSION = 1


@dataclass(frozen=True)
class Number:
    """A numeric column: missing values get the median, then mean 0 and deviation 1.

    With `missing` a second column marks the missing values; `decimal` is the mark before decimals.
    """

    name: str
    median: float
    mean: float
    std: float
    missing: bool
    decimal: Decimal = "."

    def __post_init__(self) -> None:
        check_type("name", self.name, str, "the name of a column")
        check_number("median", self.median)
        check_number("mean", self.mean)
        check_number("std", self.std, above=0)
        check_type("missing", self.missing, bool, "true or false")
        check_choice("decimal", self.decimal, get_args(Decimal))

    @property
    def width(self) -> int:
        """How many columns of the tensor it has."""
        return 1 + self.missing

    def apply(self, values: pandas.Series, source: str) -> Tensor:
        """Its columns of the tensor, (N, width)."""
        found = _tensor(numbers(values, source, self.decimal))
        scaled = (torch.where(found.isnan(), self.median, found) - self.mean) / self.std
        return _with_missing([scaled], found.isnan(), self.missing)

    def surprise(self, values: pandas.Series) -> str:
        """What values have that the training had not; empty where that is nothing."""
        absent = 0 if self.missing else int(as_numbers(values, self.decimal).isna().sum())
        return f"{absent} missing values, the median in their place" if absent else ""

    def __str__(self) -> str:
        comma = ", decimals after a comma" if self.decimal == "," else ""
        return f"median {self.median:.4g}{', with missing values' if self.missing else ''}{comma}"


@dataclass(frozen=True)
class Category:
    """A column of categories: one 0/1 column each; a missing or unknown one has none."""

    name: str
    categories: tuple[str, ...]

    def __post_init__(self) -> None:
        for text in (self.name, *self.categories):
            check_type("name", text, str, "the name of a column or a category")

    @property
    def width(self) -> int:
        """How many columns of the tensor it has."""
        return len(self.categories)

    def codes(self, values: pandas.Series) -> Tensor:
        """The number of each value's category, -1 for none."""
        known = needed("pandas").Index(list(self.categories), dtype=object)
        own = values.map(str, na_action="ignore").astype(object)
        return torch.tensor(known.get_indexer(own.where(own.notna(), None)))

    def apply(self, values: pandas.Series, source: str) -> Tensor:
        """Its columns of the tensor, (N, width)."""
        found = self.codes(values).unsqueeze(1)
        return (found == torch.arange(self.width)).float()

    def surprise(self, values: pandas.Series) -> str:
        """What values have that the training had not; empty where that is nothing."""
        new = values[(self.codes(values) < 0).numpy() & values.notna().to_numpy()].map(str)
        shown = ", ".join(list(dict.fromkeys(new))[:3])
        return f"{len(new)} rows with a new category ({shown}), taken for none" if len(new) else ""

    def __str__(self) -> str:
        return ", ".join(self.categories)


@dataclass(frozen=True)
class ManyCategories(Category):
    """A column of many categories: its number, from 1 on, for an embedding; 0 is none of them."""

    @property
    def width(self) -> int:
        """One column of the tensor, with the number."""
        return 1

    def apply(self, values: pandas.Series, source: str) -> Tensor:
        """Its column of the tensor, (N, 1)."""
        return (self.codes(values) + 1).float().unsqueeze(1)

    def __str__(self) -> str:
        shown = ", ".join(self.categories[:3])
        return f"{len(self.categories)} with an embedding: {shown}, ..."


@dataclass(frozen=True)
class Date:
    """A column of dates: days, scaled, and their place in the year and the week, or the day too.

    Days are counted from the year 2000. With `missing` a last column marks the missing values.
    """

    name: str
    mean: float
    std: float
    hours: bool
    day_first: bool
    missing: bool

    def __post_init__(self) -> None:
        check_type("name", self.name, str, "the name of a column")
        check_number("mean", self.mean)
        check_number("std", self.std, above=0)
        for name in ("hours", "day_first", "missing"):
            check_type(name, getattr(self, name), bool, "true or false")

    @property
    def width(self) -> int:
        """How many columns of the tensor it has."""
        return 5 + 2 * self.hours + self.missing

    def apply(self, values: pandas.Series, source: str) -> Tensor:
        """Its columns of the tensor, (N, width)."""
        found = days(values, self.day_first, source)
        filled = torch.where(found.isnan(), self.mean, found)
        parts = [(filled - self.mean) / self.std]
        for period in (365.2425, 7.0, *([1.0] if self.hours else [])):
            angle = 2 * math.pi * filled / period
            parts += [angle.sin(), angle.cos()]
        return _with_missing(parts, found.isnan(), self.missing)

    def surprise(self, values: pandas.Series) -> str:
        """What values have that the training had not; empty where that is nothing."""
        absent = 0 if self.missing else int(as_dates(values, self.day_first).isna().sum())
        return f"{absent} missing dates, the mean in their place" if absent else ""

    def __str__(self) -> str:
        first = "day first" if self.day_first else "year or month first"
        return f"{first}{', with hours' if self.hours else ''}"


def days(values: pandas.Series, first: bool, source: str) -> Tensor:
    """Days since the year 2000, NaN where there is no date."""
    pandas = needed("pandas")
    found = as_dates(values, first)
    absent = found.isna() & texts(values).notna()
    if bool(absent.any()):
        position = int(absent.to_numpy().argmax())
        raise VardropError(
            f"Expected dates in column '{values.name}' of {source}, but got "
            f"'{values.iloc[position]}' in row {row_number(values, position)}."
        )
    return _tensor((found - pandas.Timestamp("2000-01-01")) / pandas.Timedelta(days=1))


def _tensor(values: pandas.Series) -> Tensor:
    return torch.tensor(values.to_numpy(dtype="float64", copy=True), dtype=torch.float64)


def _with_missing(parts: list[Tensor], absent: Tensor, marked: bool) -> Tensor:
    return torch.stack([*parts, *([absent.double()] if marked else [])], 1).float()


Column = Number | Category | ManyCategories | Date
_KINDS: dict[str, Any] = {
    "number": Number,
    "category": Category,
    "categories": ManyCategories,
    "date": Date,
}


@dataclass(frozen=True)
class Preprocessing:
    """What the training part of a table showed: its columns, its target, the target's scale.

    `dropped` holds columns that were left out, each with the reason; `note` what was decided about
    the target, if anything was.
    """

    target: str
    task: Task
    columns: tuple[Column, ...]
    classes: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_std: float = 1.0
    decimal: Decimal = "."
    dropped: tuple[tuple[str, str], ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        check_choice("task", self.task, ("classification", "regression"))
        check_number("target_mean", self.target_mean)
        check_number("target_std", self.target_std, above=0)
        for text in (self.target, *self.classes):
            check_type("target", text, str, "the name of a column or a class")

    @property
    def features(self) -> int:
        """How many columns the tensor of inputs has."""
        return sum(column.width for column in self.columns)

    @property
    def embeddings(self) -> dict[int, int]:
        """By their place in the tensor, the columns with the number of a category: how many."""
        found, place = {}, 0
        for column in self.columns:
            if isinstance(column, ManyCategories):
                found[place] = 1 + len(column.categories)
            place += column.width
        return found

    def inputs(self, table: pandas.DataFrame, source: str) -> Tensor:
        """The inputs (N, features) of any table with these columns."""
        if missing := [c.name for c in self.columns if c.name not in table.columns]:
            raise VardropError(
                f"Expected {source} to have the columns of the training data, but got none named "
                f"{', '.join(map(repr, missing))}.{nearest(missing[0], table.columns)}"
            )
        return torch.cat([c.apply(table[c.name], source) for c in self.columns], 1)

    def targets(self, values: pandas.Series, source: str) -> Tensor:
        """Class numbers (N,), or scaled values (N, 1)."""
        if self.task == "regression":
            found = _tensor(numbers(values, source, self.decimal))
            return ((found - self.target_mean) / self.target_std).float().unsqueeze(1)
        index = {name: i for i, name in enumerate(self.classes)}
        for position, value in enumerate(values):
            if label(value) not in index:
                raise VardropError(
                    f"Expected the classes {', '.join(self.classes)} in column '{self.target}' of "
                    f"{source}, but got '{value}' in row {row_number(values, position)}."
                )
        return torch.tensor([index[label(v)] for v in values])

    def surprises(self, table: pandas.DataFrame) -> list[str]:
        """A sentence on every column of a table that has what the training had not."""
        found = {column.name: column.surprise(table[column.name]) for column in self.columns}
        return [f"Column '{name}': {text}." for name, text in found.items() if text]

    def resembles(self, other: Preprocessing) -> bool:
        """Whether another is the same, but for the last digits of its numbers."""
        return _close(asdict(self), asdict(other))

    def to_json(self) -> dict[str, Any]:
        """The preprocessing as plain dictionaries."""
        kinds = {kind: name for name, kind in _KINDS.items()}
        columns = [{"kind": kinds[type(c)], **asdict(c)} for c in self.columns]
        return {"version": VERSION, **asdict(self), "columns": columns}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Preprocessing:
        """The preprocessing that `to_json` described."""
        if data.get("version") != VERSION:
            raise VardropError(
                f"Expected preprocessing of version {VERSION}, but got {data.get('version')!r}."
            )
        fields = {k: _float(v) for k, v in data.items() if k != "version"}
        fields["columns"] = tuple(_column(dict(c)) for c in data["columns"])
        fields["dropped"] = tuple((name, why) for name, why in data.get("dropped", ()))
        return cls(**{**fields, "classes": tuple(data["classes"])})


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_close(a[k], b[k]) for k in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12)
    return bool(a == b)


def _float(value: Any) -> Any:
    return float(value) if type(value) is int else value


def _column(data: dict[str, Any]) -> Column:
    kind = data.pop("kind")
    check_choice("kind", kind, tuple(_KINDS))
    if "categories" in data:
        data["categories"] = tuple(data["categories"])
    found: Column = _KINDS[kind](**{k: _float(v) for k, v in data.items()})
    return found


def label(value: Any) -> str:
    """The name of a class: whole numbers without a fraction, so that 1 and 1.0 are one class."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def numbers(values: pandas.Series, source: str, decimal: Decimal = ".") -> pandas.Series:
    """A column as floats, missing values as NaN; an error names the first row of another kind."""
    found = as_numbers(values, decimal)
    bad = wrong(values, found) | found.isin([math.inf, -math.inf])
    if bool(bad.any()):
        first = int(bad.to_numpy().argmax())
        raise VardropError(
            f"Expected numbers in column '{values.name}' of {source}, but got "
            f"'{values.iloc[first]}' in row {row_number(values, first)}."
        )
    return found


def row_number(values: pandas.Series, position: int) -> int:
    """The row of the file that a value comes from, counted from 1; parts keep their index."""
    found = values.index[position]
    return (int(found) if isinstance(found, Integral) else position) + 1
