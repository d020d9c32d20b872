"""Slim a trained net: gates find the units that a budget can do without, they go, the rest learns.

The gates of `compression.unit_gates` are trained with the weights, under a price on the expected
cost that rises until the budget holds; then the least willing units are cut out at once, and the
same cycle of the learning rate goes on with the plain small net.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from vardrop._core.calls import call, one_tensor, tensors_in
from vardrop._core.checks import check_choice, check_integer, check_number
from vardrop._core.errors import NotFiniteError, VardropError
from vardrop._core.torch_private import tree_map_only
from vardrop.compression import ShrinkPlan, Shrunk, shrink
from vardrop.compression.costs import layer_costs
from vardrop.compression.mask import decompose_layers
from vardrop.compression.probes import (
    Data,
    Inputs,
    batches,
    check_plain,
    check_runs,
    first_rows,
    outputs,
    to_arguments,
)
from vardrop.compression.unit_gates import Quantity, UnitGates
from vardrop.tuning.batchnorm import reestimate_batchnorm
from vardrop.tuning.processes import own_generators
from vardrop.tuning.slim_report import WAYS, Cost, Slimmed, dead_ends, latencies, timed
from vardrop.tuning.supplied import Batches, Loss, judge_for

_GATED, _AT_MOST = 0.15, 0.4  # fraction of the steps that train gates: per halving, and at most
_ANNEALED = 0.7  # fraction of those in which the budget tightens
_RHO, _DUAL = 20.0, 0.5  # of the quadratic penalty, and of the steps of the multiplier
_GATE_LR, _REACH = 0.05, 6.0  # the least learning rate of gates; how far they have to come
_STEPS = 1000  # where nothing is said, five epochs, and more until there are so many steps
_TIMED = 64  # rows of the batch that is timed
_WARM, _FIRST = 0.3, 0.04  # of the learning rate: fraction of the steps that it rises, its start
_MEASURED = 50  # batches that BatchNorm is measured on in the end
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_TRIES = 5  # nets that are timed to learn how the latency follows the MACs
_LADDER, _MILD = (0.5, 0.25, 0.12, 0.06), (0.7, 0.85)  # fractions of the MACs that `max_drop` tries

_Trained = tuple[nn.Module, ShrinkPlan, tuple[str, ...]]  # the net, the cut, what had to stay


def slim(
    net: nn.Module,
    train: Data,
    validation: Data,
    *,
    macs: float | None = None,
    latency: float | None = None,
    bytes: float | None = None,
    max_drop: float | None = None,
    epochs: int | None = None,
    lr: float = 2e-3,
    loss: Loss | None = None,
    multiple: int = 1,
    seed: int = 0,
    ways: Sequence[str] = ("torch", "onnxruntime"),
) -> Slimmed:
    """A smaller plain net from a trained one: fewer channels and units, trained again to a budget.

    Every set of units that can only go together has a hard concrete gate z, open (exactly one) at
    the start. For about a tenth of the steps per halving of the cost, weights and gates learn
    together,

        min over w, log alpha of  E_z loss + lambda (E cost - goal) + rho (E cost - goal)_+^2,

    where E cost follows from P(z > 0), the goal falls to the budget, and lambda rises while it is
    missed. Then the units of the smallest log alpha are cut out, so that the budget holds exactly,
    and the plain small net learns for the rest of the cycle.

    Expect: MACs and bytes as asked, latency falling less than the MACs (small layers are bound by
    memory), and at half of the MACs about the score of the given net trained equally long.

    Args:
        net: a trained plain net; left as it is.
        train: inputs and targets as two tensors, or batches of them, read once per epoch.
        validation: the same, of held-out data, to score on.
        macs, latency, bytes: the fraction to be left, in (0, 1), of the multiplications per example
            (of dense, convolutional, recurrent and attention layers), of the measured time in torch
            for a batch of at most 64 rows of `validation`, or of the bytes of all tensors.
        max_drop: instead, the smallest of a few nets that loses at most this much on validation
            data: of accuracy, so that 0.002 is 0.2 points; by which fraction the RMSE may grow; or
            how much a `loss` of your own may grow. Trains several nets.
        epochs: through `train`; by default five, or as many as make 1000 steps.
        lr: the highest learning rate (Adam, one cycle). Take that of your training.
        loss: `loss(output, target)`, such as a likelihood; by default the cross entropy for integer
            targets, the squared error for others. It should be of order one.
        multiple: layers keep multiples of so many units, where they have as many. onnxruntime on a
            CPU and most GPUs run multiples of 8 or 16 channels faster.
        seed: of the gates' draws and of the order of tensors in `train`.
        ways: how both nets are timed for the report: "torch", "onnxruntime" (where it is
            installed), "compiled" (`torch.compile`, which takes a while).

    Returns:
        The net with its report: scores, MACs, weights, bytes and measured latency, before and
        after. Where the budget cannot be met, or the score collapses, a warning says so, and
        `notes` keep it.

    >>> import torch, vardrop as vd
    >>> net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    >>> x = torch.randn(256, 8)
    >>> data = x, x[:, :3].argmax(1)
    >>> small = vd.slim(net, data, data, macs=0.5, epochs=30, ways=["torch"])
    >>> small.net
    Sequential(
      (0): Linear(in_features=8, out_features=16, bias=True)
      (1): ReLU()
      (2): Linear(in_features=16, out_features=3, bias=True)
    )

    Gates: Louizos, Welling & Kingma 2018, eq. 10 to 13; the constraint: Gallego-Posada et al. 2022,
    "Controlled sparsity via constrained optimization".
    """
    kind, limit = _one_budget(macs=macs, latency=latency, bytes=bytes, max_drop=max_drop)
    if epochs is not None:
        check_integer("epochs", epochs)
    check_number("lr", lr, above=0)
    check_integer("multiple", multiple)
    check_integer("seed", seed, at_least=0)
    for way in ways:
        check_choice("ways", way, WAYS)
    check_plain(net)
    work = _Work(net, train, validation, epochs, lr, loss, multiple, seed, ("torch", *ways))
    with torch.inference_mode(mode=False), own_generators(work.device, seed):
        if kind == "max_drop":
            return _smallest(work, limit)
        return work.report(*work.trained(kind, limit), kind, limit)


def _one_budget(**budgets: float | None) -> tuple[str, float]:
    """The one budget that is given."""
    given = {name: value for name, value in budgets.items() if value is not None}
    if len(given) != 1:
        raise VardropError(
            f"Expected one of {', '.join(f'`{n}`' for n in budgets)}, but got "
            f"{', '.join(given) or 'none'}. Try macs=0.5."
        )
    ((kind, value),) = given.items()
    if kind == "max_drop":
        check_number(kind, value, at_least=0)
    else:
        remedy = "It is the fraction to be left."
        check_number(kind, value, above=0, below=1, remedy=remedy)
    return kind, float(value)


class _Work:
    """The net, its data and the schedule: all that a training to a budget needs."""

    def __init__(
        self,
        net: nn.Module,
        train: Data,
        validation: Data,
        epochs: int | None,
        lr: float,
        loss: Loss | None,
        multiple: int,
        seed: int,
        ways: tuple[str, ...],
    ) -> None:
        self.net, self.lr, self.multiple = net, lr, multiple
        self.ways = tuple(dict.fromkeys(ways))
        trained = [p for p in net.parameters() if p.requires_grad]
        if not trained:
            raise VardropError(
                "Expected `net` to have parameters to train, but got none that requires a "
                "gradient. Call net.requires_grad_()."
            )
        device = self.device = trained[0].device
        self.train = Batches(train, device, seed)
        held = batches(validation, "validation")
        self.validation = tree_map_only(Tensor, lambda t: t.to(device), held)
        first = to_arguments(self.validation[0][0])
        self.timed = tree_map_only(Tensor, lambda t: t[:_TIMED].clone() if t.dim() else t, first)
        self.example = first_rows(self.timed)
        check_runs(net, self.example)
        self.steps = self.train.count * (epochs or max(5, math.ceil(_STEPS / self.train.count)))
        self.judge = judge_for(net, self.validation, loss)
        self.before = self.score(net)

    def score(self, net: nn.Module) -> float:
        """The score of a net on validation data."""
        return self.judge.value(*outputs(net, self.validation, "validation"))

    def trained(self, kind: str, limit: float) -> _Trained:
        """A net within a budget, trained to the end; the plan of the cut, and what had to stay."""
        net = decompose_layers(copy.deepcopy(self.net))
        gates = UnitGates(net, self.example)
        quantity: Quantity = "bytes" if kind == "bytes" else "macs"
        goal = self._macs_for(net, gates, limit) if kind == "latency" else limit
        fraction = min(_AT_MOST, _GATED * max(1.0, -math.log2(max(goal, 1e-3))))
        most = min(max(1, round(fraction * self.steps)), max(1, self.steps - 1))
        passes = self.steps // self.train.count
        stream = chain.from_iterable(self.train.once() for _ in range(passes))
        first = self._learn_gates(net, gates, stream, most, quantity, goal)
        kept = gates.choose(self._fits(net, gates, kind, limit), self.multiple)
        small, plan = self.cut(net, gates, kept)
        self._learn(small, stream, first)
        self._measure_batchnorm(small)
        return small.eval(), plan, gates.notes

    def _learn_gates(
        self,
        net: nn.Module,
        gates: UnitGates,
        data: Iterator[Any],
        steps: int,
        quantity: Quantity,
        goal: float,
    ) -> int:
        """Weights and gates learn until the expected cost is the goal; the steps that it took."""
        slots = [{"params": [p for p in net.parameters() if p.requires_grad]}]
        slots.append({"params": list(gates.parameters())})
        optimizer = torch.optim.Adam(slots, lr=max(_GATE_LR, min(0.5, _REACH / steps)))
        dual, price = _DUAL * max(1.0, 200 / steps), 0.0
        net.train()
        with gates.acting(net):
            for step, (x, y) in zip(range(steps), data, strict=False):
                now = 1 - (1 - goal) * min(1.0, step / (steps * _ANNEALED))
                cost = gates.expected_cost(quantity)
                price = max(0.0, price + dual * (float(cost.detach()) - now))
                penalty = price * cost + _RHO * (cost - now).clamp(min=0).square()
                optimizer.param_groups[0]["lr"] = self._rate(step)
                self._step(net, optimizer, x, y, penalty)
                if float(cost.detach()) <= goal:
                    return step + 1
        return steps

    def _learn(self, net: nn.Module, data: Iterator[Any], done: int) -> None:
        """The rest of the cycle, with the plain small net."""
        net.train()
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=self.lr)
        for step, (x, y) in enumerate(data, done):
            optimizer.param_groups[0]["lr"] = self._rate(step)
            self._step(net, optimizer, x, y)

    def _measure_batchnorm(self, net: nn.Module) -> None:
        """The statistics of the weights as they are in the end, for nets of one argument."""
        norms = [m for m in net.modules() if isinstance(m, _NORMS) and m.track_running_stats]
        if norms and len(self.example) == 1:
            reestimate_batchnorm(net, (x[0] for x, _ in islice(self.train.once(), _MEASURED)))

    def _rate(self, step: int) -> float:
        """One cycle: up for the first three tenths of the steps, then down to nothing."""
        at = min(1.0, step / self.steps)  # passes may differ in length
        if at < _WARM:
            return self.lr * (_FIRST + (1 - _FIRST) * (1 - math.cos(math.pi * at / _WARM)) / 2)
        return self.lr * (1 + math.cos(math.pi * (at - _WARM) / (1 - _WARM))) / 2

    def _step(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        x: Inputs,
        y: Tensor,
        penalty: Tensor | float = 0.0,
    ) -> None:
        value = self.judge.loss(one_tensor(call(net, x)), y) + penalty
        if not bool(value.isfinite()):
            raise NotFiniteError(
                f"Expected a finite loss, but got {float(value.detach())}. Lower `lr`."
            )
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()

    def _fits(
        self, net: nn.Module, gates: UnitGates, kind: str, limit: float
    ) -> Callable[[Tensor], bool]:
        """Whether a net that keeps some gates is within the budget."""
        if kind == "latency":
            return lambda kept: self._time(net, gates, kept) <= limit
        return lambda kept: float(gates.cost(kept, "bytes" if kind == "bytes" else "macs")) <= limit

    def _time(self, net: nn.Module, gates: UnitGates, kept: Tensor) -> float:
        """The measured time of a cut net, as a fraction of that of the given one."""
        nets = {"before": self.net, "after": self.cut(net, gates, kept).net}
        found = latencies(nets, self.timed, ("torch",))["torch"]
        return found["after"] / found["before"]

    def _macs_for(self, net: nn.Module, gates: UnitGates, limit: float) -> float:
        """The fraction of the MACs at which a net that is narrowed evenly is as fast as asked."""
        low, high = 0.0, 1.0
        for _ in range(_TRIES):
            middle = (low + high) / 2
            fast = self._time(net, gates, gates.evenly(middle)) <= limit
            low, high = (middle, high) if fast else (low, middle)
        return float(gates.cost(gates.evenly(low)))

    def cut(self, net: nn.Module, gates: UnitGates, kept: Tensor) -> Shrunk:
        """The plain net with the means of the gates that are kept and without the other units."""
        folded = copy.deepcopy(net)
        gates.fold(folded, kept)
        small, plan = shrink(folded, self.example)
        if any(p.dim() == 4 and _channels_last(p) for p in net.parameters()):
            small = small.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return Shrunk(small, plan)

    def report(
        self, small: nn.Module, plan: ShrinkPlan, notes: tuple[str, ...], kind: str, limit: float
    ) -> Slimmed:
        """Both nets side by side, and what went wrong."""
        times, untimed = timed({"before": self.net, "after": small}, self.timed, self.ways)
        notes = (*notes, *plan.notes, *untimed)
        before, after = (
            Cost(
                score=self.score(net),
                macs=sum(c.macs for c in layer_costs(net, self.example).values()),
                weights=sum(p.numel() for p in net.parameters()),
                bytes=sum(t.numel() * t.element_size() for t in net.state_dict().values()),
                latency={way: found[when] for way, found in times.items()},
            )
            for when, net in (("before", self.net), ("after", small))
        )
        rows = next(len(t) for t in tensors_in(self.timed) if t.dim())
        found = Slimmed(small, before, after, self.judge.score, plan, notes, rows)
        ends = tuple(dead_ends(found, self.judge.drop(before.score, after.score), kind, limit))
        for line in ends:
            warnings.warn(line, stacklevel=3)
        return dataclasses.replace(found, notes=(*notes, *ends))


def _channels_last(weight: Tensor) -> bool:
    last = weight.is_contiguous(memory_format=torch.channels_last)
    return last and not weight.is_contiguous()


def _smallest(work: _Work, max_drop: float) -> Slimmed:
    """The smallest net of a few that loses no more than is allowed; the best where none does."""
    tried: list[tuple[float, float, _Trained]] = []  # what is left, what was lost, the net

    def holds(fraction: float) -> bool:
        found = work.trained("macs", fraction)
        lost = work.judge.drop(work.before, work.score(found[0]))
        tried.append((fraction, lost, found))
        return lost <= max_drop

    low = next((fraction for fraction in _LADDER if not holds(fraction)), None)
    if low == _LADDER[0]:
        any(holds(fraction) for fraction in _MILD)
    elif low is not None:
        holds(math.sqrt(low * tried[-2][0]))
    good = [entry for entry in tried if entry[1] <= max_drop]
    best = min(good, key=lambda entry: entry[0]) if good else min(tried, key=lambda entry: entry[1])
    return work.report(*best[2], "max_drop", max_drop)
