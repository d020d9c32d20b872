"""A data set as the application uses it: three parts, a task, a checksum; and who is in which."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from vardrop._core.errors import VardropError
from vardrop.app.data.preprocessing import Preprocessing, Task

if TYPE_CHECKING:
    import pandas

Kind = Literal["image", "table"]
PARTS = ("test", "validation", "train")
_FRACTIONS = {"test": 0.2, "validation": 0.1}
_NAMES = {
    **dict.fromkeys(("train", "training", "fit"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "holdout"), "test"),
}


class _Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Part(_Pair):
    """Inputs and targets, a pair; and for how many rows each stands, where that is not one."""

    weight: Tensor | None

    def __new__(cls, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Part:
        found = super().__new__(cls, x, y)
        found.weight = weight
        return found

    def to(self, device: torch.device) -> Part:
        """The same on a device."""
        weight = None if self.weight is None else self.weight.to(device)
        return Part(self.x.to(device), self.y.to(device), weight)

    @property
    def weights(self) -> Tensor:
        """(N,) in double precision: ones, where there are none."""
        found = torch.ones(len(self.y)) if self.weight is None else self.weight
        return found.double()

    def take(self, rows: Tensor) -> Part:
        """Some rows, by number or by mask."""
        return Part(self.x[rows], self.y[rows], None if self.weight is None else self.weight[rows])

    def join(self, other: Part) -> Part:
        """The rows of both."""
        weights = [part.weight for part in (self, other) if part.weight is not None]
        weight = torch.cat(weights) if len(weights) == 2 else None
        return Part(torch.cat([self.x, other.x]), torch.cat([self.y, other.y]), weight)


@dataclass(frozen=True)
class Roles:
    """What the columns of a table are for.

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

    @property
    def apart(self) -> tuple[str, ...]:
        """The columns that are no inputs."""
        named = (self.target, self.id, self.weight, self.split, self.time)
        groups = () if self.group is None else (self.group,)
        return (*self.drop, *(name for name in named if name is not None), *groups)


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


class Feed(Protocol):
    """Training rows that are not in memory."""

    @property
    def rows(self) -> int:
        """How many there are."""

    def batched(self, size: int) -> Iterable[Any]:
        """Batches (x, y) or (x, y, weight) of so many rows, others in every epoch."""

    def weighed(self, factors: Tensor) -> Feed:
        """The same rows with factors on their weights, by class."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training, validation and test data with all that a net needs to know of them.

    Regression targets are (N, 1) and scaled by what the training part showed; `preprocessing`
    knows the way back. `test_rows` is a checksum of which rows the test part has. Where there is a
    `feed`, it gives the rows to train on, and `train` is a sample of them.
    """

    name: str
    kind: Kind
    task: Task
    train: Part
    validation: Part
    test: Part
    classes: tuple[str, ...]
    checksum: str
    preprocessing: Preprocessing | None = None
    test_rows: str = ""
    feed: Feed | None = None

    @property
    def about(self) -> About:
        """What is kept with a net."""
        return About(
            self.name,
            self.kind,
            self.task,
            self.shape,
            self.classes,
            self.sizes(),
            self.checksum,
            self.preprocessing,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.x.shape[1:])

    def sizes(self) -> dict[str, int]:
        """How many examples each part has."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        found = {name: len(part.y) for name, part in parts.items()}
        return found if self.feed is None else {**found, "train": self.feed.rows}


def weighed(data: Dataset, class_weight: Literal["balanced"] | Mapping[str, float]) -> Dataset:
    """The data with rows to train on and to choose by that count by their class; test rows do not.

    A weight multiplies that of the row. Balanced: n / (K n_k) for the n_k rows of a class, of n in
    all and K classes that have some; of a stream, n and n_k are those of the rows in memory. A
    class that is not named counts once.
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
        Part(*part, (part.weights * factors[part.y]).float())
        for part in (data.train, data.validation)
    )
    feed = None if data.feed is None else data.feed.weighed(factors.float())
    return dataclasses.replace(data, train=train, validation=validation, feed=feed)


def parted(
    count: int,
    seed: int,
    name: str,
    given: Sequence[str | None] | None = None,
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
        given: the part of each row, where it is known; rows without one are parted.
        classes: class numbers, of which every part gets its fraction.
        groups: numbers of groups that stay together.
        times: order in time; the latest rows are the test part.
        without: a part that stays empty.
    """
    known: list[str | None] = [None] * count if given is None else list(given)
    found = {part: [i for i, own in enumerate(known) if own == part] for part in PARTS}
    free = torch.tensor([i for i, own in enumerate(known) if own is None], dtype=torch.long)
    if given is not None and any(known) and found["train"]:  # those that are absent come from train
        free = torch.tensor([i for i, own in enumerate(known) if own in (None, "train")])
        found["train"] = []
    wanted = {p: _FRACTIONS[p] for p in _FRACTIONS if not found[p] and p != without}
    taken = _sizes(len(free), wanted, name)
    order = _ordered(free, seed, classes, groups, times)
    cuts = _cuts(order, taken, groups, name)
    for part, rows in zip((*wanted, "train"), cuts, strict=True):
        found[part] += rows.tolist()
    return {part: torch.tensor(rows, dtype=torch.long) for part, rows in found.items()}


def _sizes(count: int, wanted: dict[str, float], name: str) -> list[int]:
    sizes = [max(1, round(fraction * count)) for fraction in wanted.values()]
    if sum(sizes) >= count:
        raise VardropError(
            f"Expected at least {len(sizes) + 2} rows to split {name} for training, validation and "
            f"test, but got {count}. Give more data."
        )
    return sizes


def _ordered(
    free: Tensor, seed: int, classes: Tensor | None, groups: Tensor | None, times: Tensor | None
) -> Tensor:
    """The rows so that slices of them are the parts: test first, training last."""
    generator = torch.Generator().manual_seed(seed)
    if times is not None:
        return free[times[free].argsort(descending=True, stable=True)]
    order = free[torch.randperm(len(free), generator=generator)]
    if groups is not None:
        own = groups[order]
        place = torch.randperm(int(groups.max()) + 1, generator=generator)
        return order[place[own].argsort(stable=True)]
    if classes is None:
        return order
    # The rows of a class at even distances from 0 to 1, with an offset of its own: a slice has the
    # same fraction of every class. A class's last row is trained on.
    own, key = classes[order], torch.empty(len(order), dtype=torch.float64)
    for number in own.unique().tolist():
        rows = (own == number).nonzero().flatten()
        offset = float(torch.rand((), generator=generator)) if len(rows) > 1 else 1 - 1e-9
        key[rows] = (torch.arange(len(rows), dtype=torch.float64) + offset) / len(rows)
    return order[key.argsort(stable=True)]


def _cuts(order: Tensor, sizes: list[int], groups: Tensor | None, name: str) -> list[Tensor]:
    """Slices of these sizes and the rest; none divides a group."""
    if groups is None:
        return list(order.split([*sizes, len(order) - sum(sizes)]))
    own = groups[order]
    edges = [0, *((own[1:] != own[:-1]).nonzero().flatten() + 1).tolist(), len(own)]
    if len(edges) < len(sizes) + 2:
        raise VardropError(
            f"Expected at least {len(sizes) + 1} groups to split {name}, but got {len(edges) - 1}."
        )
    cuts: list[int] = []
    inner, wanted = edges[1:-1], 0
    for later, size in zip(range(len(sizes) - 1, -1, -1), sizes, strict=True):
        wanted += size
        allowed = [e for e in inner[: len(inner) - later] if not cuts or e > cuts[-1]]
        cuts.append(min(allowed, key=lambda e: abs(e - wanted)))
    return list(order.tensor_split(cuts))


def parts_named(values: pandas.Series, column: str, source: str) -> list[str | None]:
    """The part that every row names; an empty cell names none."""
    found: list[str | None] = []
    for row, (value, absent) in enumerate(zip(values, values.isna(), strict=True)):
        text = "" if absent else str(value).strip().lower()
        if text and text not in _NAMES:
            raise VardropError(
                f"Expected train, validation or test in column '{column}' of {source}, but got "
                f"'{value}' in row {row + 1}."
            )
        found.append(_NAMES.get(text))
    return found


def checksum(*tensors: Tensor) -> str:
    """SHA-256 of tensors: their types, shapes and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"
