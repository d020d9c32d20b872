"""Loaders that are trained on as they are: a sample of their rows, then batch after batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vardrop._core.errors import VardropError, needed
from vardrop.app.data.preprocessing import Preprocessing
from vardrop.app.data.streams import SAMPLE, Stream
from vardrop.tuning.batches import batch_parts
from vardrop.tuning.processes import own_generators

if TYPE_CHECKING:
    import pandas


@dataclass(eq=False)
class LoaderFeed:
    """The batches of a loader, as the net takes them: an iterable with the state of the loader.

    An epoch ends once it has had `rows` examples, so that a loader may be endless.

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
    _seen: int = 0  # examples of this epoch so far

    def batched(self, size: int) -> LoaderFeed:
        """The same: a loader has batches of its own."""
        return self

    def weighed(self, factors: Tensor) -> LoaderFeed:
        """The same with factors on the weights by class."""
        return dataclasses.replace(self, factors=factors)

    def __getattr__(self, name: str) -> Any:
        """What `Loop` looks for, as far as the loader has it: its generators and its state."""
        own = {"state_dict": self._state, "load_state_dict": self._load_state}
        if name not in (*own, "generator", "sampler"):
            raise AttributeError(name)
        found = getattr(self.loader, name)
        return own.get(name, found)

    def _state(self) -> dict[str, Any]:
        return {"seen": self._seen, "loader": self.loader.state_dict()}

    def _load_state(self, state: dict[str, Any]) -> None:
        self._seen = state["seen"]
        self.loader.load_state_dict(state["loader"])

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for batch in self.loader:
            found = self._tensors(batch)
            self._seen += len(found[0])
            yield found
            if self._seen >= self.rows:
                break
        seen, self._seen = self._seen, 0
        if seen < self.rows:
            raise VardropError(
                f"Expected {self.rows} examples in an epoch of {type(self.loader).__name__}, but "
                f"got {seen}. Pass vardrop.Stream(loader, rows={seen})."
            )

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
