"""`load_dataset`: named data, files, DataFrames and tensors, split into three parts."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vardrop._core.checks import (
    LARGEST_WEIGHT,
    check_choice,
    check_integer,
    check_type,
    suggest,
)
from vardrop._core.errors import VardropError, import_optional
from vardrop.app.data.images import Images, ImageSet, idx_set, load_cifar10
from vardrop.app.data.inputs import KINDS, Table, Tensors, checksum, read_input
from vardrop.app.data.preprocessing import Roles, Task, check_cells, label, to_days, to_numbers
from vardrop.app.data.splits import PARTS, Dataset, Part, split_rows
from vardrop.app.data.tables import SUFFIXES, check_columns, fit_preprocessing, infer_task, is_table

if TYPE_CHECKING:
    import pandas

    from vardrop.app.data.inputs import Source

_TABLES = ("iris", "wine", "breast_cancer", "diabetes")
IMAGE_SETS: dict[str, ImageSet] = {
    "mnist": idx_set(
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        train=("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432"),
        test=("9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "fashion-mnist": idx_set(
        "fashion-mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        train=("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe"),
        test=("bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    "notmnist": idx_set(
        "notmnist",
        None,
        test=("2c87c839a4ef9b238846600eec8c35b7", "7ea9118cbafd0f6e3ee2ad771d782a01"),
    ),
    "cifar10": ImageSet(load_cifar10),
}
_TRAINABLE = tuple(name for name, images in IMAGE_SETS.items() if "train" in images.splits)
DATASETS = ("digits", *_TABLES, *_TRAINABLE)
OUT_OF_DISTRIBUTION = ("digits", *IMAGE_SETS, "photos")
_REGISTERED: dict[str, Callable[[], Source]] = {}
_MARKS = {"sep", "decimal", "thousands"}  # of the cells of a file
_COLUMNS = {f.name for f in dataclasses.fields(Roles)} - _MARKS - {"stratify", "task"}


def register_dataset(name: str, load: Callable[[], Source]) -> None:
    """Register custom data under a name, for `fit` and the command line.

    Args:
        name: a new name.
        load: returns the data: a DataFrame, a pair (X, y), or other data of `load_dataset`.

    >>> import vardrop as vd
    >>> vd.register_dataset("steps", lambda: ([[float(i)] for i in range(10)], [0, 1] * 5))
    >>> vd.load_dataset("steps").sizes
    {'train': 7, 'validation': 1, 'test': 2}
    """
    if not isinstance(name, str) or name in (*DATASETS, *_REGISTERED) or is_table(name):
        raise VardropError(f"Expected `name` to be a new name, but got {name!r}.")
    if not callable(load):
        raise VardropError(f"Expected `load` to be a function, but got {load!r}.")
    _REGISTERED[name] = load


def load_dataset(
    data: Source,
    target: str | None = None,
    task: Task | None = None,
    drop: Sequence[str] = (),
    directory: str | Path | None = None,
    seed: int = 0,
    validation: Source | None = None,
    test: Source | bool | None = None,
    **roles: Any,
) -> Dataset:
    """Load data for training, validation and test.

    By default a tenth is held out for validation. A fifth is held out for test, unless the data
    have a standard test set. Classes are stratified if they have enough examples.

    Args:
        data: one of these:

            - a name of `DATASETS` or of `register_dataset`, such as "digits"
            - a CSV or Parquet file
            - a DataFrame with its `target`
            - a pair (X, y) of arrays, tensors or DataFrames
            - a torch `Dataset` or `DataLoader`, which is read into memory. For data larger than
              memory see `vardrop.tuning.train`, which takes any iterable of batches.

        target: the target column of a table.
        task: "classification" or "regression", inferred from the target by default.
        drop: columns of a table to leave out.
        directory: directory of the image sets, see `data_directory`.
        seed: seed of the split.
        validation, test: custom data for these parts, of the same kind as `data`. With test=False
            no examples are held out for the test.
        roles: roles of other columns and the format of cells, see `Roles`.

    Returns:
        The three parts and their description.

    >>> load_dataset("digits").sizes
    {'train': 1258, 'validation': 180, 'test': 359}
    """
    check_integer("seed", seed, 0)
    check_type("drop", drop, list | tuple, "a list of names of columns")
    wanted = Roles(target, task, tuple(drop), **roles)
    name = str(data) if isinstance(data, str | Path) else None
    parts = {"train": data, "validation": validation, "test": None if test is False else test}
    if name in DATASETS:
        if validation is not None or parts["test"] is not None:
            raise VardropError(f"`validation` and `test` cannot be combined with the data {name}.")
        named_task: Task = "regression" if name == "diabetes" else "classification"
        _check_roles(wanted, _COLUMNS | _MARKS, f"the data {name}", named_task)
        if name in _TABLES:
            bunch = getattr(import_optional("sklearn.datasets"), f"load_{name}")(as_frame=True)
            if "target_names" in bunch:
                bunch.frame["target"] = [str(bunch.target_names[i]) for i in bunch.target]
            parts["train"], wanted = bunch.frame, dataclasses.replace(wanted, target="target")
        elif name == "digits":
            parts["train"] = digits()
        else:
            parts["train"] = load_images(name, "train", directory)
            if test is None:
                parts["test"] = load_images(name, "test", directory)
    elif name in _REGISTERED:
        parts["train"] = _REGISTERED[name]()
    elif name is not None and not is_table(name):
        names, endings = (*DATASETS, *_REGISTERED), ", ".join(SUFFIXES)
        problem = f"Expected data to be one of {', '.join(names)}, or a file that ends in {endings}"
        raise VardropError(f"{problem}, but got {name!r}.{suggest(name, names)}")
    for kind in {type(d) for d in parts.values() if not isinstance(d, str | Path | None)}:
        _check_roles(wanted, _MARKS, f"data of the type {kind.__name__}")
    return _join(parts, wanted, seed, name, "test" if test is False else None)


def _check_roles(roles: Roles, names: set[str], source: str, task: Task | None = None) -> None:
    """Raise an error if a role among `names` was passed, or another task than `task`."""
    usual = Roles()
    wrong = [name for name in sorted(names) if getattr(roles, name) != getattr(usual, name)]
    if task is not None and roles.task not in (None, task):
        wrong.append("task")
    if wrong:
        raise VardropError(f"`{wrong[0]}` cannot be combined with {source}. Leave it out.")


def _join(
    data: dict[str, Source | None], roles: Roles, seed: int, name: str | None, without: str | None
) -> Dataset:
    """Join the parts that were passed, and split the rest."""
    first = read_input(data["train"], roles)
    columns = first.rows.items() if isinstance(first, Table) else ()
    infer = import_optional("pandas").api.types.infer_dtype
    # Columns that are texts in the training file are texts in all other files.
    texts = [str(column) for column, cells in columns if infer(cells, skipna=True) == "string"]
    others = {part: d for part, d in data.items() if part != "train" and d is not None}
    rest = {part: read_input(d, roles, texts) for part, d in others.items()}
    if any(type(one) is not type(first) for one in rest.values()):
        raise VardropError(f"Expected `validation` and `test` of the kind of `data`: {KINDS}.")
    inputs, name = {"train": first, **rest}, name or first.name
    sums = "".join(one.checksum for one in inputs.values())
    total = f"sha256:{hashlib.sha256(sums.encode()).hexdigest()}" if rest else first.checksum
    parts = [part for part, one in inputs.items() for _ in range(len(one.rows))] if rest else None
    if isinstance(first, Table):
        frames: dict[str, pandas.DataFrame] = {part: one.rows for part, one in inputs.items()}
        for part, frame in frames.items():
            if absent := sorted(set(first.rows.columns) - set(frame.columns)):
                raise VardropError(f"Expected the {part} data to have the columns {absent}.")
        frame = import_optional("pandas").concat(list(frames.values()), ignore_index=True)
        return _split_table(Table(frame, name, total, first.target), roles, seed, parts, without)
    _check_roles(roles, _COLUMNS, "tensors of more than two axes", "classification")
    tensors = [one for one in inputs.values() if isinstance(one, Tensors)]
    x, y = torch.cat([one.rows for one in tensors]), torch.cat([one.y for one in tensors])
    rows = split_rows(len(y), seed, name, parts, y if roles.stratify else None, without=without)
    about = {"name": name, "checksum": total, "classes": tuple(map(str, range(int(y.max()) + 1)))}
    return _dataset(Part(x, y), rows, kind="image", task="classification", **about)


def _split_table(
    data: Table, roles: Roles, seed: int, parts: Sequence[str] | None, without: str | None
) -> Dataset:
    table, name, roles = data.rows, data.name, dataclasses.replace(roles, target=data.target)
    target = check_columns(table, roles, name)
    task, note = (roles.task, "") if roles.task else infer_task(table[target], name)
    if roles.split is not None:
        cells = table[roles.split].astype(object)
        texts = cells.where(cells.notna(), "train").astype(str).str.strip().str.lower()
        wanted = f"train, validation or test in column '{roles.split}' of {name}"
        check_cells(cells, ~texts.isin(PARTS), wanted)
        parts = texts.tolist()
    stratified = task == "classification" and roles.stratify
    encode = import_optional("pandas").factorize
    classes = torch.tensor(encode(table[target].map(label))[0]) if stratified else None
    groups = times = None
    if roles.group is not None:
        groups = torch.tensor(encode(table[roles.group], use_na_sentinel=False)[0])
    if roles.time is not None:
        column = table[roles.time]
        numeric = import_optional("pandas").api.types.is_numeric_dtype(column)
        times = to_numbers(column, name) if numeric else to_days(column, roles.date_format, name)
        if bool(times.isnan().any()):
            raise VardropError(f"Expected a time in every row of column '{roles.time}' of {name}.")
    rows = split_rows(len(table), seed, name, parts, classes, groups, times, without)
    learned = fit_preprocessing(table, rows["train"].tolist(), roles, task, name, note)
    inputs, targets = learned.inputs(table, name), learned.targets(table[target], name)
    weight = None if roles.weight is None else row_weights(table[roles.weight], name)
    together = groups if times is None else times.unique(return_inverse=True)[1]
    about = {"name": name, "checksum": data.checksum, "classes": learned.classes}
    everything = Part(inputs, targets, weight, together)
    return _dataset(everything, rows, kind="table", task=task, preprocessing=learned, **about)


def _dataset(everything: Part, rows: dict[str, Tensor], **about: Any) -> Dataset:
    parts: dict[str, Any] = {part: everything.take(rows[part]) for part in PARTS}
    about["sizes"] = {part: len(rows[part]) for part in PARTS}
    about["rows"] = {part: checksum(rows[part]) for part in PARTS}
    return Dataset(shape=tuple(everything.x.shape[1:]), **parts, **about)


def row_weights(column: pandas.Series, source: str) -> Tensor:
    """The weight of each row, (N,)."""
    weights = to_numbers(column, source).float()
    fits = bool(((weights >= 0) & (weights <= LARGEST_WEIGHT)).all())
    if not fits or float(weights.max()) < 1 / LARGEST_WEIGHT:
        name = f"column '{column.name}' of {source}"
        raise VardropError(f"Expected weights from 0 to 1e9 in every row of {name}, not all 0.")
    return weights


def digits() -> Images:
    """scikit-learn's 1797 digits of 8 x 8, pixels in [0, 1]."""
    bunch = import_optional("sklearn.datasets").load_digits()
    x = torch.tensor(bunch.images / 16, dtype=torch.float32).unsqueeze(1)
    return Images(x, torch.tensor(bunch.target))


def load_images(name: str, split: str = "train", directory: str | Path | None = None) -> Images:
    """Read one split of an image set.

    Args:
        name: one of `IMAGE_SETS`, such as "mnist".
        split: "train" or "test".
        directory: see `data_directory`. Missing files are downloaded into a cache.
    """
    if name not in IMAGE_SETS or split not in IMAGE_SETS[name].splits:
        names = ", ".join(f"{n}/{s}" for n, images in IMAGE_SETS.items() for s in images.splits)
        raise VardropError(f"Expected an image set among {names}, but got {name}/{split}.")
    return IMAGE_SETS[name].read(split, directory)


def load_out_of_distribution(
    name: str, shape: tuple[int, ...], directory: str | Path | None = None
) -> Tensor:
    """Test images of another set, resized to the inputs (channels, height, width) of a model.

    Args:
        name: an image set, or "photos": patches of scikit-learn's two photographs.
        shape: the shape of one input.
        directory: of the image sets.
    """
    if len(shape) != 3:
        raise VardropError(f"Expected a model on images to compare with {name!r}, not {shape}.")
    check_choice("name", name, OUT_OF_DISTRIBUTION)
    if name == "photos":
        bunch = import_optional("sklearn.datasets").load_sample_images()
        x = torch.stack([torch.tensor(p) for p in bunch.images]).permute(0, 3, 1, 2).float() / 255
        patches = x.unfold(2, 32, 32).unfold(3, 32, 32).permute(0, 2, 3, 1, 4, 5)
        x = patches.reshape(-1, 3, 32, 32)
    else:
        x = digits().x if name == "digits" else load_images(name, "test", directory).x
    grey = x.mean(1, keepdim=True) if shape[0] == 1 else x
    sized = torch.nn.functional.interpolate(grey, shape[1:], mode="bilinear", antialias=True)
    return sized.expand(-1, shape[0], -1, -1).contiguous()
