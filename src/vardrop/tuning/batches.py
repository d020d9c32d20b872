"""Sources of training batches: tensors in memory, or a stream such as a `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vardrop._core.calls import Batch, map_tensors, num_examples, plain_batch, tensors_in
from vardrop._core.checks import check_integer
from vardrop._core.errors import VardropError
from vardrop._core.processes import ALONE, World
from vardrop._core.rng import preserve_rng

_SEEDS = 2**62
_END = object()


class TrainBatch(NamedTuple):
    """The examples of one step in one process. `share` is their weight in the mean of processes."""

    x: Batch
    y: Tensor
    weight: Tensor | None
    share: float


class BatchSource:
    """The batches of an epoch. An interrupted epoch can be continued.

    Args:
        source: tensors or an iterable of batches (x, y) or (x, y, weight).
        device: the device of the batches.
        world: the processes that share each batch.
    """

    steps: int | None  # per epoch, or None if their number is not known yet

    def __init__(self, source: Any, device: torch.device, world: World = ALONE) -> None:
        self.source, self.device, self.world = source, device, world

    def read(self, generator: torch.Generator, position: int) -> Iterable[object]:
        """The complete batches of an epoch from a position on, in the order of the generator."""
        raise NotImplementedError

    def batches(self, generator: torch.Generator, position: int = 0) -> Iterator[TrainBatch]:
        """The batches of this process in an epoch from a position on."""
        for batch in self.read(generator, position):
            parts, share = check_batch(batch, f"batches of {type(self.source).__name__}"), 1.0
            if self.world.size > 1:
                indices, share = self.world.slice(torch.arange(num_examples(parts)))
                parts = map_tensors(itemgetter(indices), parts)
            x, y, *weight = map_tensors(lambda tensor: tensor.to(self.device), parts)
            yield TrainBatch(x, y, weight[0] if weight else None, share)


class TensorBatches(BatchSource):
    """Examples in memory, in a new order in every epoch.

    Args:
        tensors: inputs, targets and weights or None.
        batch_size: examples per batch.
        device, world: as for `BatchSource`.
        drop_last: leave out the last, shorter batch of an epoch.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor | None],
        batch_size: int,
        device: torch.device,
        world: World = ALONE,
        drop_last: bool = False,
    ) -> None:
        super().__init__([t for t in tensors if t is not None], device, world)
        check_batch(self.source, "the data")
        check_integer("batch_size", batch_size)
        self.batch_size = batch_size
        complete, rest = divmod(len(self.source[0]), batch_size)
        self.steps = complete if drop_last else complete + (rest > 0)

    def read(self, generator: torch.Generator, position: int) -> Iterable[object]:
        order = torch.randperm(len(self.source[0]), generator=generator)
        for indices in order.split(self.batch_size)[position : self.steps]:
            yield [tensor[indices] for tensor in self.source]


class StreamBatches(BatchSource):
    """Batches (x, y) or (x, y, weight) of an iterable that is read again in every epoch.

    The numbers that the stream draws from torch's generator, or from its own `generator`, are
    seeded in every epoch and do not affect the noise of the training. An interrupted epoch is read
    again up to its position. With several processes each one reads everything and uses its part of
    every batch.
    """

    def __init__(
        self, source: Any, device: torch.device, world: World = ALONE, name: str = "x"
    ) -> None:
        super().__init__(source, device, world)
        check_rereadable(name, source)
        try:
            self.steps = len(source)
        except TypeError:
            self.steps = None

    def read(self, generator: torch.Generator, position: int) -> Iterable[object]:
        seed, step = int(torch.randint(_SEEDS, (), generator=generator)), 0
        for owner in (self.source, getattr(self.source, "sampler", None)):
            stream_generator = getattr(owner, "generator", None)
            if isinstance(stream_generator, torch.Generator):
                stream_generator.manual_seed(seed)
        state, iterator = torch.Generator().manual_seed(seed).get_state(), None
        while True:
            with preserve_rng():  # the stream has a separate state of torch's generator
                torch.set_rng_state(state)
                iterator = iter(self.source) if iterator is None else iterator
                batch = next(iterator, _END)
                state = torch.get_rng_state()
            if batch is _END:
                break
            step += 1
            if step > position:
                yield batch
        if step < (least := max(position, 1)):
            raise VardropError(
                f"Expected at least {least} batches from {type(self.source).__name__}, but got "
                f"{step}. It must give the same batches in every epoch."
            )
        self.steps = step if self.steps is None else self.steps


def check_rereadable(name: str, data: object) -> None:
    """Raise if training data cannot be read once per epoch."""
    scalar = getattr(data, "ndim", 1) == 0
    if isinstance(data, Iterator) or not isinstance(data, Iterable) or scalar:
        raise VardropError(
            f"Expected `{name}` to be tensors, or batches that can be read again in every epoch, "
            f"such as a list or a DataLoader, but got {type(data).__name__}."
        )


def check_batch(batch: object, name: str) -> tuple[Any, ...]:
    """The parts of a batch (x, y) or (x, y, weight)."""
    x, *others = batch if isinstance(batch, tuple | list) and batch else [()]
    x, are_tensors = plain_batch(x), all(isinstance(p, Tensor) and p.dim() for p in others)
    if not tensors_in(x) or len(others) not in (1, 2) or not are_tensors:
        raise VardropError(
            f"Expected {name} to be tensors (x, y) or (x, y, weight), but got "
            f"{type(batch).__name__}."
        )
    lengths = [len(part) for part in (x, *others) if isinstance(part, Tensor) and part.dim()]
    if len(set(lengths)) > 1 or lengths[0] == 0:
        raise VardropError(
            f"Expected {name} to have the same positive length in all tensors, but got "
            f"{' and '.join(map(str, lengths))}."
        )
    return x, *others
