"""Tables larger than memory: CSV and Parquet files piece by piece, each row with its number."""

from __future__ import annotations

import codecs
import gzip
import io
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vardrop._core.errors import VardropError, needed
from vardrop.app.data.preprocessing import Category, Date, Preprocessing
from vardrop.app.data.tables import check_file, check_header, delimiter, is_number

if TYPE_CHECKING:
    import pandas

CHUNK = 50_000  # rows that are read at a time
_BYTES = 1 << 20
_TRUTH = {"True", "False"}  # as pandas writes what it takes for truth values


def read_chunks(
    path: str | Path, columns: Collection[str] | None = None, texts: Collection[str] = ()
) -> Iterator[pandas.DataFrame]:
    """The rows of a file in pieces that `read_table` would read at once; the index goes on.

    Args:
        path: a CSV or Parquet file; see `read_table`.
        columns: the columns to read; all where the file lacks one, so that an error can name them.
        texts: columns of a CSV file that are texts, also where a piece holds nothing but numbers.
    """
    path = Path(path)
    check_file(path)
    pieces = _parquet if _is_parquet(path) else _text
    begin = 0
    for piece in _told(path, pieces(path, columns, texts)):
        names = [str(name).strip() for name in piece.columns]
        if begin == 0:
            check_header(piece, path, columns is None or not set(columns) <= set(names))
        index = needed("pandas").RangeIndex(begin, begin + len(piece))
        begin += len(piece)
        yield piece.set_axis(names, axis=1).set_axis(index, axis=0)
    if begin == 0:
        raise VardropError(f"Expected {path} to have rows, but it has only a header.")


def names_of(path: Path) -> list[str]:
    """The names of the columns of a file."""
    check_file(path)
    if _is_parquet(path):
        found = _told(path, iter([needed("pyarrow.parquet").read_schema(path).names]))
    else:
        found = _told(path, (_header(path, *_form(path)) for _ in range(1)))
    return [str(name).strip() for name in next(found)]


def count_rows(path: Path, column: str) -> int:
    """How many rows a file has; of a CSV file a column is read to know."""
    if _is_parquet(path):
        return int(needed("pyarrow.parquet").read_metadata(path).num_rows)
    return sum(len(piece) for piece in read_chunks(path, {column}, {column}))


def inferred(texts: pandas.DataFrame, path: str) -> pandas.DataFrame:
    """Rows of a CSV file that were read as texts, with the types that they have together."""
    if _is_parquet(Path(path)):
        return texts
    pandas = needed("pandas")
    content = io.StringIO(texts.to_csv(index=False))
    return pandas.read_csv(content, skipinitialspace=True, low_memory=False).set_axis(
        texts.index, axis=0
    )


def _is_parquet(path: Path) -> bool:
    return path.name.lower().endswith((".parquet", ".pq"))


def as_texts(found: Preprocessing) -> set[str]:
    """The columns of a CSV file that pandas must not take for numbers in any piece."""
    names = {
        column.name
        for column in found.columns
        if isinstance(column, Date)
        or (isinstance(column, Category) and not _TRUTH.issuperset(column.categories))
    }
    numeric = all(is_number(name) for name in found.classes)
    truth = _TRUTH.issuperset(found.classes)
    return names if numeric or truth else names | {found.target}


def _told(path: Path, pieces: Iterator[Any]) -> Iterator[Any]:
    """The pieces that have rows; what fails is an error of the file."""
    pandas = needed("pandas")
    try:
        yield from (piece for piece in pieces if len(piece))
    except pandas.errors.EmptyDataError:
        raise VardropError(f"Expected {path} to hold a table, but it is empty.") from None
    except Exception as broken:  # pandas, pyarrow and gzip have a dozen types for damage
        reason = " ".join(str(broken).split())[:200]
        raise VardropError(f"Expected {path} to be a table, but got: {reason}.") from broken


def _parquet(
    path: Path, columns: Collection[str] | None, texts: Collection[str]
) -> Iterator[pandas.DataFrame]:
    file = needed("pyarrow.parquet").ParquetFile(path, pre_buffer=False)  # else it is kept
    for batch in file.iter_batches(CHUNK, columns=_wanted(file.schema_arrow.names, columns)):
        yield batch.to_pandas()


def _text(
    path: Path, columns: Collection[str] | None, texts: Collection[str]
) -> Iterator[pandas.DataFrame]:
    pandas, (encoding, mark) = needed("pandas"), _form(path)
    raw = _header(path, encoding, mark)
    options: dict[str, Any] = {"sep": mark, "skipinitialspace": True}
    options["dtype"] = {name: str for name in raw if str(name).strip() in texts}
    options["usecols"] = _wanted(raw, columns)
    with _opened(path, encoding) as file:
        yield from pandas.read_csv(file, chunksize=CHUNK, low_memory=False, **options)


def _form(path: Path) -> tuple[str, str]:
    """The encoding of a CSV file, and the mark that divides its cells."""
    encoding = encoding_of(path)
    with _opened(path, encoding) as file:
        return encoding, delimiter(file.read(_BYTES), path)


def _header(path: Path, encoding: str, mark: str) -> Any:
    with _opened(path, encoding) as file:
        return needed("pandas").read_csv(file, nrows=0, sep=mark, skipinitialspace=True).columns


def _wanted(raw: Iterable[Any], columns: Collection[str] | None) -> list[Any] | None:
    """The names, as the file writes them, of columns to read."""
    if columns is None:
        return None
    found = [name for name in raw if str(name).strip() in columns]
    return found if len(found) == len(columns) else None


def _opened(path: Path, encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(_bytes(path), encoding, errors="replace", newline="")


def _bytes(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb")


def encoding_of(path: Path) -> str:
    """UTF-16 by its first bytes, UTF-8 where all bytes are, Windows-1252 otherwise."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _bytes(path) as file:
        begin = file.read(_BYTES)
        if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        try:
            while begin:
                decoder.decode(begin)
                begin = file.read(_BYTES)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return "cp1252"
    return "utf-8-sig"


def evenly(parts: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """The same rows in pieces of one size, the last of them shorter.

    >>> [len(t) for t in evenly([torch.zeros(5, 1), torch.zeros(1, 1), torch.zeros(3, 1)], 4)]
    [4, 4, 1]
    """
    left: list[Tensor] = []
    for part in parts:
        left.append(part)
        if sum(map(len, left)) >= size:
            *whole, last = torch.cat(left).split(size)
            if len(last) == size:
                yield from (*whole, last)
                left = []
            else:
                yield from whole
                left = [last]
    if left:
        yield torch.cat(left)
