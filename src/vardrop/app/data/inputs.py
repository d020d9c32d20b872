"""Data as users hold them, as one table or as tensors: files, DataFrames, arrays, loaders."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vardrop._core.errors import VardropError, import_optional
from vardrop.app.data.splits import Roles, checksum
from vardrop.app.data.tables import check_frame, read_table

if TYPE_CHECKING:
    import pandas

TARGET = "target"  # the name of a target that has none
LARGEST = 4_000_000_000  # bytes of the inputs of a loader that are read into memory
KINDS = (
    "a name, a file, a DataFrame with `target`, a pair (X, y) of arrays, tensors or DataFrames, "
    "a torch Dataset or a DataLoader"
)


class Table(NamedTuple):
    """Rows with named columns, one of them the target if that is known."""

    rows: pandas.DataFrame
    name: str
    checksum: str
    target: str | None


class Tensors(NamedTuple):
    """Inputs with more than two axes, such as images, and a class each."""

    rows: Tensor
    name: str
    checksum: str
    y: Tensor


def read_input(data: Any, roles: Roles, texts: Collection[str] = ()) -> Table | Tensors:
    """Read data into memory.

    Args:
        data: anything among `KINDS` but a name.
        roles: with the target, and how the cells of a file are read.
        texts: columns of a file to read as texts, see `read_table`.

    >>> read_input(([[1.0, 2.0], [3.0, 4.0]], [0, 1]), Roles()).rows.columns.tolist()
    ['x0', 'x1', 'target']
    """
    if isinstance(data, str | Path):
        frame = read_table(data, roles, texts)
        with open(data, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Table(frame, str(data), f"sha256:{digest}", roles.target)
    if (table := to_frame(data)) is not None:
        return Table(table, "the DataFrame", _hash(table), roles.target)
    if isinstance(data, DataLoader | torch.utils.data.Dataset):
        data = _collect(data)
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise VardropError(f"Expected `data` to be {KINDS}, but got {type(data).__name__}.")
    x, y = data
    return _read_tensors(x, y) if getattr(x, "ndim", 2) > 2 else _read_pair(x, y, roles.target)


def frame_of(x: Any, names: Sequence[str]) -> pandas.DataFrame:
    """Rows to predict, as a table: a DataFrame unchanged, an array with these names of columns."""
    frame = to_frame(x)
    if frame is not None:
        return frame
    values = _to_numpy(x)
    if values.ndim != 2 or values.shape[1] != len(names):
        shape = f"the shape {values.shape}. Pass a DataFrame with their names."
        raise VardropError(f"Expected {len(names)} columns, as in the training data, not {shape}")
    return import_optional("pandas").DataFrame(values, columns=list(names))


def to_frame(data: Any) -> pandas.DataFrame | None:
    """A DataFrame of pandas or polars as one of pandas, with texts as names; None for others."""
    pandas = import_optional("pandas")
    if type(data).__module__.startswith("polars") and hasattr(data, "columns"):
        data = pandas.DataFrame({name: data[name].to_list() for name in data.columns})
    if not isinstance(data, pandas.DataFrame):
        return None
    return check_frame(data, "the DataFrame")


def _to_numpy(values: Any) -> Any:
    return import_optional("numpy").asarray(
        values.detach().cpu() if isinstance(values, Tensor) else values
    )


def _read_pair(x: Any, y: Any, target: str | None) -> Table:
    frame, values = to_frame(x), _to_numpy(y)
    if frame is None:
        inputs = _to_numpy(x)
        if inputs.ndim != 2:
            raise VardropError(f"Expected `X` to be a table, but got the shape {inputs.shape}.")
        frame = frame_of(inputs, [f"x{i}" for i in range(inputs.shape[1])])
    if values.shape not in ((len(frame),), (len(frame), 1)):
        rows, shape = len(frame), values.shape
        raise VardropError(f"Expected `y` to have one value for each of {rows} rows, not {shape}.")
    name = target or str(getattr(y, "name", None) or TARGET)
    while name in frame.columns:
        name += "_"
    frame = frame.assign(**{name: values.reshape(-1)})
    return Table(frame, "the arrays", _hash(frame), name)


def _read_tensors(x: Any, y: Any) -> Tensors:
    inputs, classes = torch.as_tensor(x).detach().float(), torch.as_tensor(y)
    if classes.is_floating_point() or classes.shape != inputs.shape[:1]:
        raise VardropError(
            f"Expected `y` to hold one class number for each of {len(inputs)} inputs, but got "
            f"{classes.dtype} of shape {tuple(classes.shape)}. Train with vardrop.ELBO instead."
        )
    return Tensors(inputs, "the tensors", checksum(inputs, classes.long()), classes.long())


def _collect(data: Any) -> tuple[Tensor, ...]:
    """All examples of a dataset or a loader as two tensors."""
    loader, kind = data if isinstance(data, DataLoader) else DataLoader(data, 1000), type(data)
    batches, total = [], 0
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise VardropError(f"Expected examples (input, target) from {kind.__name__}.")
        batches.append(batch)
        total += batch[0].nbytes
        if total > LARGEST:
            raise VardropError(
                f"{kind.__name__} has more than {LARGEST / 1e9:g} GB of inputs, too many to read "
                "into memory. Train on its batches with `vardrop.tuning.train`."
            )
    if not batches:
        raise VardropError(f"Expected {kind.__name__} to have examples, but got none.")
    return tuple(map(torch.cat, zip(*batches, strict=True)))


def _hash(frame: pandas.DataFrame) -> str:
    """SHA-256 of the names, types and values of a table; mixed objects are hashed as texts."""
    mixed = {str(name): str for name, kind in frame.dtypes.items() if kind.kind == "O"}
    hashed = import_optional("pandas").util.hash_pandas_object(frame.astype(mixed), index=False)
    described = ",".join(f"{name}:{kind}" for name, kind in frame.dtypes.items())
    digest = hashlib.sha256(described.encode() + hashed.to_numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"
