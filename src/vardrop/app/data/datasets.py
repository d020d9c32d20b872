"""Data by name and data as people hold them, in three parts: the one way in."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vardrop._core.checks import nearest
from vardrop._core.errors import VardropError, needed
from vardrop.app.data.cifar import load_cifar10
from vardrop.app.data.images import Images, ImageSet, idx_set
from vardrop.app.data.inputs import KINDS, Table, Tensors, given
from vardrop.app.data.loading import LoaderFeed, rows_of, sample_of
from vardrop.app.data.preprocessing import Preprocessing, Task, label, numbers
from vardrop.app.data.splits import Dataset, Part, Roles, checksum, parted, parts_named
from vardrop.app.data.streams import FileFeed, Files, Stream, check_streamed
from vardrop.app.data.tables import SUFFIXES, check_target, infer_task, is_table, learn

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
    """Make data of your own known by a name, to `fit` and to the command line.

    Args:
        name: how it is asked for; no name that is taken.
        load: gives the data: a DataFrame, a pair (X, y), or whatever else `load_dataset` takes.

    >>> import vardrop as vd
    >>> vd.register_dataset("steps", lambda: ([[float(i)] for i in range(10)], [0, 1] * 5))
    >>> vd.load_dataset("steps").sizes()
    {'train': 7, 'validation': 1, 'test': 2}
    """
    if not isinstance(name, str) or name in dataset_names() or _is_file(name):
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

    A tenth is held out for validation and a fifth for test, where they are not given and the data
    have no usual test set; every class in proportion.

    Args:
        data: a name of `DATASETS` or of `register_dataset`, such as "digits"; a CSV or Parquet
            file; a DataFrame with its `target`; a pair (X, y) of arrays, tensors or DataFrames; a
            torch `Dataset` or `DataLoader`, which is read into memory; or a `Stream`, which is not.
        target: the target column of a table.
        task: "classification" or "regression"; inferred from the target where None.
        drop: columns of a table to leave out.
        directory: of the image sets; see `data_directory`.
        seed: of the split.
        validation, test: data of your own for these parts, of the same kind as `data`; no rows are
            held out for the test where it is False.
        roles: what other columns are for; see `Roles`.

    >>> load_dataset("digits").sizes()
    {'train': 1258, 'validation': 180, 'test': 359}
    """
    wanted = _roles(target, task, tuple(drop), roles)
    without = "test" if test is False else None
    own = {"validation": validation, "test": None if without else test}
    if data is None:
        raise VardropError(f"Expected `data` to be {KINDS}, but got None.")
    if isinstance(data, Stream):
        read = _loaded if data.loads else _streamed
        return read(data, wanted, seed, own, without)
    name = str(data) if isinstance(data, str | Path) else None
    if name in DATASETS:
        _check_named(name, wanted, own)
        return _named(name, directory, seed, wanted.stratify, without)
    if name in _REGISTERED:
        data = _REGISTERED[name]()
    elif name is not None and not _is_file(name):
        raise VardropError(
            f"Expected data to be one of {', '.join(dataset_names())}, or a file that "
            f"ends in {', '.join(SUFFIXES)}, but got {name!r}.{nearest(name, dataset_names())}"
        )
    return _together({"train": data, **own}, wanted, seed, name, without)


def _roles(target: str | None, task: Task | None, drop: tuple[str, ...], more: Any) -> Roles:
    known = {f.name for f in dataclasses.fields(Roles)} - {"target", "task", "drop"}
    if unknown := sorted(set(more) - known):
        raise VardropError(
            f"Expected roles among {', '.join(sorted(known))}, but got {unknown}."
            f"{nearest(unknown[0], known)}"
        )
    return Roles(target, task, drop, **more)


def _is_file(name: str) -> bool:
    return is_table(name)


def _check_named(name: str, roles: Roles, own: dict[str, Any]) -> None:
    """What a set of a known name decides for itself cannot be asked of it."""
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


def _named(
    name: str, directory: str | Path | None, seed: int, stratify: bool, without: str | None
) -> Dataset:
    if name == "digits":
        return _inputs(Tensors(*digits(), "digits"), None, seed, stratify, without)
    if name in _TABLES:
        roles = Roles("target", _TABLES[name], stratify=stratify)
        return _table(_embedded(name), roles, seed, None, without)
    train, test = (load_images(name, s, directory) for s in ("train", "test"))
    x, y = (torch.cat(pair) for pair in zip(train, test, strict=True))
    known = ["train"] * len(train.y) + ["test"] * len(test.y)
    total = checksum(*train, *test)
    return _inputs(Tensors(x, y, name), known, seed, stratify, without, total)


def _inputs(
    found: Tensors,
    known: list[str] | None,
    seed: int,
    stratify: bool,
    without: str | None,
    total: str | None = None,
) -> Dataset:
    x, y, name = found
    rows = parted(len(x), seed, name, known, y if stratify else None, without=without)
    train, validation, test = (
        Part(x[rows[part]], y[rows[part]]) for part in ("train", "validation", "test")
    )
    total = total or found.checksum
    own = checksum(rows["test"])
    return Dataset(
        name, "image", "classification", train, validation, test, _names(y), total, None, own
    )


def _together(
    data: dict[str, Any], roles: Roles, seed: int, name: str | None, without: str | None
) -> Dataset:
    """All rows at once, with the part of those that were given for one."""
    found = {part: given(d, roles.target) for part, d in data.items() if d is not None}
    tables = {part: one for part, one in found.items() if isinstance(one, Table)}
    tensors = {part: one for part, one in found.items() if isinstance(one, Tensors)}
    if tables and tensors:
        raise VardropError(f"Expected `validation` and `test` of the kind of `data`: {KINDS}.")
    total = _total([one.checksum for one in found.values()])
    if tensors:
        _check_tensors(roles)
        first, known = tensors["train"], _known({p: len(one.y) for p, one in tensors.items()})
        x, y = (
            torch.cat([o.x for o in tensors.values()]),
            torch.cat([o.y for o in tensors.values()]),
        )
        everything = Tensors(x, y, name or first.name)
        return _inputs(everything, known, seed, roles.stratify, without, total)
    frames, own = {part: one.frame for part, one in tables.items()}, tables["train"]
    _check_columns(frames, own.name)
    known = _known({part: len(frame) for part, frame in frames.items()})
    frame = needed("pandas").concat(list(frames.values()), ignore_index=True)
    table = Table(frame if known else own.frame, name or own.name, own.target, total)
    return _table(table, dataclasses.replace(roles, target=own.target), seed, known, without)


def _streamed(
    data: Stream, roles: Roles, seed: int, own: dict[str, Any], without: str | None
) -> Dataset:
    """What is held in memory is a table; the rows to train on come with it."""
    check_streamed(roles)
    others = {part: given(d, roles.target) for part, d in own.items() if d is not None}
    apart = {*others, *([] if without is None else [without])}
    files = Files.of(data, seed, apart)
    frame, known = files.gathered(roles.target)
    frames = {"train": frame}
    for part, one in others.items():
        if not isinstance(one, Table):
            raise VardropError(f"Expected `{part}` to be a table, as the Stream is.")
        frames[part] = one.frame
        known += [part] * len(one.frame)
    _check_columns(frames, data.name)
    rows = frame.index[[part == "test" for part in known[: len(frame)]]]
    if len(frames) > 1:
        frame = needed("pandas").concat(list(frames.values()), ignore_index=True)
    total = _total([files.checksum(), *(one.checksum for one in others.values())])
    found = _table(Table(frame, data.name, roles.target, total), roles, seed, known, without)
    assert found.preprocessing is not None
    feed = FileFeed(files, found.preprocessing, roles.weight)
    tested = checksum(torch.tensor(rows.to_numpy(copy=True))) if len(rows) else found.test_rows
    return dataclasses.replace(found, feed=feed, test_rows=tested)


def _loaded(
    data: Stream, roles: Roles, seed: int, own: dict[str, Any], without: str | None
) -> Dataset:
    """The sample of a loader and the parts that were given with it; all others come by batches."""
    check_streamed(roles)
    if absent := [part for part, d in own.items() if d is None and part != without]:
        raise VardropError(
            f"Expected `{absent[0]}` with a loader in a Stream, whose rows cannot be held out, but "
            "got none. Pass data for it; test=False goes without a test."
        )
    rows = rows_of(data)
    parts = {"train": sample_of(data, seed), **{p: d for p, d in own.items() if d is not None}}
    found = _together(parts, roles, seed, data.name, without)
    feed = LoaderFeed(data.source, rows, found.preprocessing, len(found.classes))
    return dataclasses.replace(found, feed=feed)


def _known(sizes: dict[str, int]) -> list[str] | None:
    """The part of every row, where some were given."""
    if len(sizes) == 1:
        return None
    return [part for part, size in sizes.items() for _ in range(size)]


def _check_tensors(roles: Roles) -> None:
    others = dataclasses.replace(roles, stratify=True, task=None)
    if others != Roles() or roles.task == "regression":
        raise VardropError(f"Expected classes and no columns for tensors, but got {roles}.")


def _total(sums: list[str]) -> str:
    if len(sums) == 1:
        return sums[0]
    return f"sha256:{hashlib.sha256(''.join(sums).encode()).hexdigest()}"


def _check_columns(frames: dict[str, pandas.DataFrame], name: str) -> None:
    for part, frame in frames.items():
        if absent := sorted(set(frames["train"].columns) - set(frame.columns)):
            raise VardropError(
                f"Expected the {part} data to have the columns of {name}, but got none named "
                f"{', '.join(map(repr, absent))}."
            )


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


def _names(y: Tensor) -> tuple[str, ...]:
    return tuple(map(str, range(int(y.max()) + 1)))


def _embedded(name: str) -> Table:
    datasets = needed("sklearn.datasets")
    loaders: dict[str, Callable[..., Any]] = {n: getattr(datasets, f"load_{n}") for n in _TABLES}
    found = loaders[name](as_frame=True)
    table = found.frame
    if _TABLES[name] == "classification":
        table["target"] = [str(found.target_names[i]) for i in found.target]
    total = f"sha256:{hashlib.sha256(table.to_csv().encode()).hexdigest()}"
    return Table(table, name, "target", total)


def _table(
    found: Table, roles: Roles, seed: int, known: list[str] | None, without: str | None
) -> Dataset:
    table, name = found.frame, found.name
    _check_present(table, roles, name)
    target = check_target(table, roles.target, name)
    task, note = (roles.task, "") if roles.task else infer_task(table[target], name)
    rows = parted(len(table), seed, name, *_known_of(table, roles, task, known, name), without)
    learned = learn(table, rows["train"].tolist(), target, task, roles.apart, name, note)
    weight = None if roles.weight is None else row_weights(table[roles.weight], name)
    train, validation, test = (
        _part(table.iloc[rows[part].tolist()], learned, name, weight, rows[part])
        for part in ("train", "validation", "test")
    )
    return Dataset(
        name,
        "table",
        task,
        train,
        validation,
        test,
        learned.classes,
        found.checksum,
        learned,
        checksum(rows["test"]),
    )


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


def _known_of(
    table: pandas.DataFrame,
    roles: Roles,
    task: Task,
    known: Sequence[str | None] | None,
    name: str,
) -> tuple[Sequence[str | None] | None, Tensor | None, Tensor | None, Tensor | None]:
    """What is known of the rows: their parts, classes, groups and times."""

    def codes(column: pandas.Series | None) -> Tensor | None:
        if column is None:
            return None
        return torch.tensor(needed("pandas").factorize(column, use_na_sentinel=False)[0])

    if roles.split is not None:
        known = parts_named(table[roles.split], roles.split, name)
    stratified = task == "classification" and roles.stratify
    classes = codes(table[roles.target].map(label)) if stratified else None
    groups = None if roles.group is None else codes(table[roles.group])
    times = None if roles.time is None else torch.tensor(_times(table[roles.time], name))
    return known, classes, groups, times


def _times(values: pandas.Series, source: str) -> Any:
    """Numbers that rise with time."""
    pandas = needed("pandas")
    if pandas.api.types.is_numeric_dtype(values):
        return numbers(values, source).to_numpy(copy=True)
    found = pandas.to_datetime(values, errors="coerce", format="mixed")
    if bool(found.isna().any()):
        first = int(found.isna().to_numpy().argmax())
        raise VardropError(
            f"Expected dates or numbers in column '{values.name}' of {source}, but got "
            f"'{values.iloc[first]}' in row {first + 1}."
        )
    return found.astype("int64").to_numpy(copy=True)


def row_weights(values: pandas.Series, source: str) -> Tensor:
    """For how many rows each stands, (N,)."""
    found = torch.tensor(numbers(values, source).to_numpy(copy=True), dtype=torch.float32)
    if not bool((found >= 0).all()) or float(found.sum()) == 0:
        raise VardropError(
            f"Expected weights in column '{values.name}' of {source} that are at least 0 and not "
            "all 0, one in every row."
        )
    return found


def _part(
    table: pandas.DataFrame, found: Preprocessing, source: str, weight: Tensor | None, rows: Tensor
) -> Part:
    x, y = found.inputs(table, source), found.targets(table[found.target], source)
    return Part(x, y, None if weight is None else weight[rows])


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
