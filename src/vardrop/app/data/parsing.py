"""Texts as numbers and dates: money, separators of thousands, days first or months first."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from vardrop._core.errors import needed

if TYPE_CHECKING:
    import pandas

Decimal = Literal[".", ","]
MISSING = ("", "?", "-", "--", ".", "na", "n/a", "n.a.", "nan", "none", "null", "nil", "missing")
_MARKS = re.compile(r"[\s'\u2019$€£¥₹%]|\b(?:usd|eur|gbp|chf|jpy|inr)\b", re.IGNORECASE)
_NEGATIVE = re.compile(r"\((.*)\)")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|infinity)", re.IGNORECASE)
_COMMA = re.compile(r"\d,(\d{1,2}|\d{4,})$|\.\d{3},")  # no separator of thousands is followed so
_DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})([T ]\d{1,2}:\d{2}\S*)?"
)


def texts(values: pandas.Series) -> pandas.Series:
    """A column as texts without blanks around them; what stands for nothing is missing."""
    found = values.map(lambda v: str(v).strip(), na_action="ignore").astype(object)
    return found.mask(found.str.lower().isin(MISSING), None)


def decimal_mark(values: pandas.Series) -> Decimal:
    """Which mark begins the decimals: a comma where one stands where none of thousands could.

    >>> import pandas
    >>> decimal_mark(pandas.Series(["1.234,5", "7"])), decimal_mark(pandas.Series(["1,234", "7"]))
    (',', '.')
    """
    found = texts(values).dropna().map(_cleaned)
    return "," if bool(found.map(lambda t: bool(_COMMA.search(t))).any()) else "."


def as_numbers(values: pandas.Series, decimal: Decimal = ".") -> pandas.Series:
    """A column as floats: NaN where it is missing, and where `wrong` says that it is no number.

    >>> import pandas
    >>> as_numbers(pandas.Series(["$1,000.50", "(3)", "?"])).tolist()
    [1000.5, -3.0, nan]
    """
    pandas = needed("pandas")
    if pandas.api.types.is_numeric_dtype(values):
        return values.astype("float64")
    return texts(values).map(lambda t: _number(t, decimal), na_action="ignore").astype("float64")


def wrong(values: pandas.Series, found: pandas.Series) -> pandas.Series:
    """Which of the values are there, but no numbers of `as_numbers`."""
    if needed("pandas").api.types.is_numeric_dtype(values):
        return found.isna() & values.notna()
    return found.isna() & texts(values).notna()


def _cleaned(text: str) -> str:
    bare = _MARKS.sub("", text)
    inside = _NEGATIVE.fullmatch(bare)
    return bare if inside is None else f"-{inside[1]}"


def _number(text: str, decimal: Decimal) -> float | None:
    bare = _cleaned(text)
    if decimal == ",":
        bare = bare.replace(".", "").replace(",", ".")
    elif _THOUSANDS.fullmatch(bare):
        bare = bare.replace(",", "")
    return float(bare) if _NUMBER.fullmatch(bare) else None


def is_date(values: pandas.Series) -> bool:
    """Whether all values are dates, with or without a time."""
    pandas = needed("pandas")
    if pandas.api.types.is_datetime64_any_dtype(values):
        return True
    found = texts(values).dropna()
    if len(found) == 0 or not bool(found.map(lambda t: bool(_DATE.fullmatch(t))).all()):
        return False
    return bool(as_dates(values, day_first(values)).notna()[found.index].all())


def day_first(values: pandas.Series) -> bool:
    """Whether days stand before months: where a first number is above 12, or dots divide.

    >>> import pandas
    >>> day_first(pandas.Series(["31/01/2020"])), day_first(pandas.Series(["01/31/2020"]))
    (True, False)
    """
    found = texts(values).dropna().map(lambda t: re.split(r"[-/.T ]", t))
    first = [int(parts[0]) for parts in found if parts[0].isdigit() and len(parts[0]) < 3]
    second = [int(parts[1]) for parts in found if len(parts) > 1 and parts[1].isdigit()]
    dots = bool(texts(values).dropna().str.contains(r"^\d{1,2}\.", regex=True).any())
    return max(first, default=0) > 12 or (dots and max(second, default=0) <= 12)


def as_dates(values: pandas.Series, days_first: bool) -> pandas.Series:
    """A column as times; NaT where there is none."""
    pandas = needed("pandas")
    if pandas.api.types.is_datetime64_any_dtype(values):
        found: Any = values
    else:
        options = {"format": "mixed", "dayfirst": days_first, "errors": "coerce", "utc": True}
        found = pandas.to_datetime(texts(values), **options)
    return found.dt.tz_localize(None) if found.dt.tz is not None else found
