"""Loaders that are trained on as they are: a sample of their rows, then batch after batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vardrop.data.preprocessing import Preprocessing
from vardrop.data.streams import SAMPLE, Stream
from vardrop.errors import VardropError, needed
from vardrop.training.feeding import batch_parts
from vardrop.training.processes import own_generators

if TYPE_CHECKING:
    import pandas

_PASSED_ON = ("generator", "sampler", "state_dict", "load_state_dict")  # what `Loop` looks for


@dataclass(frozen=True, eq=False)
class LoaderFeed:
    """The batches of a loader, as the net takes them: an iterable with the state of the loader.

    Args:
        loader: gives batches (x, y) or (x, y, weight).
        rows: how many examples an epoch has.
        found: the preprocessing of a table; None for inputs with more axes.
        classes: how many there are; 0 for regression.
        factors: what the rows of each class count besides.
    """

    loader: Any
    rows: int
    found: Preprocessing | None
    classes: int
    factors: Tensor | None = None

    def batched(self, size: int) -> LoaderFeed:
        """The same: a loader has batches of its own."""
        return self

    def weighed(self, factors: Tensor) -> LoaderFeed:
        """The same with factors on the weights by class."""
        return dataclasses.replace(self, factors=factors)

    def __getattr__(self, name: str) -> Any:
        if name in _PASSED_ON:
            return getattr(self.loader, name)
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return map(self._tensors, self.loader)

    def _tensors(self, batch: Any) -> tuple[Tensor, ...]:
        given, target, weight = batch_parts(batch, self.loader)
        if self.found is None:
            x, y = given.float(), target.long()
            if int(y.max()) >= self.classes or int(y.min()) < 0:
                raise VardropError(
                    f"Expected classes from 0 to {self.classes - 1}, as in the sample and in "
                    f"`validation`, but got {int(y.max())}. Add an example of it to `validation`."
                )
        else:
            names = [column.name for column in self.found.columns]
            frame = framed(given, target, self.found.target)
            source = "the loader"
            x = self.found.inputs(frame[names], source)
            y = self.found.targets(frame[self.found.target], source)
        if self.factors is not None:
            weight = self.factors[y] * (1 if weight is None else weight)
        return (x, y) if weight is None else (x, y, weight)


def framed(x: Tensor, y: Tensor, target: str) -> pandas.DataFrame:
    """Rows of two axes as a table, with the names of columns that arrays have."""
    pandas = needed("pandas")
    found = pandas.DataFrame(x.numpy(), columns=[f"x{i}" for i in range(x.shape[1])])
    return found.assign(**{target: y.reshape(len(x)).numpy()})


def sample_of(stream: Stream, seed: int) -> tuple[Tensor, Tensor]:
    """The first inputs and targets of a loader, whose draws are seeded."""
    loader: Any = stream.source
    inputs, targets, count = [], [], 0
    with own_generators(seed=seed):
        for batch in loader:
            x, y, _ = batch_parts(batch, loader)
            inputs.append(x)
            targets.append(y)
            count += len(x)
            if count >= SAMPLE:
                break
    if not count:
        raise VardropError(f"Expected {stream.name} to have examples, but got none.")
    return torch.cat(inputs), torch.cat(targets)


def rows_of(stream: Stream) -> int:
    """How many examples a loader gives in an epoch."""
    if stream.rows is not None:
        return stream.rows
    try:
        loader: Any = stream.source
        whole = len(loader.sampler)
        return len(loader) * loader.batch_size if loader.drop_last else whole
    except (AttributeError, TypeError):
        raise VardropError(
            f"Expected `rows`, because {stream.name} does not say how many examples it gives in an "
            "epoch, but got none. Pass vardrop.Stream(loader, rows=...)."
        ) from None
