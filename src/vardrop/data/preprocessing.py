"""From a table to tensors: what the training part showed, stored and applied to every table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from vardrop.checks import check_choice, check_number, check_type
from vardrop.errors import VardropError

if TYPE_CHECKING:
    import pandas

Task = Literal["classification", "regression"]
VERSION = 1


@dataclass(frozen=True)
class Number:
    """A numeric column: missing values get the median, then mean 0 and deviation 1.

    With `missing` a second column marks the missing values.
    """

    name: str
    median: float
    mean: float
    std: float
    missing: bool

    def __post_init__(self) -> None:
        check_type("name", self.name, str, "the name of a column")
        check_number("median", self.median)
        check_number("mean", self.mean)
        check_number("std", self.std, above=0)
        check_type("missing", self.missing, bool, "true or false")

    def apply(self, values: pandas.Series, source: str) -> list[Tensor]:
        """One column of the tensor, or two where missing values are marked."""
        found = torch.tensor(numbers(values, source).to_numpy(copy=True), dtype=torch.float64)
        empty = found.isnan()
        scaled = (torch.where(empty, self.median, found) - self.mean) / self.std
        return [scaled.float(), empty.float()] if self.missing else [scaled.float()]


@dataclass(frozen=True)
class Category:
    """A column of categories: one 0/1 column each; a missing or unknown one has none."""

    name: str
    categories: tuple[str, ...]

    def __post_init__(self) -> None:
        for text in (self.name, *self.categories):
            check_type("name", text, str, "the name of a column or a category")

    def apply(self, values: pandas.Series, source: str) -> list[Tensor]:
        """As many columns of the tensor as there are categories."""
        texts = [
            None if absent else str(v) for v, absent in zip(values, values.isna(), strict=True)
        ]
        return [torch.tensor([float(t == c) for t in texts]) for c in self.categories]


Column = Number | Category


@dataclass(frozen=True)
class Preprocessing:
    """What the training part of a table showed: its columns, its target, the target's scale."""

    target: str
    task: Task
    columns: tuple[Column, ...]
    classes: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_std: float = 1.0

    def __post_init__(self) -> None:
        check_choice("task", self.task, ("classification", "regression"))
        check_number("target_mean", self.target_mean)
        check_number("target_std", self.target_std, above=0)
        for text in (self.target, *self.classes):
            check_type("target", text, str, "the name of a column or a class")

    @property
    def features(self) -> int:
        """How many columns the tensor of inputs has."""
        return sum(
            1 + c.missing if isinstance(c, Number) else len(c.categories) for c in self.columns
        )

    def inputs(self, table: pandas.DataFrame, source: str) -> Tensor:
        """The inputs (N, features) of any table with these columns."""
        if missing := [c.name for c in self.columns if c.name not in table.columns]:
            raise VardropError(
                f"Expected {source} to have the columns of the training data, but got none named "
                f"{', '.join(map(repr, missing))}."
            )
        parts = [part for c in self.columns for part in c.apply(table[c.name], source)]
        return torch.stack(parts, 1)

    def targets(self, values: pandas.Series, source: str) -> Tensor:
        """Class numbers (N,), or scaled values (N, 1)."""
        if self.task == "regression":
            found = torch.tensor(numbers(values, source).to_numpy(copy=True), dtype=torch.float64)
            return ((found - self.target_mean) / self.target_std).float().unsqueeze(1)
        index = {name: i for i, name in enumerate(self.classes)}
        for position, value in enumerate(values):
            if label(value) not in index:
                raise VardropError(
                    f"Expected the classes {', '.join(self.classes)} in column '{self.target}' of "
                    f"{source}, but got '{value}' in row {row_number(values, position)}."
                )
        return torch.tensor([index[label(v)] for v in values])

    def resembles(self, other: Preprocessing) -> bool:
        """Whether another is the same, but for the last digits of its numbers."""
        return _close(asdict(self), asdict(other))

    def to_json(self) -> dict[str, Any]:
        """The preprocessing as plain dictionaries."""
        columns = [
            {"kind": "number" if isinstance(c, Number) else "category", **asdict(c)}
            for c in self.columns
        ]
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
    check_choice("kind", kind, ("number", "category"))
    if kind == "number":
        if "holes" in data:  # the word of version 0.1
            data["missing"] = data.pop("holes")
        return Number(**{k: _float(v) for k, v in data.items()})
    return Category(data["name"], tuple(data["categories"]))


def label(value: Any) -> str:
    """The name of a class: whole numbers without a fraction, so that 1 and 1.0 are one class."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def numbers(values: pandas.Series, source: str) -> pandas.Series:
    """A column as floats, missing values as NaN; an error names the first row of another kind."""
    import pandas

    found = pandas.to_numeric(values, errors="coerce").astype("float64")
    wrong = (found.isna() & values.notna()) | found.isin([math.inf, -math.inf])
    if bool(wrong.any()):
        first = int(wrong.to_numpy().argmax())
        raise VardropError(
            f"Expected numbers in column '{values.name}' of {source}, but got "
            f"'{values.iloc[first]}' in row {row_number(values, first)}."
        )
    return found


def row_number(values: pandas.Series, position: int) -> int:
    """The row of the file that a value comes from, counted from 1; parts keep their index."""
    found = values.index[position]
    return (int(found) if isinstance(found, Integral) else position) + 1
