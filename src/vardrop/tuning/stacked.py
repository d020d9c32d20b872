"""Models of one architecture that are trained together, each with its own data and KL weight.

A step of a small model is mostly overhead of calls. A dozen models under one vmap cost little more
than two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from vardrop.objective import ELBO
from vardrop.objective.schedules import Schedule
from vardrop.tuning.minimize import Callback, Position, minimize

Examples = tuple[Tensor, Tensor, Tensor | None]  # inputs, targets, weights
Groups = Callable[[nn.Module], list[dict[str, Any]]]


class StackedTraining(Callback):
    """The trainings of several objectives in one loop, with different noise for each.

    Adam updates every number separately, so each model is trained as if it were alone. All models
    take the same number of steps: larger data sets leave out some examples in every epoch, and
    different ones each time.

    Args:
        elbos: objectives that differ only in their numbers.
        data: inputs, targets and weights (or None) of each objective.
        groups: makes the parameter groups of one objective, with learning rates.
        epochs: the number of epochs.
        batch_size: examples per step and model.
        betas: schedules of the KL weight by epoch, one for each objective.
        rate: schedule by epoch of the factor on the learning rates.
        seed: of the shuffling.

    >>> import vardrop as vd
    >>> elbos = [vd.ELBO(nn.Linear(2, 1), vd.Gaussian(), 8, beta=0) for _ in range(3)]
    >>> data = [(torch.randn(8, 2), torch.randn(8, 1), None) for _ in elbos]
    >>> groups = lambda elbo: [{"params": list(elbo.parameters()), "lr": 0.1}]
    >>> zero, one = lambda epoch: 0.0, lambda epoch: 1.0
    >>> training = StackedTraining(elbos, data, groups, 2, 4, [zero] * 3, one)
    >>> training.run()
    >>> len(training.states())
    3
    """

    def __init__(
        self,
        elbos: Sequence[ELBO],
        data: Sequence[Examples],
        groups: Groups,
        epochs: int,
        batch_size: int,
        betas: Sequence[Schedule],
        rate: Schedule,
        seed: int = 0,
    ) -> None:
        self.elbo, self.epochs, self.batch_size = elbos[0], epochs, batch_size
        self.betas, self.rate, self.epoch, self.position = betas, rate, 0, 0
        parameters, self.buffers = stack_module_state(list(elbos))
        self.parameters = {n: p.detach().requires_grad_() for n, p in parameters.items()}
        names = {p: name for name, p in self.elbo.named_parameters()}
        stacked = [
            {**group, "params": [self.parameters[names[p]] for p in group["params"]]}
            for group in groups(self.elbo)
        ]
        self.optimizer = torch.optim.Adam(stacked, fused=True)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.counts = [len(x) for x, *_ in data]
        self.tensors = [torch.cat(part) for part in zip(*data, strict=True) if part[0] is not None]
        self.steps = -(-min(self.counts) // batch_size)  # per epoch
        self._generator = torch.Generator().manual_seed(seed)

    def run(self, *callbacks: Callback) -> None:
        """Train to the last epoch."""
        minimize(
            lambda batch, at: self.losses(batch, self.buffers).sum(),
            self.batches,
            self.optimizer,
            epochs=self.epochs,
            schedule=lambda at: [lr * self.rate(at.epoch) for lr in self._rates],
            callbacks=[self, *callbacks],
        )

    def losses(self, batch: Tensor, buffers: dict[str, Tensor]) -> Tensor:
        """The loss of every model on its own examples, whose indices are (models, batch)."""

        def one(
            parameters: dict[str, Tensor], buffers: dict[str, Tensor], *examples: Tensor
        ) -> Tensor:
            return functional_call(self.elbo, (parameters, buffers), examples).loss

        run = torch.vmap(one, randomness="different")
        return run(self.parameters, buffers, *(t[batch] for t in self.tensors))

    def check_vmap(self) -> None:
        """Raise a RuntimeError if the models cannot run under vmap. The models are unchanged."""
        self.elbo.train()
        state = self._generator.get_state()
        with torch.no_grad():
            buffers = {n: b.clone() for n, b in self.buffers.items()}
            self.losses(self.batches(Position())[0], buffers)
        self._generator.set_state(state)

    def batches(self, at: Position) -> tuple[Tensor, ...]:
        """The indices of the examples of an epoch, in batches of shape (models, batch)."""
        orders, begin, size = [], 0, min(self.counts)
        for count in self.counts:
            orders.append(begin + torch.randperm(count, generator=self._generator)[:size])
            begin += count
        return torch.stack(orders).split(self.batch_size, 1)

    def on_epoch_start(self, at: Position) -> None:
        self.elbo.train()
        self.buffers["beta"].copy_(torch.tensor([beta(at.epoch) for beta in self.betas]))

    def states(self) -> list[dict[str, Tensor]]:
        """The state dict of every objective."""
        tensors = (*self.elbo.named_parameters(), *self.elbo.named_buffers())
        stacked = {id(t): (self.parameters | self.buffers)[name] for name, t in tensors}
        state = self.elbo.state_dict(keep_vars=True)  # two names may share one tensor
        return [
            {n: stacked[id(t)][k].detach().clone() for n, t in state.items() if id(t) in stacked}
            for k in range(len(self.counts))
        ]
