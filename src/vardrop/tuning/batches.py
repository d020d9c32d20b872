"""Where a loop takes its batches from: rows in memory, or a stream such as a `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vardrop._core.checks import check_integer
from vardrop._core.errors import VardropError
from vardrop.tuning.processes import World, own_generators

_SEEDS = 2**62
_STATE, _WHERE = "stream", "stream"  # in a checkpoint: torch's generator, and the loader's state
_END = object()
_PLAIN = (bool, int, float, str, type(None))


class Batch(NamedTuple):
    """What one process steps on; `share` is how often it counts in the mean over processes."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    share: float


class Feed(Protocol):
    """Gives the batches of an epoch, and takes up one that was interrupted."""

    device: torch.device

    @property
    def steps(self) -> int | None:
        """Steps per epoch; None where that is not known yet."""

    def batches(self, generator: torch.Generator, position: int) -> Iterable[Any]:
        """The batches of an epoch from a position on; the generator decides their order."""

    def take(self, batch: Any, world: World) -> Batch:
        """What this process steps on."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Where it stands, beside the position: tensors, and plain values."""

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Stand where `state` was taken."""


class Rows:
    """Rows in memory, in another order every epoch; a batch is their numbers."""

    def __init__(self, x: Tensor, y: Tensor, weight: Tensor | None, batch_size: int) -> None:
        if len(x) != len(y) or len(x) == 0:
            raise VardropError(
                f"Expected `x` and `y` to have the same positive length, but got {len(x)} and "
                f"{len(y)}."
            )
        check_integer("batch_size", batch_size)
        self.x, self.y, self.weight, self.batch_size = x, y, weight, batch_size
        self.device = x.device

    @property
    def steps(self) -> int:
        """Steps per epoch; the last, shorter batch is used too."""
        return -(-len(self.x) // self.batch_size)

    def batches(self, generator: torch.Generator, position: int) -> Iterable[Tensor]:
        """Numbers of rows."""
        order = torch.randperm(len(self.x), generator=generator)
        return order.split(self.batch_size)[position:]

    def take(self, batch: Tensor, world: World) -> Batch:
        """The rows of this process."""
        rows, share = world.slice(batch)
        weight = None if self.weight is None else self.weight[rows]
        return Batch(self.x[rows], self.y[rows], weight, share)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Nothing: the order follows from the loop's own generator."""
        return {}, {}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Nothing to do."""


class Streamed:
    """Batches (x, y) or (x, y, weight) of an iterable that is read anew in every epoch.

    What it draws from torch's generator, or from one of its own in `generator`, is seeded by epoch
    and kept apart from the noise of the training: an epoch that was interrupted is read again to
    where it was. A loader with `state_dict` and `load_state_dict` (the StatefulDataLoader of
    torchdata) is asked to go on there instead. Several processes all read everything, and each
    steps on its part of every batch.
    """

    def __init__(self, source: Iterable[Any], device: torch.device) -> None:
        if isinstance(source, Iterator) or not isinstance(source, Iterable):
            raise VardropError(
                "Expected `x` to be tensors with `y`, or batches that can be read in every epoch "
                f"anew, such as a DataLoader, but got {type(source).__name__}."
            )
        self.source: Any = source
        self.device = device
        self._seen: int | None = None
        self._generator = torch.get_rng_state()  # torch's, while the stream is read
        self._left: Any = None  # the state of a loader, where it was interrupted

    @property
    def steps(self) -> int | None:
        """Its length; that of the first epoch where it has none."""
        try:
            return len(self.source)
        except TypeError:
            return self._seen

    def batches(self, generator: torch.Generator, position: int) -> Iterator[Any]:
        """The batches themselves."""
        seed, left, self._left = _drawn(generator), self._left, None
        if position and left is not None:
            self.source.load_state_dict(left)
            skipped = position
        else:
            self._generator, skipped = torch.Generator().manual_seed(seed).get_state(), 0
            for own in _generators(self.source):
                own.manual_seed(seed)
        iterator = self._read(lambda: iter(self.source))
        while (batch := self._read(lambda: next(iterator, _END))) is not _END:
            skipped += 1
            if skipped > position:
                yield batch
        if skipped < (least := max(position, 1)):
            raise VardropError(
                f"Expected at least {least} batches from {type(self.source).__name__}, but got "
                f"{skipped}. It has to give the same ones in every epoch."
            )
        self._seen = skipped

    def _read(self, step: Any) -> Any:
        with own_generators():
            torch.set_rng_state(self._generator)
            try:
                return step()
            finally:
                self._generator = torch.get_rng_state()

    def take(self, batch: Any, world: World) -> Batch:
        """The part of this process, on the device of the objective."""
        x, y, weight = batch_parts(batch, self.source)
        share = 1.0
        if world.size > 1:
            rows, share = world.slice(torch.arange(len(x)))
            x, y, weight = x[rows], y[rows], None if weight is None else weight[rows]
        own = None if weight is None else weight.to(self.device)
        return Batch(x.to(self.device), y.to(self.device), own, share)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state of torch's generator in the stream, and that of the loader, if it has one."""
        tensors = {_STATE: self._generator}
        if not hasattr(self.source, "state_dict") or not hasattr(self.source, "load_state_dict"):
            return tensors, {}
        try:
            return tensors, {_WHERE: _told(self.source.state_dict(), tensors)}
        except TypeError:  # it holds what no checkpoint can: then it is read again
            return {_STATE: self._generator}, {}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Stand where `state` was taken."""
        self._generator = tensors[_STATE]
        self._left = _untold(values[_WHERE], tensors) if _WHERE in values else None


def _drawn(generator: torch.Generator) -> int:
    return int(torch.randint(_SEEDS, (), generator=generator))


def _generators(source: Any) -> list[torch.Generator]:
    """Generators of its own that a loader draws its order from."""
    places = (source, getattr(source, "sampler", None))
    found = [getattr(place, "generator", None) for place in places]
    return [g for g in found if isinstance(g, torch.Generator)]


def batch_parts(batch: Any, source: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs, targets and weights of a batch, checked; the source is named in errors."""
    whole = isinstance(batch, tuple | list) and len(batch) in (2, 3)
    if not whole or not all(isinstance(part, Tensor) and part.dim() for part in batch):
        raise VardropError(
            f"Expected batches (x, y) or (x, y, weight) of tensors from {type(source).__name__}, "
            f"but got {type(batch).__name__}."
        )
    lengths = [len(part) for part in batch]
    if len(set(lengths)) > 1 or lengths[0] == 0:
        raise VardropError(
            f"Expected the tensors of a batch of {type(source).__name__} to have the same positive "
            f"length, but got {' and '.join(map(str, lengths))}."
        )
    return batch[0], batch[1], batch[2] if len(batch) == 3 else None


def _told(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A loader's state as JSON, its tensors aside; a TypeError where it holds anything else."""
    if isinstance(value, Tensor):
        name = f"{_STATE}.{len(tensors)}"
        tensors[name] = value.clone()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"pairs": [[_told(k, tensors), _told(v, tensors)] for k, v in value.items()]}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_told(v, tensors) for v in value]}
    if type(value) not in _PLAIN:
        raise TypeError(type(value).__name__)
    return value


def _untold(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "pairs":
        return {_untold(k, tensors): _untold(v, tensors) for k, v in held}
    found = [_untold(v, tensors) for v in held]
    return tuple(found) if kind == "tuple" else found
