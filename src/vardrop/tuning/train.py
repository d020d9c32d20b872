"""One small loop: shuffled batches, a schedule for beta and one for the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vardrop._core.errors import NotFiniteError, VardropError
from vardrop.objective import ELBO
from vardrop.tuning.average import ParameterAverage
from vardrop.tuning.batches import Feed, Rows, Streamed
from vardrop.tuning.noise_check import NoiseCheck
from vardrop.tuning.processes import (
    ALONE,
    World,
    generator_states,
    seed_generators,
    set_generator_states,
)
from vardrop.tuning.step import Step

Schedule = Callable[[float], float]
Rates = Callable[[float], float | Sequence[float]]


class Epoch(NamedTuple):
    """What one epoch of training measured, averaged over its batches."""

    epoch: int
    loss: float
    nll: float
    kl: float
    beta: float


class Loop:
    """A training and where it stands: `run` goes on from there, `state` is what it needs to.

    Args:
        elbo: the objective; its net is put into training mode at every epoch.
        optimizer: over the parameters of `elbo`.
        x, y: the training data; or a stream for `x` and None for `y`: a `DataLoader`, or any other
            iterable of batches (x, y) or (x, y, weight) that can be read in every epoch anew.
        epochs: how many in all.
        batch_size: examples per step; the last, shorter batch is used too. A stream has its own.
        beta: schedule of the KL weight by epoch.
        rate: schedule by epoch of the factor on every group's initial learning rate; or of one
            factor for each group, in the order of the optimizer's.
        seed: of the shuffling, which has a generator of its own.
        step: how to make one step; a plain `Step` by default.
        world: the processes that share each batch.
        weight: for how many examples each one stands; see `ELBO.forward`.
        average: keep an exponential average of all parameters over steps, those of the noise too.
            The model holds it after every epoch and at the end.
    """

    def __init__(
        self,
        elbo: ELBO,
        optimizer: torch.optim.Optimizer,
        x: Tensor | Iterable[Any],
        y: Tensor | None,
        epochs: int,
        batch_size: int = 100,
        beta: Schedule | None = None,
        rate: Rates | None = None,
        seed: int = 0,
        step: Step | None = None,
        world: World = ALONE,
        weight: Tensor | None = None,
        average: bool = False,
    ) -> None:
        self.feed = _feed(x, y, weight, batch_size, elbo.beta.device)
        self.elbo, self.optimizer = elbo, optimizer
        self.epochs, self.batch_size, self.beta, self.rate = epochs, batch_size, beta, rate
        self.step, self.world = step or Step(elbo, optimizer), world
        self.average = ParameterAverage(elbo) if average else None
        self.epoch = self.position = 0
        self.sums = torch.zeros(3, device=self.feed.device)
        self._generator = torch.Generator().manual_seed(seed)
        self._shuffle = self._generator.get_state()  # as it was before this epoch's order
        self._base = [group["lr"] for group in optimizer.param_groups]

    @property
    def steps(self) -> int | None:
        """Steps per epoch; None before the first one of a stream without a length."""
        return self.feed.steps

    def run(self, after_step: Callable[[], None] | None = None) -> Iterator[Epoch]:
        """Train to the last epoch, yielding after every one."""
        noise, before = NoiseCheck(self.elbo.net), self.epoch
        steps = 0
        while self.epoch < self.epochs:
            self._begin_epoch()
            for batch in self._batches():
                self._step(batch)
                steps += 1
                if after_step is not None:
                    after_step()
            if self.epoch + 1 == self.epochs and before == 0 and self.elbo.beta > 0:
                noise.warn(steps)
            yield self._end_epoch()

    def _begin_epoch(self) -> None:
        self.elbo.train()
        if self.average is not None:
            self.average.use(False)
        if self.beta is not None:
            self.elbo.set_beta(self.beta(self.epoch))
        factor = self.rate(self.epoch) if self.rate is not None else 1.0
        factors = factor if isinstance(factor, Sequence) else [factor] * len(self._base)
        groups = self.optimizer.param_groups
        for group, lr, own in zip(groups, self._base, factors, strict=True):
            group["lr"] = lr * own

    def _batches(self) -> Iterable[Any]:
        self._generator.set_state(self._shuffle)
        return self.feed.batches(self._generator, self.position)

    def _step(self, batch: Any) -> None:
        x, y, weight, share = self.feed.take(batch, self.world)
        try:
            self.sums += self.step(x, y, share, weight)
        except NotFiniteError as found:
            raise NotFiniteError(
                f"Expected a finite loss, but got {found} in epoch {self.epoch + 1}, step "
                f"{self.position + 1}. Lower the learning rate, clip the gradients or lengthen "
                "the KL warm-up."
            ) from None
        if self.average is not None:
            self.average.update()
        self.position += 1

    def _end_epoch(self) -> Epoch:
        loss, nll, kl = (self.world.mean(self.sums) / self.position).tolist()
        done = Epoch(self.epoch, loss, nll, kl, float(self.elbo.beta))
        self.epoch, self.position = self.epoch + 1, 0
        self.sums = torch.zeros_like(self.sums)
        self._shuffle = self._generator.get_state()
        if self.average is not None:
            self.average.use(True)
        return done

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Where the training stands: tensors, and plain values."""
        more, values = self.feed.state()
        noise = generator_states(self.feed.device)
        tensors = {"sums": self.sums, "shuffle": self._shuffle, **noise, **more}
        where = {"epoch": self.epoch, "position": self.position, "batch_size": self.batch_size}
        averages, counts = self.average.state() if self.average is not None else ({}, {})
        return {**tensors, **averages}, {**where, **values, **counts}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Stand where `state` was taken; sets the global generators, which draw the noise.

        Where the batches have another size now, the epoch that was interrupted begins anew.
        """
        self.epoch, self.position = values["epoch"], values["position"]
        self.sums = self.sums.copy_(tensors["sums"].view(3))
        self._generator.set_state(tensors["shuffle"])
        self._shuffle = tensors["shuffle"]
        if values.get("batch_size", self.batch_size) != self.batch_size:
            self.position, self.sums = 0, torch.zeros_like(self.sums)
        if self.steps is not None and self.position > self.steps:
            raise ValueError(f"step {self.position} of {self.steps}")
        self.feed.load_state(tensors, values)
        if self.average is not None:
            self.average.load_state(tensors, values)
        own = 7919 * self.world.rank + self.epoch
        if self.world.first:
            set_generator_states(self.feed.device, tensors, own)
        else:  # the state is the first process's; the others draw their own
            seed_generators(self.feed.device, own)


def train(
    elbo: ELBO,
    optimizer: torch.optim.Optimizer,
    x: Tensor | Iterable[Any],
    y: Tensor | None,
    epochs: int,
    batch_size: int = 100,
    beta: Schedule | None = None,
    rate: Rates | None = None,
    seed: int = 0,
    average: bool = False,
) -> Iterator[Epoch]:
    """Train on tensors or a stream, yielding after every epoch. The arguments are those of `Loop`.

    >>> import torch, vardrop as vd
    >>> from vardrop.tuning import train
    >>> elbo = vd.ELBO(vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd()), vd.Categorical(), 20)
    >>> x, y = torch.randn(20, 4), torch.arange(20) % 3
    >>> [e.epoch for e in train(elbo, torch.optim.Adam(elbo.parameters()), x, y, epochs=2)]
    [0, 1]
    """
    loop = Loop(elbo, optimizer, x, y, epochs, batch_size, beta, rate, seed, average=average)
    return loop.run()


def _feed(x: Any, y: Tensor | None, weight: Tensor | None, size: int, device: torch.device) -> Feed:
    if y is not None:
        return Rows(x, y, weight, size)
    if isinstance(x, Tensor) or weight is not None:
        raise VardropError(
            "Expected `y` with tensors, or a stream of batches (x, y, weight) for `x` and no "
            f"`weight`, but got y=None with {type(x).__name__}."
        )
    return Streamed(x, device)
