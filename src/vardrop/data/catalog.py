"""Data by name: embedded sets, image sets, CSV and Parquet files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vardrop.data.cifar import load_cifar10
from vardrop.data.images import Images, ImageSet, idx_set
from vardrop.data.preprocessing import Preprocessing, Task
from vardrop.data.splits import Dataset, Part, checksum, shuffled
from vardrop.data.tables import SUFFIXES, check_target, infer_task, learn, read_table
from vardrop.errors import VardropError, needed

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
_VALIDATION, _TEST = 0.1, 0.2


def load_dataset(
    name: str | Path,
    target: str | None = None,
    task: Task | None = None,
    drop: Sequence[str] = (),
    directory: str | Path | None = None,
    seed: int = 0,
) -> Dataset:
    """Load data for training, validation and test.

    A tenth is held out for validation; a fifth for test, where the data have no usual test set.

    Args:
        name: one of `DATASETS`, such as "digits" or "mnist"; or a CSV or Parquet file.
        target: the target column of a file; only a file takes one.
        task: "classification" or "regression"; inferred from the target where None.
        drop: columns of a file to leave out; only a file takes some.
        directory: of the image sets; see `data_directory`.
        seed: of the split.

    >>> load_dataset("digits").sizes()
    {'train': 1258, 'validation': 180, 'test': 359}
    """
    name = str(name)
    if name in DATASETS:
        _check_named(name, target, task, drop)
    if name == "digits":
        return _digits(seed)
    if name in _TABLES:
        return _embedded(name, seed)
    if name in _TRAINABLE:
        return _images(name, directory, seed)
    if Path(name).suffix.lower() in SUFFIXES:
        return _file(Path(name), target, task, drop, seed)
    raise VardropError(
        f"Expected data to be one of {', '.join(DATASETS)}, or a file that ends in "
        f"{', '.join(SUFFIXES)}, but got {name!r}."
    )


def _check_named(name: str, target: str | None, task: Task | None, drop: Sequence[str]) -> None:
    """What a set of a known name decides for itself cannot be asked of it."""
    own = _TABLES.get(name, "classification")
    if target is None and not drop and task in (None, own):
        return
    given = {"target": target, "task": None if task == own else task, "drop": list(drop) or None}
    wrong = ", ".join(f"{k}={v!r}" for k, v in given.items() if v is not None)
    raise VardropError(
        f"Expected no `target`, `drop` or other task for the data {name}, whose target is known "
        f"and whose task is {own}, but got {wrong}. They are for CSV and Parquet files."
    )


def _digits(seed: int) -> Dataset:
    x, y = digits()
    test, validation, train = shuffled(len(x), (_TEST, _VALIDATION), seed, "digits")
    first, second, last = (Part(x[rows], y[rows]) for rows in (train, validation, test))
    total = checksum(x, y)
    return Dataset("digits", "image", "classification", first, second, last, _names(y), total)


def digits() -> Images:
    """scikit-learn's 1797 digits of 8 x 8, pixels in [0, 1]."""
    found = needed("sklearn.datasets").load_digits()
    x = torch.tensor(found.images / 16, dtype=torch.float32).unsqueeze(1)
    return Images(x, torch.tensor(found.target))


def _images(name: str, directory: str | Path | None, seed: int) -> Dataset:
    (x, y), (test_x, test_y) = (load_images(name, s, directory) for s in ("train", "test"))
    validation, train = shuffled(len(x), (_VALIDATION,), seed, name)
    parts = Part(x[train], y[train]), Part(x[validation], y[validation]), Part(test_x, test_y)
    total = checksum(x, y, test_x, test_y)
    return Dataset(name, "image", "classification", *parts, _names(y), total)


def load_images(name: str, split: str = "train", directory: str | Path | None = None) -> Images:
    """Read one split of an image set.

    Args:
        name: one of `IMAGE_SETS`, such as "mnist".
        split: "train" or "test".
        directory: see `data_directory`; what is not there is fetched into a cache.
    """
    if name not in IMAGE_SETS or split not in IMAGE_SETS[name].splits:
        known = ", ".join(f"{n}/{s}" for n, found in IMAGE_SETS.items() for s in found.splits)
        raise VardropError(f"Expected an image set among {known}, but got {name}/{split}.")
    return IMAGE_SETS[name].read(split, directory)


def _names(y: Tensor) -> tuple[str, ...]:
    return tuple(map(str, range(int(y.max()) + 1)))


def _embedded(name: str, seed: int) -> Dataset:
    datasets = needed("sklearn.datasets")
    loaders: dict[str, Callable[..., Any]] = {n: getattr(datasets, f"load_{n}") for n in _TABLES}
    found = loaders[name](as_frame=True)
    table = found.frame
    if _TABLES[name] == "classification":
        table["target"] = [str(found.target_names[i]) for i in found.target]
    total = f"sha256:{hashlib.sha256(table.to_csv().encode()).hexdigest()}"
    return _table(name, table, "target", _TABLES[name], (), total, seed)


def _file(
    path: Path, target: str | None, task: Task | None, drop: Sequence[str], seed: int
) -> Dataset:
    table = read_table(path)
    target = check_target(table, target, str(path))
    if unknown := [name for name in drop if name not in table.columns]:
        raise VardropError(
            f"Expected {path} to have the column '{unknown[0]}' to drop, but it has none."
        )
    total = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    return _table(
        str(path), table, target, task or infer_task(table[target], str(path)), drop, total, seed
    )


def _table(
    name: str,
    table: pandas.DataFrame,
    target: str,
    task: Task,
    drop: Sequence[str],
    total: str,
    seed: int,
) -> Dataset:
    test, validation, train = shuffled(len(table), (_TEST, _VALIDATION), seed, name)
    found = learn(table, train.tolist(), target, task, drop, name)
    first, second, last = (
        _part(table.iloc[rows.tolist()], found, name) for rows in (train, validation, test)
    )
    return Dataset(name, "table", task, first, second, last, found.classes, total, found)


def _part(table: pandas.DataFrame, found: Preprocessing, source: str) -> Part:
    return Part(found.inputs(table, source), found.targets(table[found.target], source))


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
        )
    x = _images_of(name, directory)
    grey = x.mean(1, keepdim=True) if shape[0] == 1 else x
    sized = torch.nn.functional.interpolate(grey, shape[1:], mode="bilinear", antialias=True)
    return sized.expand(-1, shape[0], -1, -1).contiguous()


def _images_of(name: str, directory: str | Path | None) -> Tensor:
    if name == "digits":
        return digits().x
    if name == "photos":
        return _photos()
    return load_images(name, "test", directory).x


def _photos() -> Tensor:
    found = needed("sklearn.datasets").load_sample_images()
    pictures = torch.stack([torch.tensor(p) for p in found.images])
    x = pictures.permute(0, 3, 1, 2).float() / 255
    return x.unfold(2, 32, 32).unfold(3, 32, 32).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 32, 32)
