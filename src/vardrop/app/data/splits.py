"""A data set as the application uses it: three parts, a task, a checksum; how rows are split."""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from vardrop._core.checks import check_integer
from vardrop._core.errors import VardropError, needed
from vardrop.app.data.preprocessing import Preprocessing, Task

if TYPE_CHECKING:
    import pandas

Kind = Literal["image", "table"]
PARTS = ("train", "validation", "test")
_FRACTIONS = {"test": 0.2, "validation": 0.1}
_NAMES = {
    **dict.fromkeys(("train", "training", "fit"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "holdout"), "test"),
}
_TRIES = 20  # random choices of groups, of which the one nearest to the wanted size is taken


class _Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Part(_Pair):
    """Inputs and targets, a pair; and for how many rows each stands, and its group.

    `weight` is None if every row stands for itself. Rows of one number in `group` are never held
    out apart from each other; it is None if there are no groups.
    """

    weight: Tensor | None
    group: Tensor | None

    def __new__(
        cls, x: Tensor, y: Tensor, weight: Tensor | None = None, group: Tensor | None = None
    ) -> Part:
        part = super().__new__(cls, x, y)
        part.weight, part.group = weight, group
        return part

    def _map(self, change: Callable[[Tensor], Tensor]) -> Part:
        weight, group = (None if t is None else change(t) for t in (self.weight, self.group))
        return Part(change(self.x), change(self.y), weight, group)

    def to(self, device: torch.device) -> Part:
        """The same on a device."""
        return self._map(lambda t: t.to(device))

    @property
    def weights(self) -> Tensor:
        """(N,) in double precision: ones if there are none."""
        weight = torch.ones(len(self.y)) if self.weight is None else self.weight
        return weight.double()

    def take(self, rows: Tensor) -> Part:
        """Some rows, by number or by mask."""
        return self._map(lambda t: t[rows])

    def join(self, other: Part) -> Part:
        """The rows of both."""
        pairs = ((self.weight, other.weight), (self.group, other.group))
        more = (None if a is None or b is None else torch.cat([a, b]) for a, b in pairs)
        return Part(torch.cat([self.x, other.x]), torch.cat([self.y, other.y]), *more)


@dataclass(frozen=True)
class Roles:
    """What the columns of a table are for, and how its cells are read.

    Args:
        target: what is predicted.
        task: classification or regression; inferred from the target unless given.
        drop: columns that are left out.
        id: a column that names the rows; predictions carry it, the net does not see it.
        weight: a column that says for how many rows each stands.
        split: a column that says which part each row is in: train, validation or test.
        group: rows with the same value here stay in one part.
        time: the latest rows by this column are the test part, those before them validation.
        stratify: each part has about the same fraction of every class.
        sep: the delimiter of a CSV file; found from its first lines unless given.
        decimal: the decimal mark of a CSV file.
        thousands: the mark between thousands in a CSV file; none unless given.
        date_format: the format of dates that are texts, such as %d/%m/%Y; ISO 8601 unless given.
    """

    target: str | None = None
    task: Task | None = None
    drop: tuple[str, ...] = ()
    id: str | None = None
    weight: str | None = None
    split: str | None = None
    group: str | None = None
    time: str | None = None
    stratify: bool = True
    sep: str | None = None
    decimal: str = "."
    thousands: str | None = None
    date_format: str | None = None

    def __post_init__(self) -> None:
        if self.group is not None and self.time is not None:
            raise VardropError("`group` cannot be combined with `time`. Choose one of them.")
        if self.sep == "\\t":  # as it is typed
            object.__setattr__(self, "sep", "\t")
        marks = {"sep": self.sep, "decimal": self.decimal, "thousands": self.thousands}
        for name, mark in marks.items():
            if mark is not None and (not isinstance(mark, str) or len(mark) != 1):
                raise VardropError(f"Expected `{name}` to be one character, but got {mark!r}.")
        if self.decimal in (self.thousands, self.sep):
            raise VardropError(
                f"Expected `decimal` to differ from `sep` and `thousands`, but got {marks}."
            )

    @property
    def apart(self) -> tuple[str, ...]:
        """The columns that are no inputs."""
        named = (self.target, self.id, self.weight, self.split, self.group, self.time)
        return (*self.drop, *(name for name in named if name is not None))

    @property
    def reading(self) -> str:
        """How the cells of a file are read, in one line."""
        sep = "found in the file" if self.sep is None else repr(self.sep)
        thousands = "none" if self.thousands is None else repr(self.thousands)
        dates = self.date_format or "ISO 8601"
        return f"sep {sep}, decimal {self.decimal!r}, thousands {thousands}, dates {dates}"


@dataclass(frozen=True)
class About:
    """What a trained net needs to know of its data, without the data themselves.

    `classes` holds the names of the classes, and is empty for regression.
    """

    name: str
    kind: Kind
    task: Task
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    sizes: Mapping[str, int]
    checksum: str
    preprocessing: Preprocessing | None = None

    @property
    def embeddings(self) -> dict[int, int]:
        """The places of inputs that are numbers of categories, and how many there are."""
        return {} if self.preprocessing is None else self.preprocessing.embeddings

    @property
    def outputs(self) -> int:
        """How many outputs a net needs."""
        return len(self.classes) if self.task == "classification" else 1


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training, validation and test data with all that a net needs to know of them.

    Regression targets are (N, 1) and scaled by what the training part showed; `preprocessing`
    knows the way back. `test_rows` is a checksum of which rows the test part has.
    """

    name: str
    kind: Kind
    task: Task
    classes: tuple[str, ...]
    checksum: str
    preprocessing: Preprocessing | None
    test_rows: str
    train: Part
    validation: Part
    test: Part

    @property
    def about(self) -> About:
        """What is kept with a net."""
        names = [field.name for field in dataclasses.fields(About)]
        values = {name: getattr(self, name) for name in names if name != "sizes"}
        return About(sizes=self.sizes(), **values)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.x.shape[1:])

    def sizes(self) -> dict[str, int]:
        """How many examples each part has."""
        return {name: len(getattr(self, name).y) for name in PARTS}


def with_class_weight(
    data: Dataset, class_weight: Literal["balanced"] | Mapping[str, float]
) -> Dataset:
    """The data with class weights on the rows of training and validation; test rows have none.

    A class weight multiplies that of the row. Balanced: n / (K n_k) for the n_k rows of a class, of
    n in all and K classes that have some. A class that is not named counts once.
    """
    rows = data.train.join(data.validation)
    factors = torch.ones(len(data.classes), dtype=torch.float64)
    if isinstance(class_weight, str):
        counts = torch.bincount(rows.y, rows.weights, len(data.classes))
        present = counts > 0
        factors[present] = counts.sum() / (present.sum() * counts[present])
    else:
        for name, weight in class_weight.items():
            factors[data.classes.index(name)] = weight
    train, validation = (
        Part(*part, (part.weights * factors[part.y]).float(), part.group)
        for part in (data.train, data.validation)
    )
    return dataclasses.replace(data, train=train, validation=validation)


def split_rows(
    count: int,
    seed: int,
    name: str,
    parts: Sequence[str | None] | None = None,
    classes: Tensor | None = None,
    groups: Tensor | None = None,
    times: Tensor | None = None,
    without: str | None = None,
) -> dict[str, Tensor]:
    """Row numbers of the three parts: a fifth for test, a tenth for validation, the rest to train.

    Args:
        count: how many rows there are.
        seed: of the shuffling.
        name: of the data, for errors.
        parts: the part of each row, None for rows to split; validation and test rows that are
            given stay as they are, a part without any is taken from the other rows.
        classes: class numbers, of which every part gets its fraction.
        groups: numbers of groups that stay together.
        times: the latest rows are the test part; rows of one time stay together.
        without: a part that stays empty.
    """
    given = [None] * count if parts is None else list(parts)
    found = {
        part: torch.tensor([i for i, own in enumerate(given) if own == part], dtype=torch.long)
        for part in _FRACTIONS
    }
    rest = torch.tensor([i for i, own in enumerate(given) if own not in found], dtype=torch.long)
    wanted = [part for part in _FRACTIONS if len(found[part]) == 0 and part != without]
    sizes = {part: max(1, round(_FRACTIONS[part] * len(rest))) for part in wanted}
    _check_count("rows", len(rest), sum(sizes.values()) + 1, name)
    for kind, values in (("groups", groups), ("different times", times)):
        if values is not None:
            _check_count(kind, len(values[rest].unique()), len(wanted) + 1, name)
    for position, part in enumerate(wanted):
        held = _hold_out(rest, sizes[part], len(wanted) - position, seed, classes, groups, times)
        found[part], rest = rest[held], rest[~held]
    return {**found, "train": rest}


def _check_count(kind: str, count: int, least: int, name: str) -> None:
    if count < least:
        raise VardropError(
            f"Expected at least {least} {kind} to split {name} for training, validation and test, "
            f"but got {count}. Give more data."
        )


def _hold_out(
    rows: Tensor,
    size: int,
    left: int,
    seed: int,
    classes: Tensor | None,
    groups: Tensor | None,
    times: Tensor | None,
) -> Tensor:
    """A mask of about `size` rows to hold out, such that `left` groups or times stay."""
    sklearn = needed("sklearn.model_selection")
    held = torch.zeros(len(rows), dtype=torch.bool)
    if times is not None:
        levels, counts = times[rows].unique(return_counts=True)
        latest = counts.flip(0).cumsum(0)[:-left]  # rows at the latest time, the latest two, ...
        return times[rows] >= levels[-1 - int((latest - size).abs().argmin())]
    if groups is not None:
        total = len(groups[rows].unique())
        number = min(max(1, round(size / len(rows) * total)), total - left)
        splitter = sklearn.GroupShuffleSplit(_TRIES, test_size=number, random_state=seed)
        chosen = [held for _, held in splitter.split(rows, groups=groups[rows].numpy())]
        held[min(chosen, key=lambda found: abs(len(found) - size))] = True
        return held
    free, labels = torch.arange(len(rows)), None
    if classes is not None:
        counts = classes[rows].bincount()
        several = counts[classes[rows]] > 1  # the only row of a class is trained on
        free = free[several] if int(several.sum()) > size else free
        fits = int((counts > 1).sum()) <= min(size, len(free) - size)
        labels = classes[rows][free] if fits and bool(several[free].all()) else None
    options = {"test_size": size, "random_state": seed, "stratify": labels}
    held[sklearn.train_test_split(free.numpy(), **options)[1]] = True
    return held


def fold_numbers(rows: Part, folds: int, task: Task, seed: int) -> Tensor:
    """The fold of each row, from 0 on; classes are spread evenly, groups are never divided."""
    check_integer("folds", folds, 2)
    kind, count = "rows", len(rows.y)
    if rows.group is not None:
        kind, count = "groups", len(rows.group.unique())
    if folds > count:
        raise VardropError(f"Expected `folds` to be at most {count}, the {kind}, but got {folds}.")
    labels = rows.y if task == "classification" else torch.zeros(len(rows.y), dtype=torch.long)
    if int(labels.bincount().max()) < folds:  # too few of every class to spread them
        labels = torch.zeros_like(labels)
    name = "StratifiedKFold" if rows.group is None else "StratifiedGroupKFold"
    splitter = getattr(needed("sklearn.model_selection"), name)
    numbers = torch.empty(len(labels), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class with fewer rows than folds
        parts = splitter(folds, shuffle=True, random_state=seed).split(labels, labels, rows.group)
        for number, (_, held) in enumerate(parts):
            numbers[held] = number
    return numbers


def parts_named(values: pandas.Series, column: str, source: str) -> list[str | None]:
    """The part that every row names; an empty cell names none."""
    texts = values.fillna("").map(str).str.strip().str.lower()
    unknown = (texts != "") & ~texts.isin(list(_NAMES))
    if bool(unknown.any()):
        row = int(unknown.to_numpy().argmax())
        raise VardropError(
            f"Expected train, validation or test in column '{column}' of {source}, but got "
            f"'{values.iloc[row]}' in row {row + 1}."
        )
    return [_NAMES.get(text) for text in texts]


def checksum(*tensors: Tensor) -> str:
    """SHA-256 of tensors: their types, shapes and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"
