"""Nets of one kind that are trained side by side, each on rows and with a KL weight of its own.

A step of a small net costs calls, hardly any arithmetic; a dozen nets under one vmap cost little
more than two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from vardrop._core.errors import NotFiniteError
from vardrop.objective import ELBO
from vardrop.tuning.train import Loop, Schedule

Rows = tuple[Tensor, Tensor, Tensor | None]  # inputs, targets, weights
Groups = Callable[[nn.Module], list[dict[str, Any]]]


class Members(Loop):
    """The trainings of several objectives as one loop, which draws other noise for each.

    Adam moves every number by itself, so each net is trained as if it were alone. All have as many
    steps: from every epoch the larger sets of rows leave some out, others each time.

    Args:
        elbos: objectives that differ in their numbers alone.
        rows: inputs, targets and weights (or None) of each.
        groups: the parameter groups of one objective, with learning rates.
        epochs: how many in all.
        batch_size: examples per step and net.
        betas: schedules of the KL weight by epoch, one for each.
        rate: schedule by epoch of the factor on the learning rate.
        seed: of the shuffling.

    >>> import vardrop as vd
    >>> elbos = [vd.ELBO(nn.Linear(2, 1), vd.Gaussian(), 8, beta=0) for _ in range(3)]
    >>> rows = [(torch.randn(8, 2), torch.randn(8, 1), None) for _ in elbos]
    >>> groups = lambda elbo: [{"params": list(elbo.parameters()), "lr": 0.1}]
    >>> loop = Members(elbos, rows, groups, 2, 4, [lambda epoch: 0.0] * 3, lambda epoch: 1.0)
    >>> [done.epoch for done in loop.run()], len(loop.states())
    ([0, 1], 3)
    """

    checks_noise = False  # the objective whose noise is read is not the one that is trained

    def __init__(
        self,
        elbos: Sequence[ELBO],
        rows: Sequence[Rows],
        groups: Groups,
        epochs: int,
        batch_size: int,
        betas: Sequence[Schedule],
        rate: Schedule,
        seed: int = 0,
    ) -> None:
        first = elbos[0]
        parameters, self.buffers = stack_module_state(list(elbos))
        self.parameters = {n: p.detach().requires_grad_() for n, p in parameters.items()}
        names = {p: name for name, p in first.named_parameters()}
        stacked = [
            {**group, "params": [self.parameters[names[p]] for p in group["params"]]}
            for group in groups(first)
        ]
        self.betas, self.counts = betas, [len(x) for x, *_ in rows]
        self.x, self.y = torch.cat([x for x, _, _ in rows]), torch.cat([y for _, y, _ in rows])
        weights = [weight for _, _, weight in rows if weight is not None]
        optimizer = torch.optim.Adam(stacked, fused=True)
        super().__init__(first, optimizer, self.x, self.y, epochs, batch_size, None, rate, seed)
        self.weight = torch.cat(weights) if weights else None

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return -(-min(self.counts) // self.batch_size)

    def losses(self, rows: Tensor, buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, NLL and KL of every net on its own rows (nets, batch)."""

        def one(*state: Any) -> tuple[Tensor, Tensor, Tensor]:
            found = functional_call(self.elbo, state[:2], state[2:])
            return found.loss, found.nll, found.kl

        data = [self.x[rows], self.y[rows]]
        if self.weight is not None:
            data.append(self.weight[rows])
        run = torch.vmap(one, randomness="different")
        found: tuple[Tensor, Tensor, Tensor] = run(self.parameters, buffers, *data)
        return found

    def probe(self) -> None:
        """Raise where the nets cannot run side by side; nothing is changed."""
        self.elbo.train()
        with torch.no_grad():
            self.losses(self._batches()[0], {n: b.clone() for n, b in self.buffers.items()})

    def _begin_epoch(self) -> None:
        super()._begin_epoch()
        now = [beta(self.epoch) for beta in self.betas]
        self.buffers["beta"].copy_(torch.tensor(now))

    def _batches(self) -> tuple[Tensor, ...]:
        self._generator.set_state(self._shuffle)
        orders, begin, size = [], 0, min(self.counts)
        for count in self.counts:
            orders.append(begin + torch.randperm(count, generator=self._generator)[:size])
            begin += count
        return torch.stack(orders).split(self.batch_size, 1)[self.position :]

    def _step(self, batch: Tensor) -> None:
        loss, nll, kl = self.losses(batch, self.buffers)
        if not bool(loss.isfinite().all()):
            raise NotFiniteError(
                f"Expected a finite loss, but got {loss.tolist()} in epoch {self.epoch + 1}, step "
                f"{self.position + 1}. Lower the learning rate or lengthen the KL warm-up."
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.sum().backward()
        self.optimizer.step()
        self.sums += torch.stack([t.detach().mean() for t in (loss, nll, kl)])
        self.position += 1

    def states(self) -> list[dict[str, Any]]:
        """The numbers of every net, by the names of its objective."""
        own = (*self.elbo.named_parameters(), *self.elbo.named_buffers())
        stacked = {id(t): (self.parameters | self.buffers)[name] for name, t in own}
        found = self.elbo.state_dict(keep_vars=True)  # two names may have one tensor
        return [
            {n: stacked[id(t)][k].detach().clone() for n, t in found.items() if id(t) in stacked}
            for k in range(len(self.counts))
        ]
