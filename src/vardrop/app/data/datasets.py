"""`load_dataset`: data by name, files, DataFrames and tensors, in three parts."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vardrop._core.checks import nearest
from vardrop._core.errors import VardropError, needed
from vardrop.app.data.cifar import load_cifar10
from vardrop.app.data.images import Images, ImageSet, idx_set
from vardrop.app.data.inputs import KINDS, Table, Tensors, read_input
from vardrop.app.data.preprocessing import Task, label, to_days, to_numbers
from vardrop.app.data.splits import (
    PARTS,
    Dataset,
    Part,
    Roles,
    checksum,
    parts_named,
    split_rows,
)
from vardrop.app.data.tables import (
    SUFFIXES,
    check_target,
    infer_task,
    is_table,
    learn_preprocessing,
)

if TYPE_CHECKING:
    import pandas

_TABLES: dict[str, Task] = {
    "iris": "classification",
    "wine": "classification",
    "breast_cancer": "classification",
    "diabetes": "regression",
}
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
_TRAINABLE = tuple(name for name, known in IMAGE_SETS.items() if "train" in known.splits)
DATASETS = ("digits", *_TABLES, *_TRAINABLE)
OUT_OF_DISTRIBUTION = ("digits", *IMAGE_SETS, "photos")
_REGISTERED: dict[str, Callable[[], Any]] = {}


def register_dataset(name: str, load: Callable[[], Any]) -> None:
    """Register custom data under a name, for `fit` and the command line.

    Args:
        name: how it is asked for; no name that is taken.
        load: gives the data: a DataFrame, a pair (X, y), or whatever else `load_dataset` takes.

    >>> import vardrop as vd
    >>> vd.register_dataset("steps", lambda: ([[float(i)] for i in range(10)], [0, 1] * 5))
    >>> vd.load_dataset("steps").sizes()
    {'train': 7, 'validation': 1, 'test': 2}
    """
    if not isinstance(name, str) or name in dataset_names() or is_table(name):
        raise VardropError(f"Expected `name` to be a text that is not taken, but got {name!r}.")
    if not callable(load):
        raise VardropError(f"Expected `load` to be a function that gives data, but got {load!r}.")
    _REGISTERED[name] = load


def dataset_names() -> tuple[str, ...]:
    """The names that `load_dataset` knows, those of `register_dataset` too."""
    return (*DATASETS, *_REGISTERED)


def load_dataset(
    data: Any,
    target: str | None = None,
    task: Task | None = None,
    drop: Sequence[str] = (),
    directory: str | Path | None = None,
    seed: int = 0,
    validation: Any = None,
    test: Any = None,
    **roles: Any,
) -> Dataset:
    """Load data for training, validation and test.

    A tenth is held out for validation and a fifth for test, if they are not given and the data have
    no usual test set. Classes are stratified as far as their rows allow.

    Args:
        data: a name of `DATASETS` or of `register_dataset`, such as "digits"; a CSV or Parquet
            file; a DataFrame with its `target`; a pair (X, y) of arrays, tensors or DataFrames; a
            torch `Dataset` or `DataLoader`, which is read into memory. For data larger than memory
            see `vardrop.tuning.train`, which takes any iterable of batches.
        target: the target column of a table.
        task: "classification" or "regression"; inferred from the target if None.
        drop: columns of a table to leave out.
        directory: of the image sets; see `data_directory`.
        seed: of the split.
        validation, test: custom data for these parts, of the same kind as `data`; with test=False
            no rows are held out for the test.
        roles: what other columns are for, and how the cells of a file are read; see `Roles`.

    >>> load_dataset("digits").sizes()
    {'train': 1258, 'validation': 180, 'test': 359}
    """
    if unknown := sorted(set(roles) - {field.name for field in dataclasses.fields(Roles)}):
        known = sorted({f.name for f in dataclasses.fields(Roles)} - {"target", "task", "drop"})
        raise VardropError(
            f"Expected roles among {', '.join(known)}, but got {unknown}."
            f"{nearest(unknown[0], known)}"
        )
    wanted = Roles(target, task, tuple(drop), **roles)
    without = "test" if test is False else None
    own = {"validation": validation, "test": None if without else test}
    if data is None:
        raise VardropError(f"Expected `data` to be {KINDS}, but got None.")
    name = str(data) if isinstance(data, str | Path) else None
    if name in DATASETS:
        _check_named(name, wanted, own)
        return _load_named(name, directory, wanted, seed, without)
    if name in _REGISTERED:
        data = _REGISTERED[name]()
    elif name is not None and not is_table(name):
        raise VardropError(
            f"Expected data to be one of {', '.join(dataset_names())}, or a file that "
            f"ends in {', '.join(SUFFIXES)}, but got {name!r}.{nearest(name, dataset_names())}"
        )
    return _join({"train": data, **own}, wanted, seed, name, without)


def _check_named(name: str, roles: Roles, own: dict[str, Any]) -> None:
    """Raise for options that a data set of a known name does not have."""
    task = _TABLES.get(name, "classification")
    usual = Roles(task=roles.task if roles.task == task else None, stratify=roles.stratify)
    asked = dataclasses.asdict(roles).items() - dataclasses.asdict(usual).items()
    asked |= {(k, type(v).__name__) for k, v in own.items() if v is not None}
    if asked:
        wrong = ", ".join(f"{k}={v!r}" for k, v in sorted(asked, key=str))
        raise VardropError(
            f"Expected no `target`, `drop`, other parts or other task for the data {name}, whose "
            f"target is known and whose task is {task}, but got {wrong}. They are for tables."
        )


def _load_named(
    name: str, directory: str | Path | None, roles: Roles, seed: int, without: str | None
) -> Dataset:
    if name in _TABLES:
        roles = Roles("target", _TABLES[name], stratify=roles.stratify)
        return _split_table(_embedded(name), roles, seed, None, without)
    if name == "digits":
        x, y = digits()
        return _split_tensors(Tensors(x, y, name), checksum(x, y), roles, seed, None, without)
    train, test = (load_images(name, split, directory) for split in ("train", "test"))
    x, y = (torch.cat(pair) for pair in zip(train, test, strict=True))
    parts = _parts({"train": len(train.y), "test": len(test.y)})
    total = checksum(*train, *test)
    return _split_tensors(Tensors(x, y, name), total, roles, seed, parts, without)


def _join(
    data: dict[str, Any], roles: Roles, seed: int, name: str | None, without: str | None
) -> Dataset:
    """All rows at once, with the part of those that were given for one."""
    _check_reading(data.values(), roles)
    found = {"train": read_input(data["train"], roles)}
    texts = _text_columns(found["train"])
    for part in ("validation", "test"):
        if data[part] is not None:
            found[part] = read_input(data[part], roles, texts)
    tables = {part: one for part, one in found.items() if isinstance(one, Table)}
    tensors = {part: one for part, one in found.items() if isinstance(one, Tensors)}
    if tables and tensors:
        raise VardropError(f"Expected `validation` and `test` of the kind of `data`: {KINDS}.")
    sums = [one.checksum for one in found.values()]
    total = f"sha256:{hashlib.sha256(''.join(sums).encode()).hexdigest()}"
    total = total if len(sums) > 1 else sums[0]
    if tensors:
        _check_tensors(roles)
        parts = _parts({part: len(one.y) for part, one in tensors.items()})
        x = torch.cat([one.x for one in tensors.values()])
        y = torch.cat([one.y for one in tensors.values()])
        joined = Tensors(x, y, name or tensors["train"].name)
        return _split_tensors(joined, total, roles, seed, parts, without)
    frames, train = {part: one.frame for part, one in tables.items()}, tables["train"]
    _check_columns(frames, train.name)
    parts = _parts({part: len(frame) for part, frame in frames.items()})
    frame = needed("pandas").concat(list(frames.values()), ignore_index=True)
    table = Table(frame, name or train.name, train.target, total)
    return _split_table(
        table, dataclasses.replace(roles, target=train.target), seed, parts, without
    )


def _text_columns(data: Table | Tensors) -> list[str]:
    """The columns that are texts in the training file, and so in all other files."""
    columns = data.frame.items() if isinstance(data, Table) else ()
    infer = needed("pandas").api.types.infer_dtype
    return [str(name) for name, values in columns if infer(values, skipna=True) == "string"]


def _parts(sizes: dict[str, int]) -> list[str] | None:
    """The part of every row; None if all are to be split."""
    if len(sizes) == 1:
        return None
    return [part for part, size in sizes.items() for _ in range(size)]


def _check_reading(data: Iterable[Any], roles: Roles) -> None:
    in_memory = [type(d).__name__ for d in data if d is not None and not isinstance(d, str | Path)]
    if in_memory and (roles.sep, roles.decimal, roles.thousands) != (None, ".", None):
        raise VardropError(
            f"`sep`, `decimal` and `thousands` are for files, but got a {in_memory[0]}. Convert "
            "its columns to numbers."
        )


def _check_tensors(roles: Roles) -> None:
    others = dataclasses.replace(roles, stratify=True, task=None)
    if others != Roles() or roles.task == "regression":
        raise VardropError(f"Expected classes and no columns for tensors, but got {roles}.")


def _check_columns(frames: dict[str, pandas.DataFrame], name: str) -> None:
    for part, frame in frames.items():
        if absent := sorted(set(frames["train"].columns) - set(frame.columns)):
            raise VardropError(
                f"Expected the {part} data to have the columns of {name}, but got none named "
                f"{', '.join(map(repr, absent))}."
            )


def _split_tensors(
    data: Tensors,
    total: str,
    roles: Roles,
    seed: int,
    parts: list[str] | None,
    without: str | None,
) -> Dataset:
    x, y, name = data
    classes = tuple(map(str, range(int(y.max()) + 1)))
    rows = split_rows(len(x), seed, name, parts, y if roles.stratify else None, without=without)
    split = {part: Part(x[rows[part]], y[rows[part]]) for part in PARTS}
    tested = checksum(rows["test"])
    return Dataset(name, "image", "classification", classes, total, None, tested, **split)


def _split_table(
    data: Table, roles: Roles, seed: int, parts: Sequence[str | None] | None, without: str | None
) -> Dataset:
    table, name = data.frame, data.name
    _check_present(table, roles, name)
    target = check_target(table, roles.target, name)
    task, note = (roles.task, "") if roles.task else infer_task(table[target], name)
    if roles.split is not None:
        parts = parts_named(table[roles.split], roles.split, name)
    stratified = task == "classification" and roles.stratify
    classes = _codes(table[target].map(label)) if stratified else None
    groups = None if roles.group is None else _codes(table[roles.group])
    times = None if roles.time is None else _times(table[roles.time], roles, name)
    rows = split_rows(len(table), seed, name, parts, classes, groups, times, without)
    learned = learn_preprocessing(table, rows["train"].tolist(), roles, task, name, note)
    everything = Part(
        learned.inputs(table, name),
        learned.targets(table[target], name),
        None if roles.weight is None else row_weights(table[roles.weight], name),
        groups if times is None else times.unique(return_inverse=True)[1],
    )
    split = {part: everything.take(rows[part]) for part in PARTS}
    tested = checksum(rows["test"])
    return Dataset(name, "table", task, learned.classes, data.checksum, learned, tested, **split)


def _check_present(table: pandas.DataFrame, roles: Roles, name: str) -> None:
    single = ("id", "weight", "split", "group", "time")
    asked = [("drop", c) for c in roles.drop] + [(role, getattr(roles, role)) for role in single]
    for role, column in asked:
        if column is not None and column not in table.columns:
            known = ", ".join(map(repr, map(str, table.columns)))
            raise VardropError(
                f"Expected {name} to have the column '{column}' for `{role}`, but it has {known}."
                f"{nearest(column, table.columns)}"
            )


def _codes(values: pandas.Series) -> Tensor:
    """Numbers of equal values; missing ones are equal."""
    return torch.tensor(needed("pandas").factorize(values, use_na_sentinel=False)[0])


def _times(values: pandas.Series, roles: Roles, source: str) -> Tensor:
    """Numbers that rise with time."""
    if needed("pandas").api.types.is_numeric_dtype(values):
        times = torch.tensor(to_numbers(values, source).to_numpy(copy=True))
    else:
        times = to_days(values, roles.date_format, source)
    if bool(times.isnan().any()):
        raise VardropError(
            f"Expected a time in every row of column '{values.name}' of {source}, but row "
            f"{int(times.isnan().int().argmax()) + 1} has none."
        )
    return times


def row_weights(values: pandas.Series, source: str) -> Tensor:
    """For how many rows each stands, (N,)."""
    weights = torch.tensor(to_numbers(values, source).to_numpy(copy=True), dtype=torch.float32)
    if not bool((weights >= 0).all()) or float(weights.sum()) == 0:
        raise VardropError(
            f"Expected weights in column '{values.name}' of {source} that are at least 0 and not "
            "all 0, one in every row."
        )
    return weights


def digits() -> Images:
    """scikit-learn's 1797 digits of 8 x 8, pixels in [0, 1]."""
    found = needed("sklearn.datasets").load_digits()
    x = torch.tensor(found.images / 16, dtype=torch.float32).unsqueeze(1)
    return Images(x, torch.tensor(found.target))


def load_images(name: str, split: str = "train", directory: str | Path | None = None) -> Images:
    """Read one split of an image set.

    Args:
        name: one of `IMAGE_SETS`, such as "mnist".
        split: "train" or "test".
        directory: see `data_directory`; what is not there is fetched into a cache.
    """
    if name not in IMAGE_SETS or split not in IMAGE_SETS[name].splits:
        known = ", ".join(f"{n}/{s}" for n, found in IMAGE_SETS.items() for s in found.splits)
        raise VardropError(
            f"Expected an image set among {known}, but got {name}/{split}."
            f"{nearest(name, IMAGE_SETS)}"
        )
    return IMAGE_SETS[name].read(split, directory)


def _embedded(name: str) -> Table:
    found = getattr(needed("sklearn.datasets"), f"load_{name}")(as_frame=True)
    table = found.frame
    if _TABLES[name] == "classification":
        table["target"] = [str(found.target_names[i]) for i in found.target]
    total = f"sha256:{hashlib.sha256(table.to_csv().encode()).hexdigest()}"
    return Table(table, name, "target", total)


def load_out_of_distribution(
    name: str, shape: tuple[int, ...], directory: str | Path | None = None
) -> Tensor:
    """Test images of another set, brought to the shape (channels, height, width) of a net.

    Args:
        name: an image set, or "photos": patches of scikit-learn's two photographs.
        shape: the shape of one input.
        directory: of the image sets.
    """
    if len(shape) != 3:
        raise VardropError(
            f"Expected a net on images to compare with {name!r}, but got inputs of shape {shape}."
        )
    if name not in OUT_OF_DISTRIBUTION:
        raise VardropError(
            f"Expected other data among {', '.join(OUT_OF_DISTRIBUTION)}, but got {name!r}."
            f"{nearest(name, OUT_OF_DISTRIBUTION)}"
        )
    if name == "photos":
        x = _photos()
    else:
        x = digits().x if name == "digits" else load_images(name, "test", directory).x
    grey = x.mean(1, keepdim=True) if shape[0] == 1 else x
    sized = torch.nn.functional.interpolate(grey, shape[1:], mode="bilinear", antialias=True)
    return sized.expand(-1, shape[0], -1, -1).contiguous()


def _photos() -> Tensor:
    found = needed("sklearn.datasets").load_sample_images()
    pictures = torch.stack([torch.tensor(p) for p in found.images])
    x = pictures.permute(0, 3, 1, 2).float() / 255
    return x.unfold(2, 32, 32).unfold(3, 32, 32).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 32, 32)
