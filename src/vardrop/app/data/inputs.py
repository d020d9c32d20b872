"""Read files, DataFrames, arrays and loaders as one table or as tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset as TorchDataset

from vardrop._core.errors import VardropError, import_optional
from vardrop.app.data.preprocessing import Roles
from vardrop.app.data.tables import check_frame, read_table

if TYPE_CHECKING:
    import pandas
    from numpy.typing import ArrayLike, NDArray

    Array: TypeAlias = ArrayLike | Tensor | pandas.DataFrame
    Examples: TypeAlias = TorchDataset[Any] | DataLoader[Any]
    Source: TypeAlias = str | Path | Array | tuple[Array, Array] | Examples

TARGET = "target"  # the default name of the target
LARGEST = 4_000_000_000  # bytes of the inputs of a loader that are read into memory
KINDS = (
    "a name, a file, a DataFrame with `target`, a pair (X, y) of arrays, tensors or DataFrames, "
    "a torch Dataset or a DataLoader"
)


class Table(NamedTuple):
    """Rows with named columns, and the name of the target column or None."""

    rows: pandas.DataFrame
    name: str
    checksum: str
    target: str | None


class Tensors(NamedTuple):
    """Inputs with more than two axes, such as images, and their classes."""

    rows: Tensor
    name: str
    checksum: str
    y: Tensor


def read_input(data: Source, roles: Roles, texts: Collection[str] = ()) -> Table | Tensors:
    """Read data into memory.

    Args:
        data: any of `KINDS` except a name.
        roles: the target, and the format of the cells of a file.
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
    if isinstance(data, DataLoader | TorchDataset):
        data = _collect(data)
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise VardropError(f"Expected `data` to be {KINDS}, but got {type(data).__name__}.")
    x, y = data
    if isinstance(x, str | Path) or isinstance(y, str | Path):
        text = "Expected `data` to be one file or a pair (X, y), but got a pair of names."
        remedy = "Pass files of other parts as `validation` and `test`, or join them first."
        raise VardropError(f"{text} {remedy}")
    if getattr(x, "ndim", 2) <= 2:
        frame, targets = frame_of(x), _to_numpy(y)
        count, shape = len(frame), targets.shape
        if shape not in ((count,), (count, 1)):
            text = f"Expected `y` to have one value for each of {count} rows"
            raise VardropError(f"{text}, not {shape}.")
        name = free_name(roles.target or str(getattr(y, "name", None) or TARGET), frame.columns)
        frame = frame.assign(**{name: targets.reshape(-1)})
        return Table(frame, "the arrays", _hash(frame), name)
    inputs, classes = torch.as_tensor(x).detach().float(), torch.as_tensor(y)
    if classes.is_floating_point() or classes.shape != inputs.shape[:1]:
        wrong = f"{classes.dtype} of shape {tuple(classes.shape)}. Train with vardrop.ELBO instead."
        raise VardropError(f"Expected `y` to hold a class for each input, but got {wrong}")
    return Tensors(inputs, "the tensors", checksum(inputs, classes.long()), classes.long())


def frame_of(x: Array, names: Sequence[str] | None = None) -> pandas.DataFrame:
    """A table of examples: a DataFrame unchanged, or an array with these column names.

    Args:
        x: a DataFrame, or an array with one column per name.
        names: the columns of the training data; x0, x1, ... by default.
    """
    if (frame := to_frame(x)) is not None:
        return frame
    array = _to_numpy(x)
    if array.ndim != 2 or (names is not None and array.shape[1] != len(names)):
        columns = f"{len(names or ())} columns, as in the training data"
        wanted = "`X` to be a table" if names is None else columns
        remedy = "Pass a DataFrame with names of columns."
        raise VardropError(f"Expected {wanted}, but got the shape {array.shape}. {remedy}")
    table = import_optional("pandas").DataFrame(array, columns=names)
    return table if names is not None else table.add_prefix("x")


def free_name(name: str, taken: Iterable[str]) -> str:
    """A name with as many underscores after it as distinguish it from the others."""
    others = set(taken)
    while name in others:
        name += "_"
    return name


def to_frame(data: Source) -> pandas.DataFrame | None:
    """A DataFrame of pandas or polars as one of pandas; None for other data."""
    frame: pandas.DataFrame = data
    make_frame = import_optional("pandas").DataFrame
    if type(data).__module__.startswith("polars") and hasattr(data, "columns"):
        frame = make_frame({name: frame[name].to_list() for name in frame.columns})
    return check_frame(frame, "the DataFrame") if isinstance(frame, make_frame) else None


def _to_numpy(array: Array) -> NDArray[Any]:
    return import_optional("numpy").asarray(
        array.detach().cpu() if isinstance(array, Tensor) else array
    )


def _collect(data: Examples) -> tuple[Tensor, ...]:
    """All examples of a dataset or a loader as two tensors."""
    loader = data if isinstance(data, DataLoader) else DataLoader(data, 1000)
    batches, total, name = [], 0, type(data).__name__
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise VardropError(f"Expected examples (input, target) from {name}.")
        batches.append(batch)
        total += batch[0].nbytes
        if total > LARGEST:
            text = f"{name} has more than {LARGEST / 1e9:g} GB of inputs, too many for the memory."
            raise VardropError(f"{text} Train on its batches with `vardrop.tuning.train`.")
    if not batches:
        raise VardropError(f"Expected {name} to have examples, but got none.")
    return tuple(map(torch.cat, zip(*batches, strict=True)))


def _hash(frame: pandas.DataFrame) -> str:
    """SHA-256 of the names, types and cells of a table. Mixed objects are hashed as texts."""
    mixed = {str(name): str for name, kind in frame.dtypes.items() if kind.kind == "O"}
    hashed = import_optional("pandas").util.hash_pandas_object(frame.astype(mixed), index=False)
    described = ",".join(f"{name}:{kind}" for name, kind in frame.dtypes.items())
    digest = hashlib.sha256(described.encode() + hashed.to_numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def checksum(*tensors: Tensor) -> str:
    """SHA-256 of tensors: their types, shapes and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"
