"""What people hold, as one table or as tensors: files, DataFrames, arrays, data sets, loaders."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vardrop._core.errors import VardropError, needed
from vardrop.app.data.splits import checksum
from vardrop.app.data.tables import read_table

if TYPE_CHECKING:
    import pandas

TARGET = "target"  # the name of a target that has none
LARGEST = 4_000_000_000  # bytes of a file or of the inputs of a loader that are read into memory
KINDS = (
    "a name, a file, a DataFrame with `target`, a pair (X, y) of arrays, tensors or DataFrames, "
    "a torch Dataset or a DataLoader"
)


class Table(NamedTuple):
    """Rows with named columns, one of them the target where that is known."""

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


def given(data: Any, target: str | None) -> Table | Tensors:
    """What `data` holds.

    >>> given(([[1.0, 2.0], [3.0, 4.0]], [0, 1]), None).frame.columns.tolist()
    ['x0', 'x1', 'target']
    """
    if isinstance(data, str | Path):
        path = Path(data)
        _check_size(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        return Table(read_table(path), str(path), target, f"sha256:{digest}")
    if (frame := _frame(data)) is not None:
        return Table(frame, "the DataFrame", target, _hash(frame))
    if isinstance(data, torch.utils.data.DataLoader | torch.utils.data.Dataset):
        data = _collected(data)
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise VardropError(f"Expected `data` to be {KINDS}, but got {type(data).__name__}.")
    x, y = data
    if isinstance(x, Tensor) and x.dim() > 2:
        return _tensors(x, y)
    return _pair(x, y, target)


def _check_size(path: Path) -> None:
    size = path.stat().st_size if path.is_file() else 0
    if size > LARGEST:
        raise VardropError(
            f"Expected a file of at most {LARGEST / 1e9:g} GB to read into memory, but {path} has "
            f"{size / 1e9:.3g}. Pass vardrop.Stream({str(path)!r}), or --stream, to read it piece "
            "by piece."
        )


def frame_of(x: Any, names: Sequence[str]) -> pandas.DataFrame:
    """Rows to predict, as a table: a DataFrame as it is, an array with these names of columns."""
    found = _frame(x)
    if found is not None:
        return found
    values = needed("numpy").asarray(x)
    if values.ndim != 2 or values.shape[1] != len(names):
        raise VardropError(
            f"Expected an array with the {len(names)} columns of the training data, but got one of "
            f"shape {values.shape}. Pass a DataFrame with their names."
        )
    return needed("pandas").DataFrame(values, columns=list(names))


def _frame(data: Any) -> pandas.DataFrame | None:
    """A DataFrame of pandas, or of a library that gives one, with names that are texts."""
    pandas = needed("pandas")
    if type(data).__module__.startswith("polars") and hasattr(data, "columns"):
        data = pandas.DataFrame({name: data[name].to_list() for name in data.columns})
    if not isinstance(data, pandas.DataFrame):
        return None
    if len(data) == 0:
        raise VardropError("Expected `data` to have rows, but got an empty DataFrame.")
    names = [str(name) for name in data.columns]
    if len(set(names)) < len(names):
        raise VardropError(f"Expected columns with names of their own, but got {names}.")
    return data.set_axis(names, axis=1).reset_index(drop=True)


def _pair(x: Any, y: Any, target: str | None) -> Table:
    pandas, numpy = needed("pandas"), needed("numpy")
    frame = _frame(x)
    if frame is None:
        values = numpy.asarray(x.detach().cpu() if isinstance(x, Tensor) else x)
        if values.ndim != 2:
            raise VardropError(
                f"Expected `X` to have a row per example and a column per input, but got an array "
                f"of shape {values.shape}."
            )
        frame = pandas.DataFrame(values, columns=[f"x{i}" for i in range(values.shape[1])])
    found = numpy.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
    if found.shape not in ((len(frame),), (len(frame), 1)):
        raise VardropError(
            f"Expected `y` to have one value for each of {len(frame)} rows, but got an array of "
            f"shape {found.shape}."
        )
    name = target or str(getattr(y, "name", None) or TARGET)
    while name in frame.columns:
        name += "_"
    frame = frame.assign(**{name: found.reshape(-1)})
    return Table(frame, "the arrays", name, _hash(frame))


def _tensors(x: Tensor, y: Any) -> Tensors:
    classes = torch.as_tensor(y)
    if classes.is_floating_point() or classes.shape != x.shape[:1]:
        raise VardropError(
            f"Expected `y` to hold one class number for each of {len(x)} inputs of shape "
            f"{tuple(x.shape[1:])}, but got {classes.dtype} of shape {tuple(classes.shape)}. "
            "For other targets train with vardrop.ELBO."
        )
    return Tensors(x.detach().float(), classes.long(), "the tensors")


def _collected(data: Any) -> tuple[Tensor, Tensor]:
    """All examples of a data set, or all batches of a loader, as two tensors."""
    batched = isinstance(data, torch.utils.data.DataLoader)
    streams = batched or isinstance(data, torch.utils.data.IterableDataset)
    items = data if streams else (data[i] for i in range(len(data)))
    inputs, targets, total = [], [], 0
    for item in items:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise VardropError(
                f"Expected examples (input, target) from {type(data).__name__}, but got "
                f"{type(item).__name__}."
            )
        x, y = (torch.as_tensor(part) for part in item)
        total += x.nbytes
        if total > LARGEST:
            raise VardropError(
                f"Expected at most {LARGEST / 1e9:g} GB of inputs from {type(data).__name__} to "
                "read into memory, but got more. Write them into files for vardrop.Stream, or "
                "train on the loader with `vardrop.app.runs.Loop`."
            )
        inputs.append(x if batched else x.unsqueeze(0))
        targets.append(y if batched else y.unsqueeze(0))
    if not inputs:
        raise VardropError(f"Expected {type(data).__name__} to have examples, but got none.")
    return torch.cat(inputs), torch.cat(targets)


def _hash(frame: pandas.DataFrame) -> str:
    """SHA-256 of the names, types and values of a table."""
    hashed = needed("pandas").util.hash_pandas_object(frame.astype(_plain(frame)), index=False)
    described = ",".join(f"{name}:{kind}" for name, kind in frame.dtypes.items())
    digest = hashlib.sha256(described.encode() + hashed.to_numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def _plain(frame: pandas.DataFrame) -> dict[str, Any]:
    """Columns of mixed objects are hashed as texts."""
    return {str(name): str for name, kind in frame.dtypes.items() if kind.kind == "O"}
