"""A data set as the application uses it: three parts, a task, a checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vardrop.data.preprocessing import Preprocessing, Task
from vardrop.errors import VardropError

Kind = Literal["image", "table"]


class Part(NamedTuple):
    """Inputs and targets."""

    x: Tensor
    y: Tensor


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
    def outputs(self) -> int:
        """How many outputs a net needs."""
        return len(self.classes) if self.task == "classification" else 1


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training, validation and test data with all that a net needs to know of them.

    Regression targets are (N, 1) and scaled by what the training part showed; `preprocessing`
    knows the way back.
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
        return {name: len(part.y) for name, part in parts.items()}


def shuffled(count: int, fractions: tuple[float, ...], seed: int, name: str) -> list[Tensor]:
    """Row numbers in random order: a part per fraction, at least one row each, then the rest."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    sizes = [max(1, round(fraction * count)) for fraction in fractions]
    if sum(sizes) >= count:
        raise VardropError(
            f"Expected at least {len(fractions) + 2} rows to split {name} for training, validation "
            f"and test, but got {count}. Give more data."
        )
    return list(order.split([*sizes, count - sum(sizes)]))


def checksum(*tensors: Tensor) -> str:
    """SHA-256 of tensors: their types, shapes and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"
