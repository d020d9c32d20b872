"""Train an objective: shuffled batches, schedules of the KL weight and of the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vardrop._core.checks import check_choice, check_number
from vardrop._core.errors import VardropError
from vardrop._core.processes import ALONE, World
from vardrop._core.rng import generator_states, seed_generators, set_generator_states
from vardrop.objective import ELBO
from vardrop.objective.compile import COMPILE_OPTIONS
from vardrop.objective.schedules import Schedule
from vardrop.tuning.batches import BatchSource, StreamBatches, TensorBatches, TrainBatch
from vardrop.tuning.callbacks import NoiseCheck, ParameterAverage
from vardrop.tuning.minimize import Callback, Position, ShowProgress, explain_nonfinite, minimize

Rates = Callable[[float], float | Sequence[float]]
Precision = Literal["float32", "bfloat16"]


class Epoch(NamedTuple):
    """The loss and its parts in one epoch, averaged over its batches.

    Args:
        epoch: the number of the epoch, from 0.
        loss: the negative ELBO per example.
        nll: the negative log-likelihood per example.
        kl: the KL divergence.
        beta: the weight of the KL.
    """

    epoch: int
    loss: float
    nll: float
    kl: float
    beta: float


class Loop(Callback):
    """A training and its progress. `run` continues from there, and `state` can be stored.

    Args:
        elbo: the objective. Its model is put into training mode in every epoch.
        optimizer: over the parameters of `elbo`.
        x, y: the training data; or a stream for `x` and None for `y`: a `DataLoader`, or any other
            iterable of batches (x, y) or (x, y, weight) that can be read again in every epoch.
        epochs: the number of epochs.
        batch_size: examples per step; the last, shorter batch is used too. A stream has its own.
        beta: schedule of the KL weight by epoch.
        rate: schedule by epoch of the factor on the initial learning rate of every parameter group,
            or of one factor for each group.
        seed: of the shuffling, which has its own generator.
        world: the processes that share each batch.
        weight: for how many examples each one counts; see `ELBO.forward`.
        average: keep an exponential average of all parameters over steps, including the noise
            parameters. The model holds the average after every epoch and at the end.
        max_norm: the largest norm of the gradient; None for no limit.
        precision: "bfloat16" runs the forward pass under autocast.
        compile: pass the objective through `torch.compile`.
    """

    def __init__(
        self,
        elbo: ELBO,
        optimizer: torch.optim.Optimizer,
        x: Tensor | Iterable[object],
        y: Tensor | None,
        epochs: int,
        batch_size: int = 100,
        beta: Schedule | None = None,
        rate: Rates | None = None,
        seed: int = 0,
        *,
        world: World = ALONE,
        weight: Tensor | None = None,
        average: bool = False,
        max_norm: float | None = None,
        precision: Precision = "float32",
        compile: bool = False,
    ) -> None:
        check_number("max_norm", 1 if max_norm is None else max_norm, above=0)
        check_choice("precision", precision, get_args(Precision))
        if isinstance(x, Tensor) != (y is not None) or (y is None and weight is not None):
            raise VardropError(
                "Expected `y` with a tensor `x`, or a stream of batches (x, y, weight) for `x` and "
                f"no `y` and `weight`, but got {type(x).__name__} and {type(y).__name__}."
            )
        device = elbo.beta.device
        self.source: BatchSource = (
            TensorBatches((x, y, weight), batch_size, device, world)
            if isinstance(x, Tensor)
            else StreamBatches(x, device, world)
        )
        self.elbo, self.optimizer, self.world = elbo, optimizer, world
        self.epochs, self.batch_size, self.beta, self.rate = epochs, batch_size, beta, rate
        self.max_norm, self.precision, self.compile = max_norm, precision, compile
        self.average = ParameterAverage(elbo) if average else None
        self.epoch = self.position = 0
        self.sums = torch.zeros(3, device=device)  # of loss, NLL and KL in this epoch
        self._generator = torch.Generator().manual_seed(seed)
        self._shuffle = self._generator.get_state()  # before the order of this epoch was drawn
        self._rates = [group["lr"] for group in optimizer.param_groups]

    @cached_property
    def forward(self) -> Any:
        """The objective, with gradients averaged over the processes, compiled if requested."""
        wrapped = self.world.wrap(self.elbo)
        return torch.compile(wrapped, options=COMPILE_OPTIONS) if self.compile else wrapped

    @property
    def steps(self) -> int | None:
        """Steps per epoch, or None before the first epoch of a stream without a length."""
        return self.source.steps

    def run(self, *callbacks: Callback, progress: bool | None = False) -> Iterator[Epoch]:
        """Train to the last epoch.

        Args:
            callbacks: called during the training, in this order.
            progress: show a progress line on standard error; None shows it on a terminal.

        Returns:
            An iterator that trains one epoch per item, and yields its losses.
        """
        steps = self.epochs * self.steps if self.steps else None
        checks = [NoiseCheck(self.elbo, self.epochs)] if self.epoch == 0 else []
        averages = [] if self.average is None else [self.average]
        with ShowProgress("train", steps, progress) as line:
            line.done = self.epoch * (self.steps or 0) + self.position
            while self.epoch < self.epochs:
                at = minimize(
                    self.loss,
                    self.batches,
                    self.optimizer,
                    epochs=self.epoch + 1,
                    schedule=None if self.rate is None else self._schedule,
                    callbacks=[self, *averages, *checks, line, *callbacks],
                    start=Position(self.epoch, self.position),
                    max_norm=self.max_norm,
                    explain=lambda batch: explain_nonfinite(self.elbo, batch.x, batch.y),
                )
                if at.step == 0:
                    yield self.last
                if at.stopped:
                    return

    def _schedule(self, at: Position) -> list[float]:
        factor = self.rate(at.epoch) if self.rate else 1.0
        factors = factor if isinstance(factor, Sequence) else [factor] * len(self._rates)
        return [lr * factor for lr, factor in zip(self._rates, factors, strict=True)]

    def batches(self, at: Position) -> Iterable[TrainBatch]:
        """The remaining batches of the current epoch.

        Args:
            at: the progress.

        Returns:
            The batches of this process.
        """
        self._generator.set_state(self._shuffle)
        return self.source.batches(self._generator, at.step)

    def loss(self, batch: TrainBatch, at: Position) -> Tensor:
        """The loss of the part of a batch for this process.

        Args:
            batch: the examples of this process.
            at: the progress.

        Returns:
            The loss, a scalar.
        """
        x, y, weight, share = batch
        mixed, device = self.precision == "bfloat16", self.elbo.beta.device
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            out = self.forward(x, y) if weight is None else self.forward(x, y, weight)
        loss: Tensor = out.loss
        if share != 1.0:  # every process has the whole KL, but only a part of the likelihood
            loss = loss + (share - 1) * (loss - out.beta * out.kl / self.elbo.num_data)
        self._parts = torch.stack([loss.detach(), share * out.nll.detach(), out.kl.detach()])
        return loss

    def on_epoch_start(self, at: Position) -> None:
        self.elbo.train()
        if self.beta is not None:
            self.elbo.set_beta(self.beta(at.epoch))

    def on_step(self, at: Position, loss: Tensor) -> None:
        self.sums += self._parts
        self.position = at.step

    def on_epoch_end(self, at: Position) -> None:
        loss, nll, kl = (self.world.all_reduce_mean(self.sums) / self.position).tolist()
        self.last = Epoch(self.epoch, loss, nll, kl, float(self.elbo.beta))
        self.epoch, self.position = at.epoch, 0
        self.sums = torch.zeros_like(self.sums)
        self._shuffle = self._generator.get_state()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The progress of the training: tensors, and JSON values."""
        tensors = {"sums": self.sums, "shuffle": self._shuffle}
        values = {"epoch": self.epoch, "position": self.position, "batch_size": self.batch_size}
        averages, counts = self.average.state() if self.average is not None else ({}, {})
        return tensors | generator_states(self.elbo.beta.device) | averages, values | counts

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue from a stored state.

        It sets the global generators, which draw the noise. If the batches have another size now,
        the interrupted epoch starts again.

        Args:
            tensors, values: the two parts of `state`.
        """
        self.epoch, self.position = values["epoch"], values["position"]
        self.sums = self.sums.copy_(tensors["sums"].view(3))
        self._generator.set_state(tensors["shuffle"])
        self._shuffle = tensors["shuffle"]
        if values.get("batch_size", self.batch_size) != self.batch_size:
            self.position, self.sums = 0, torch.zeros_like(self.sums)
        if self.steps is not None and self.position > self.steps:
            raise ValueError(f"step {self.position} of {self.steps}")
        if self.average is not None:
            self.average.load_state(tensors, values)
        seed, device = 7919 * self.world.rank + self.epoch, self.elbo.beta.device
        if self.world.first:
            set_generator_states(device, tensors, seed)
        else:  # the first process stored its state
            seed_generators(device, seed)


def train(
    elbo: ELBO,
    optimizer: torch.optim.Optimizer,
    x: Tensor | Iterable[object],
    y: Tensor | None,
    epochs: int,
    batch_size: int = 100,
    beta: Schedule | None = None,
    rate: Rates | None = None,
    seed: int = 0,
    average: bool = False,
    progress: bool | None = None,
) -> Iterator[Epoch]:
    """Train on tensors or a stream, and yield after every epoch.

    If it is interrupted (Ctrl-C), the model keeps the parameters of the last step.

    Args:
        elbo, optimizer, x, y, epochs, batch_size, beta, rate, seed, average: as for `Loop`.
        progress: show a progress line on standard error; None shows it on a terminal.

    Returns:
        An iterator of `Epoch`. Training happens while you iterate.

    >>> import torch, vardrop as vd
    >>> from vardrop.tuning import train
    >>> elbo = vd.ELBO(vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd()), vd.Categorical(), 20)
    >>> x, y = torch.randn(20, 4), torch.arange(20) % 3
    >>> [e.epoch for e in train(elbo, torch.optim.Adam(elbo.parameters()), x, y, epochs=2)]
    [0, 1]
    """
    loop = Loop(elbo, optimizer, x, y, epochs, batch_size, beta, rate, seed, average=average)
    return loop.run(progress=progress)
