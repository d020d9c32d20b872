"""From a table to tensors: what the training rows showed, kept as JSON, applied to any table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from vardrop._core.checks import check_choice, check_number, check_type, nearest
from vardrop._core.errors import VardropError, needed

if TYPE_CHECKING:
    import pandas

Task = Literal["classification", "regression"]
VERSION = 1
YEAR, WEEK, DAY = 365.2425, 7.0, 1.0  # periods of dates, in days
_TRUTH = {"True", "False"}  # what pandas makes of true, TRUE and True alike


@dataclass(frozen=True)
class NumberColumn:
    """A numeric column, scaled to mean 0 and standard deviation 1; the median replaces gaps.

    With `missing` a second column marks the missing values.
    """

    name: str
    median: float
    mean: float
    std: float
    missing: bool

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def width(self) -> int:
        """How many columns of the tensor it has."""
        return 1 + self.missing

    def apply(self, values: pandas.Series, source: str) -> Tensor:
        """Its columns of the tensor, (N, width)."""
        numbers = _tensor(to_numbers(values, source))
        scaled = (torch.where(numbers.isnan(), self.median, numbers) - self.mean) / self.std
        return _stack([scaled], numbers.isnan(), self.missing)

    def unseen(self, values: pandas.Series) -> str:
        """Describe what these values have and the training rows had not; empty if nothing."""
        count = 0 if self.missing else int(values.isna().sum())
        return f"{count} missing values, replaced by the median" if count else ""

    def __str__(self) -> str:
        return f"median {self.median:.4g}{', with missing values' if self.missing else ''}"


@dataclass(frozen=True)
class CategoryColumn:
    """A column of categories: one 0/1 column each; all are 0 for a missing or unknown category.

    With `embedded` it is one column with the number of the category, from 1 on, for an embedding;
    0 stands for a missing or unknown category.
    """

    name: str
    categories: tuple[str, ...]
    embedded: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)
        for category in self.categories:
            check_type("categories", category, str, "texts")

    @property
    def width(self) -> int:
        """How many columns of the tensor it has."""
        return 1 if self.embedded else len(self.categories)

    def codes(self, values: pandas.Series) -> Tensor:
        """The number of each value's category, -1 for none."""
        index = needed("pandas").Index(list(self.categories), dtype=object)
        names = values.map(str, na_action="ignore").astype(object)
        return torch.tensor(index.get_indexer(names.where(names.notna(), None)))

    def apply(self, values: pandas.Series, source: str) -> Tensor:
        """Its columns of the tensor, (N, width)."""
        codes = self.codes(values).unsqueeze(1)
        return (codes + 1 if self.embedded else codes == torch.arange(self.width)).float()

    def unseen(self, values: pandas.Series) -> str:
        """Describe what these values have and the training rows had not; empty if nothing."""
        new = values[(self.codes(values) < 0).numpy() & values.notna().to_numpy()].map(str)
        first = ", ".join(list(dict.fromkeys(new))[:3])
        return f"{len(new)} rows with a new category ({first}), taken for none" if len(new) else ""

    def __str__(self) -> str:
        if not self.embedded:
            return ", ".join(self.categories)
        return f"{len(self.categories)} with an embedding: {', '.join(self.categories[:3])}, ..."


@dataclass(frozen=True)
class DateColumn:
    """A column of dates: scaled days since 2000-01-01, and their place in the year and the week.

    Texts are read with `date_format`, ISO 8601 if that is None. With `hours` there is the place in
    the day too; with `missing` a last column marks the missing values.
    """

    name: str
    mean: float
    std: float
    hours: bool
    missing: bool
    date_format: str | None = None

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def periods(self) -> tuple[float, ...]:
        """The periods whose sine and cosine are columns, in days."""
        return (YEAR, WEEK, DAY) if self.hours else (YEAR, WEEK)

    @property
    def width(self) -> int:
        """How many columns of the tensor it has."""
        return 1 + 2 * len(self.periods) + self.missing

    def apply(self, values: pandas.Series, source: str) -> Tensor:
        """Its columns of the tensor, (N, width)."""
        days = to_days(values, self.date_format, source)
        filled = torch.where(days.isnan(), self.mean, days)
        angles = [2 * math.pi * filled / period for period in self.periods]
        waves = [wave for angle in angles for wave in (angle.sin(), angle.cos())]
        return _stack([(filled - self.mean) / self.std, *waves], days.isnan(), self.missing)

    def unseen(self, values: pandas.Series) -> str:
        """Describe what these values have and the training rows had not; empty if nothing."""
        count = 0 if self.missing else int(values.isna().sum())
        return f"{count} missing dates, replaced by the mean" if count else ""

    def __str__(self) -> str:
        return f"{self.date_format or 'ISO 8601'}{', with hours' if self.hours else ''}"


Column = NumberColumn | CategoryColumn | DateColumn
_KINDS: dict[str, type[Column]] = {
    "number": NumberColumn,
    "category": CategoryColumn,
    "date": DateColumn,
}


def _check_fields(column: Column) -> None:
    """Raise for a field of another type than it is declared with; stored columns may be damaged."""
    for field in fields(column):
        value, kind = getattr(column, field.name), str(field.type)
        if kind == "float":
            check_number(field.name, value, above=0 if field.name == "std" else None)
        elif kind == "bool":
            check_type(field.name, value, bool, "true or false")
        elif kind.startswith("str"):
            allowed = str | None if "None" in kind else str
            check_type(field.name, value, allowed, "a text")


@dataclass(frozen=True)
class Preprocessing:
    """What the training rows of a table showed: its columns, its target, the target's scale.

    `dropped` holds columns that were left out, each with the reason; `note` what was decided about
    the target, if anything was.
    """

    target: str
    task: Task
    columns: tuple[Column, ...]
    classes: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_std: float = 1.0
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
            if isinstance(column, CategoryColumn) and column.embedded:
                found[place] = 1 + len(column.categories)
            place += column.width
        return found

    @property
    def text_columns(self) -> set[str]:
        """Columns that are texts in any file, also in one where all their cells look like numbers.

        Truth values with gaps are not among them: pandas reads `true` and `TRUE` as True.
        """
        texts = {c.name: c.categories for c in self.columns if isinstance(c, CategoryColumn)}
        if not all(map(is_number, self.classes)):
            texts[self.target] = self.classes
        dates = {c.name for c in self.columns if isinstance(c, DateColumn)}
        return dates | {name for name, values in texts.items() if not _TRUTH.issuperset(values)}

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
            numbers = _tensor(to_numbers(values, source))
            return ((numbers - self.target_mean) / self.target_std).float().unsqueeze(1)
        index = {name: i for i, name in enumerate(self.classes)}
        codes = torch.tensor([index.get(label(value), -1) for value in values])
        if bool((codes < 0).any()):
            row = int((codes < 0).int().argmax())
            raise VardropError(
                f"Expected the classes {', '.join(self.classes)} in column '{self.target}' of "
                f"{source}, but got '{values.iloc[row]}' in row {row_number(values, row)}."
            )
        return codes

    def unseen(self, table: pandas.DataFrame) -> list[str]:
        """A sentence on every column of a table that has what the training rows had not."""
        notes = {column.name: column.unseen(table[column.name]) for column in self.columns}
        return [f"Column '{name}': {text}." for name, text in notes.items() if text]

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
        stored = {name: value for name, value in data.items() if name != "version"}
        stored["columns"] = tuple(_column_from_json(dict(c)) for c in data["columns"])
        stored["dropped"] = tuple((name, why) for name, why in data["dropped"])
        return cls(**{**stored, "classes": tuple(data["classes"])})


def _column_from_json(data: dict[str, Any]) -> Column:
    kind = data.pop("kind")
    check_choice("kind", kind, tuple(_KINDS))
    if "categories" in data:
        data["categories"] = tuple(data["categories"])
    return _KINDS[kind](**data)


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_close(a[k], b[k]) for k in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12)
    return bool(a == b)


def _tensor(values: pandas.Series) -> Tensor:
    return torch.tensor(values.to_numpy(dtype="float64", copy=True), dtype=torch.float64)


def _stack(parts: list[Tensor], missing: Tensor, marked: bool) -> Tensor:
    return torch.stack([*parts, *([missing.double()] if marked else [])], 1).float()


def label(value: Any) -> str:
    """The name of a class: whole numbers without a fraction, so that 1 and 1.0 are one class."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def is_number(text: str) -> bool:
    """Whether a text can be read as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def to_numbers(values: pandas.Series, source: str) -> pandas.Series:
    """A column as floats, missing values as NaN; an error shows the cells that are no numbers."""
    numbers = needed("pandas").to_numeric(values, errors="coerce").astype("float64")
    wrong = (numbers.isna() & values.notna()) | numbers.isin([math.inf, -math.inf])
    _check_cells(
        values,
        wrong,
        f"numbers in column '{values.name}' of {source}",
        "If these are numbers of a file, set `decimal` or `thousands` (--decimal, --thousands); "
        "otherwise correct the cells.",
    )
    return numbers


def to_dates(values: pandas.Series, date_format: str | None) -> pandas.Series:
    """A column as times in UTC, without a time zone; NaT where there is none."""
    pandas = needed("pandas")
    if not pandas.api.types.is_datetime64_any_dtype(values):
        values = values.map(str, na_action="ignore").astype(object)
    options = {"format": date_format or "ISO8601", "errors": "coerce", "utc": True}
    return pandas.to_datetime(values, **options).dt.tz_localize(None)


def to_days(values: pandas.Series, date_format: str | None, source: str) -> Tensor:
    """Days since 2000-01-01, NaN for missing dates; an error shows the cells that are no dates."""
    pandas, dates = needed("pandas"), to_dates(values, date_format)
    kind = f"dates of the format {date_format!r}" if date_format else "ISO dates (2020-01-31)"
    _check_cells(
        values,
        dates.isna() & values.notna(),
        f"{kind} in column '{values.name}' of {source}",
        "Set `date_format` (--date-format), such as %d/%m/%Y, or correct the cells.",
    )
    return _tensor((dates - pandas.Timestamp("2000-01-01")) / pandas.Timedelta(days=1))


def _check_cells(values: pandas.Series, wrong: pandas.Series, wanted: str, remedy: str) -> None:
    if bool(wrong.any()):
        rows = wrong.to_numpy().nonzero()[0][:3]
        cells = [f"'{values.iloc[row]}' in row {row_number(values, int(row))}" for row in rows]
        more = f" ({int(wrong.sum())} cells in all)" if wrong.sum() > len(rows) else ""
        raise VardropError(f"Expected {wanted}, but got {', '.join(cells)}{more}. {remedy}")


def row_number(values: pandas.Series, position: int) -> int:
    """The row of the file that a value comes from, counted from 1; parts keep their index."""
    row = values.index[position]
    return (int(row) if isinstance(row, Integral) else position) + 1
