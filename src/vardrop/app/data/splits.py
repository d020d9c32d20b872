"""Data sets in three parts, and splits of rows."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vardrop._core.errors import VardropError, import_optional
from vardrop.app.data.preprocessing import Preprocessing, Task

Kind = Literal["image", "table"]
PARTS = ("train", "validation", "test")
_FRACTIONS = {"test": 0.2, "validation": 0.1}
_SEEDS = 2**32  # of scikit-learn; larger seeds are taken modulo


class _Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Part(_Pair):
    """A pair of inputs and targets, with the weights and groups of the rows.

    `weight` is None if every row counts once. `group` is None if there are no groups. Rows with the
    same number in `group` are always held out together.
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
        """Weights (N,) in double precision, ones if there are none."""
        return (torch.ones(len(self.y)) if self.weight is None else self.weight).double()

    @property
    def shares(self) -> Tensor:
        """1 / the size of the row's group, (N,) in double precision. Ones without groups."""
        group = torch.arange(len(self.y)) if self.group is None else self.group
        _, number, counts = group.unique(return_inverse=True, return_counts=True)
        return 1 / counts[number].double()

    def take(self, rows: Tensor) -> Part:
        """Some rows, by number or by mask."""
        return self._map(lambda t: t[rows])

    def join(self, other: Part) -> Part:
        """The rows of both."""
        pairs = ((self.weight, other.weight), (self.group, other.group))
        others = (None if a is None or b is None else torch.cat([a, b]) for a, b in pairs)
        return Part(torch.cat([self.x, other.x]), torch.cat([self.y, other.y]), *others)


@dataclass(frozen=True)
class About:
    """The description of the data that is stored with a trained model.

    `classes` holds the names of the classes, and is empty for regression. `rows` are checksums of
    the row numbers of each part.
    """

    name: str
    kind: Kind
    task: Task
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    sizes: Mapping[str, int]
    checksum: str
    rows: Mapping[str, str]
    preprocessing: Preprocessing | None = None

    @property
    def outputs(self) -> int:
        """The number of outputs of the model."""
        return len(self.classes) if self.task == "classification" else 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset(About):
    """Training, validation and test data with their description.

    Regression targets are (N, 1), scaled by the mean and standard deviation of the training part,
    which are in `preprocessing`.
    """

    train: Part
    validation: Part
    test: Part

    @property
    def about(self) -> About:
        """The description alone."""
        return About(*(getattr(self, field.name) for field in dataclasses.fields(About)))


def with_class_weight(
    data: Dataset, class_weight: Literal["balanced"] | Mapping[str, float]
) -> Dataset:
    """Multiply the weights of training and validation rows by class weights.

    "balanced" is n / (K n_k) for the n_k rows of a class, with n rows and K non-empty classes.

    Args:
        data: a data set for classification.
        class_weight: "balanced", or a weight by class. The default of a class is 1.
    """
    rows = data.train.join(data.validation)
    if isinstance(class_weight, str):
        counts = torch.bincount(rows.y, rows.weights, len(data.classes))
        factors = counts.sum() / ((counts > 0).sum() * counts)  # infinite for classes without rows
    else:
        factors = torch.tensor([class_weight.get(name, 1.0) for name in data.classes]).double()
    parts = (data.train, data.validation)
    train, validation = (Part(*p, (p.weights * factors[p.y]).float(), p.group) for p in parts)
    return dataclasses.replace(data, train=train, validation=validation)


def split_rows(
    count: int,
    seed: int,
    name: str,
    parts: Sequence[str] | None = None,
    classes: Tensor | None = None,
    groups: Tensor | None = None,
    times: Tensor | None = None,
    without: str | None = None,
) -> dict[str, Tensor]:
    """Row numbers of the three parts: a fifth for test, a tenth for validation, the rest to train.

    Args:
        count: the number of rows.
        seed: seed of the shuffling.
        name: name of the data, for errors.
        parts: the part of each row. A validation or test part without rows is taken from the
            training rows.
        classes: class numbers. Every part gets its fraction of each class.
        groups: numbers of groups that stay together.
        times: the latest rows are the test part. Rows of one time stay together.
        without: a part that stays empty.
    """
    numbers = torch.tensor([PARTS.index(part) for part in parts or ["train"] * count])
    split = {part: (numbers == i).nonzero().flatten() for i, part in enumerate(PARTS)}
    rest = split["train"]
    wanted = [part for part in _FRACTIONS if len(split[part]) == 0 and part != without]
    sizes = [max(1, round(_FRACTIONS[part] * len(rest))) for part in wanted]
    kind, blocks = "rows", torch.arange(count)
    if times is not None:
        kind, blocks = "different times", times
    if groups is not None:
        # Groups are blocks in a random order, of which the last are held out. Large groups are
        # first, because they would make a part too large.
        large = groups.bincount() > _FRACTIONS["test"] * len(rest)
        order = torch.randperm(len(large), generator=torch.Generator().manual_seed(seed))
        kind, blocks = "groups", (order - len(large) * large)[groups]
    if (number := len(blocks[rest].unique())) <= len(wanted):
        parted = f"{name} for training, validation and test, but got {number}"
        raise VardropError(f"Expected at least {len(wanted) + 1} {kind} to split {parted}.")
    for left, part, size in zip(range(len(wanted), 0, -1), wanted, sizes, strict=True):
        if kind == "rows":
            strata = torch.zeros_like(rest) if classes is None else classes[rest]
            held = _choose_rows(strata, size, seed)
        else:
            levels, counts = blocks[rest].unique(return_counts=True)
            later = counts.flip(0).cumsum(0)[:-left]  # rows of the last block, the last two, ...
            held = blocks[rest] >= levels[-1 - int((later - size).abs().argmin())]
        split[part], rest = rest[held], rest[~held]
    return {**split, "train": rest}


def _choose_rows(classes: Tensor, size: int, seed: int) -> Tensor:
    """A mask of `size` rows, stratified if there are enough, without the only row of a class."""
    counts = classes.bincount()
    several = (counts[classes] > 1).nonzero().flatten()
    free = several if len(several) > size else torch.arange(len(classes))
    fits = int((counts > 1).sum()) <= min(size, len(several) - size)
    options = {"test_size": size, "random_state": seed % _SEEDS}
    split = import_optional("sklearn.model_selection").train_test_split
    held = split(free.numpy(), stratify=classes[free] if fits else None, **options)[1]
    return torch.zeros(len(classes), dtype=torch.bool).index_fill(0, torch.tensor(held), True)


def fold_numbers(rows: Part, folds: int, task: Task, seed: int) -> Tensor:
    """The fold of each row, from 0 on. Classes are spread evenly, groups are never divided."""
    count = len(rows.y) if rows.group is None else len(rows.group.unique())
    if folds > count:
        kind = "rows" if rows.group is None else "groups"
        raise VardropError(f"Expected `folds` to be at most {count}, the {kind}, but got {folds}.")
    labels = rows.y if task == "classification" else torch.zeros(len(rows.y), dtype=torch.long)
    if int(labels.bincount().max()) < folds:  # too few of every class to spread them
        labels = torch.zeros_like(labels)
    name = "StratifiedKFold" if rows.group is None else "StratifiedGroupKFold"
    make_splitter = getattr(import_optional("sklearn.model_selection"), name)
    splitter = make_splitter(folds, shuffle=True, random_state=seed % _SEEDS)
    numbers = torch.zeros_like(labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class with fewer rows than folds
        for number, (_, held) in enumerate(splitter.split(labels, labels, rows.group)):
            numbers[held] = number
    return numbers
