"""Data as users hold them, as one table or as tensors: files, DataFrames, arrays, loaders."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from vardrop._core.errors import VardropError, needed
from vardrop.app.data.splits import Roles, checksum
from vardrop.app.data.tables import read_table

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

    frame: pandas.DataFrame
    name: str
    target: str | None
    checksum: str


class Tensors(NamedTuple):
    """Inputs with more than two axes, such as images, and a class each."""

    x: Tensor
    y: Tensor
    name: str

    @property
    def checksum(self) -> str:
        """SHA-256 of both."""
        return checksum(self.x, self.y)


def read_input(data: Any, roles: Roles, texts: Collection[str] = ()) -> Table | Tensors:
    """Read data into memory.

    Args:
        data: anything among `KINDS` but a name.
        roles: with the target, and how the cells of a file are read.
        texts: columns of a file to read as texts, see `read_table`.

    >>> read_input(([[1.0, 2.0], [3.0, 4.0]], [0, 1]), Roles()).frame.columns.tolist()
    ['x0', 'x1', 'target']
    """
    if isinstance(data, str | Path):
        frame = read_table(data, roles, texts)
        with open(data, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Table(frame, str(data), roles.target, f"sha256:{digest}")
    if (table := to_frame(data)) is not None:
        return Table(table, "the DataFrame", roles.target, _hash(table))
    if isinstance(data, DataLoader | torch.utils.data.Dataset):
        data = _collect(data)
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise VardropError(f"Expected `data` to be {KINDS}, but got {type(data).__name__}.")
    x, y = data
    if isinstance(x, Tensor) and x.dim() > 2:
        return _read_tensors(x, y)
    return _read_pair(x, y, roles.target)


def frame_of(x: Any, names: Sequence[str]) -> pandas.DataFrame:
    """Rows to predict, as a table: a DataFrame unchanged, an array with these names of columns."""
    frame = to_frame(x)
    if frame is not None:
        return frame
    values = _to_numpy(x)
    if values.ndim != 2 or values.shape[1] != len(names):
        raise VardropError(
            f"Expected an array with the {len(names)} columns of the training data, but got one of "
            f"shape {values.shape}. Pass a DataFrame with their names."
        )
    return needed("pandas").DataFrame(values, columns=list(names))


def to_frame(data: Any) -> pandas.DataFrame | None:
    """A DataFrame of pandas or polars as one of pandas, with texts as names; None for others."""
    pandas = needed("pandas")
    if type(data).__module__.startswith("polars") and hasattr(data, "columns"):
        data = pandas.DataFrame({name: data[name].to_list() for name in data.columns})
    if not isinstance(data, pandas.DataFrame):
        return None
    if len(data) == 0:
        raise VardropError("Expected `data` to have rows, but got an empty DataFrame.")
    names = [str(name) for name in data.columns]
    if len(set(names)) < len(names):
        raise VardropError(f"Expected columns with different names, but got {names}.")
    return data.set_axis(names, axis=1).reset_index(drop=True)


def _to_numpy(values: Any) -> Any:
    return needed("numpy").asarray(values.detach().cpu() if isinstance(values, Tensor) else values)


def _read_pair(x: Any, y: Any, target: str | None) -> Table:
    frame, values = to_frame(x), _to_numpy(y)
    if frame is None:
        inputs = _to_numpy(x)
        if inputs.ndim != 2:
            raise VardropError(
                f"Expected `X` to have a row per example and a column per input, but got an array "
                f"of shape {inputs.shape}."
            )
        frame = frame_of(inputs, [f"x{i}" for i in range(inputs.shape[1])])
    if values.shape not in ((len(frame),), (len(frame), 1)):
        raise VardropError(
            f"Expected `y` to have one value for each of {len(frame)} rows, but got an array of "
            f"shape {values.shape}."
        )
    name = target or str(getattr(y, "name", None) or TARGET)
    while name in frame.columns:
        name += "_"
    frame = frame.assign(**{name: values.reshape(-1)})
    return Table(frame, "the arrays", name, _hash(frame))


def _read_tensors(x: Tensor, y: Any) -> Tensors:
    classes = torch.as_tensor(y)
    if classes.is_floating_point() or classes.shape != x.shape[:1]:
        raise VardropError(
            f"Expected `y` to hold one class number for each of {len(x)} inputs of shape "
            f"{tuple(x.shape[1:])}, but got {classes.dtype} of shape {tuple(classes.shape)}. "
            "For other targets train with vardrop.ELBO."
        )
    return Tensors(x.detach().float(), classes.long(), "the tensors")


def _collect(data: Any) -> tuple[Tensor, Tensor]:
    """All examples of a dataset, or all batches of a loader, as two tensors."""
    batched, kind = isinstance(data, DataLoader), type(data).__name__
    iterable = batched or isinstance(data, IterableDataset)
    inputs, targets, total = [], [], 0
    for item in data if iterable else (data[i] for i in range(len(data))):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise VardropError(
                f"Expected examples (input, target) from {kind}, but got {type(item).__name__}."
            )
        x, y = (torch.as_tensor(part) for part in item)
        total += x.nbytes
        if total > LARGEST:
            raise VardropError(
                f"Expected at most {LARGEST / 1e9:g} GB of inputs from {kind} to read into memory, "
                "but got more. Train on its batches with `vardrop.tuning.train`."
            )
        inputs.append(x if batched else x.unsqueeze(0))
        targets.append(y if batched else y.unsqueeze(0))
    if not inputs:
        raise VardropError(f"Expected {kind} to have examples, but got none.")
    return torch.cat(inputs), torch.cat(targets)


def _hash(frame: pandas.DataFrame) -> str:
    """SHA-256 of the names, types and values of a table; mixed objects are hashed as texts."""
    mixed = {str(name): str for name, kind in frame.dtypes.items() if kind.kind == "O"}
    hashed = needed("pandas").util.hash_pandas_object(frame.astype(mixed), index=False)
    described = ",".join(f"{name}:{kind}" for name, kind in frame.dtypes.items())
    digest = hashlib.sha256(described.encode() + hashed.to_numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"
