"""Slim a trained model: gates find the units to remove for a budget, then the rest is trained.

The gates of `compression.unit_gates` are trained with the weights, under a price on the expected
cost that rises until the budget holds, while the learning rate rises to its peak. Then the units
with the lowest gates are removed at once. The plain small model has its own cycle of the learning
rate with a short rise: without it, the first steps of Adam undo a part of the training.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vardrop._core import calls, checks
from vardrop._core.errors import VardropError, report_arguments
from vardrop._core.rng import preserve_rng
from vardrop.compression import Shrunk, probes, shrink
from vardrop.compression.costs import layer_costs
from vardrop.compression.mask import decompose_layers
from vardrop.compression.unit_gates import Quantity, UnitGates
from vardrop.tuning import slim_report
from vardrop.tuning.batches import BatchSource, StreamBatches, TensorBatches, TrainBatch
from vardrop.tuning.batchnorm import reestimate_batchnorm
from vardrop.tuning.fine_tune import Loss
from vardrop.tuning.minimize import Callback, Position, ShowProgress, minimize
from vardrop.tuning.slim_report import RUNTIMES, Cost, Slimmed

_GATE_STEPS, _MOST_GATE_STEPS = 0.1, 0.3  # fraction of the steps with gates: per halving, at most
_ANNEALED = 0.7  # fraction of those in which the budget tightens
_RHO, _DUAL_LR = 20.0, 0.5  # of the quadratic penalty, and of the steps of the multiplier
_GATE_LR, _REACH = 0.05, 6.0  # the lowest learning rate of gates; how far they have to move
_STEPS = 1000  # by default five epochs, and more until there are so many steps
_TIMED_ROWS = 64  # rows of the batch that is timed
_WARMUP, _FIRST = 0.1, 0.04  # of the learning rate: fraction of the steps that it rises, its start
_BATCHNORM_BATCHES = 50
_TRIES = 5  # models that are timed to relate the latency to the MACs
_MULTIPLES, _INPUTS = (16, 8, 4, 2, 1), 16  # of units; the least inputs of a convolution
_USED = 0.9  # the least fraction of the budget that has to be used
_LADDER, _MILD = (0.5, 0.25, 0.12, 0.06), (0.7, 0.85)  # fractions of the MACs that `max_drop` tries
_BATCH_SIZE = 128
_Widths = list[tuple[int, int]]  # multiples of units, with the least inputs of convolutions
_Measure = Callable[[Tensor], float]  # of a mask of gates


def slim(
    net: nn.Module,
    data: calls.LabelledData,
    validation: calls.LabelledData,
    *,
    macs: float | None = None,
    latency: float | None = None,
    bytes: float | None = None,
    max_drop: float | None = None,
    epochs: int | None = None,
    lr: float = 2e-3,
    loss: Loss | None = None,
    multiple: int | None = None,
    seed: int = 0,
    runtime: str = "torch",
    runtimes: Sequence[str] = ("torch", "onnxruntime"),
    progress: bool | None = None,
) -> Slimmed:
    """Make a trained model smaller: remove channels and units to meet a budget, and train the rest.

    Every group of units that can only be removed together has a hard concrete gate z, open (exactly
    one) at the start. For about a tenth of the steps per halving of the cost, weights and gates are
    trained together,

        min over w, log alpha of  E_z loss + lambda (E cost - goal) + rho (E cost - goal)_+^2,

    where E cost follows from P(z > 0), the goal falls to the budget, and lambda rises while it is
    missed. Then the units with the smallest log alpha are removed, so that the budget holds
    exactly, and the plain small model is trained for the rest of the steps.

    Expect MACs and bytes as requested, a latency that falls less than the MACs (small layers are
    bound by memory), and at half of the MACs about the score of the given model trained equally
    long. If it is interrupted (Ctrl-C), the given model is unchanged.

    Args:
        net: a trained plain model. It is left unchanged.
        data: inputs and targets as two tensors, or batches of them, read once per epoch.
        validation: held-out data in the same form, for the score.
        macs, latency, bytes: the fraction to keep, in (0, 1), of the multiplications per example
            (of dense, convolutional, recurrent and attention layers), of the time measured in
            `runtime` for a batch of at most 64 rows of `validation`, or of the bytes of all
            tensors.
        max_drop: instead, the smallest of a few models that loses at most this much on validation
            data: of accuracy, so that 0.002 is 0.2 points; the relative increase of the RMSE; or
            the increase of a custom `loss`. Trains several models.
        epochs: passes over `train`; by default five, or as many as make 1000 steps.
        lr: the highest learning rate of Adam. Use the one of your training.
        loss: `loss(output, target)`, such as a likelihood; by default the cross entropy for integer
            targets, the squared error for others. It should be of order one.
        multiple: layers keep multiples of this many units, if they have as many. Registers hold 8
            or 16 numbers, and onnxruntime runs other widths with slower kernels: half of the MACs
            in odd widths can take longer than all of them. None is the largest of 16, 8, 4, 2 and 1
            that can use nine tenths of the budget, and leaves layers to choose from. If the
            budget allows it, convolutions then keep at least 16 inputs as well.
        seed: of the gates' draws and of the order of the examples in `data`.
        runtime: in which `latency` is measured.
        runtimes: in which both models are timed for the report: "torch", "onnxruntime" (if it is
            installed), "compiled" (`torch.compile`, which takes a while).
        progress: show a progress line on standard error; None shows it on a terminal.

    Returns:
        The model with its report: scores, MACs, weights, bytes and measured latency, before and
        after. If the score collapses, a warning is issued, and `notes` contain it.

    Raises:
        VardropError: before any training, if even the narrowest model does not meet the budget.

    >>> import torch, vardrop as vd
    >>> net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    >>> x = torch.randn(256, 8)
    >>> data = x, x[:, :3].argmax(1)
    >>> small = vd.slim(net, data, data, macs=0.5, epochs=30, runtimes=["torch"])
    >>> small.net
    Sequential(
      (0): Linear(in_features=8, out_features=16, bias=True)
      (1): ReLU()
      (2): Linear(in_features=16, out_features=3, bias=True)
    )

    Gates: Louizos, Welling & Kingma 2018, eq. 10 to 13; the constraint: Gallego-Posada et al. 2022,
    "Controlled sparsity via constrained optimization".
    """
    budgets = {"macs": macs, "latency": latency, "bytes": bytes, "max_drop": max_drop}
    chosen = {name: limit for name, limit in budgets.items() if limit is not None}
    if len(chosen) != 1:
        raise VardropError(
            f"Expected one of {', '.join(f'`{n}`' for n in budgets)}, but got "
            f"{', '.join(chosen) or 'none'}. Try macs=0.5."
        )
    ((kind, limit),) = chosen.items()
    if kind == "max_drop":
        checks.check_number(kind, limit, at_least=0)
    else:
        checks.check_number(kind, limit, above=0, below=1, remedy="It is the fraction to keep.")
    checks.check_integer("epochs", 1 if epochs is None else epochs)
    checks.check_integer("multiple", 1 if multiple is None else multiple)
    checks.check_number("lr", lr, above=0)
    checks.check_integer("seed", seed, at_least=0)
    checks.check_choice("runtime", runtime, RUNTIMES)
    checks.check_type("runtimes", runtimes, Sequence, "a list of runtimes")
    for other in runtimes:
        checks.check_choice("runtimes", other, RUNTIMES)
    probes.check_plain(net)
    task = _Slimming(net, data, validation, epochs, lr, loss, multiple, seed, runtime, progress)
    with torch.inference_mode(mode=False), preserve_rng(task.device, seed):
        small = task.find_smallest(limit) if kind == "max_drop" else task.train_to(kind, limit)
        timed = ("torch", *((runtime,) if kind == "latency" else ()), *runtimes)
        return task.report(small, kind, limit, tuple(dict.fromkeys(timed)))


def _make_source(data: calls.LabelledData, device: torch.device) -> BatchSource:
    """Batches of the training data. Of two tensors, examples that fill no batch are left out."""
    x, y = data if isinstance(data, tuple) and len(data) == 2 else (None, None)
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        size = max(2, min(_BATCH_SIZE, len(y) // 8))
        return TensorBatches((x, y), size, device, drop_last=len(y) >= size)
    return StreamBatches(data, device, name="data")


def _list_widths(gates: UnitGates, cost: _Measure, limit: float) -> _Widths:
    """Multiples of units with the least inputs of convolutions, fastest first, for a budget.

    They leave layers to choose from: a convolution keeps 16 inputs only if the other layers can
    then keep three quarters of the budget, and the narrowest model needs at most half of it.
    """
    wide = [
        (m, _INPUTS) for m in _MULTIPLES if cost(gates.evenly(0.75 * limit, m, _INPUTS)) <= limit
    ]
    free = [(m, 1) for m in _MULTIPLES if cost(gates.evenly(0, m)) <= limit / 2]
    return [*wide, *free] or [(1, 1)]


class _Price(Callback):
    """The price of the expected cost of gated units. It ends the training when the goal is met.

    Args:
        gates: the gates of the units.
        quantity: MACs or bytes.
        goal: the fraction to keep.
        steps: the training ends after so many steps at the latest.
    """

    def __init__(self, gates: UnitGates, quantity: Quantity, goal: float, steps: int) -> None:
        self.gates, self.quantity, self.goal, self.steps = gates, quantity, goal, steps
        self.multiplier, self.step, self.cost = 0.0, 0, 1.0
        self.dual_lr = _DUAL_LR * max(1.0, 200 / steps)
        self.gate_lr = max(_GATE_LR, min(0.5, _REACH / steps))

    def penalty(self) -> Tensor:
        """The penalty of the current step; the multiplier rises while the cost is too high."""
        goal = 1 - (1 - self.goal) * min(1.0, self.step / (self.steps * _ANNEALED))
        cost = self.gates.expected_cost(self.quantity)
        self.cost = float(cost.detach())
        self.multiplier = max(0.0, self.multiplier + self.dual_lr * (self.cost - goal))
        return self.multiplier * cost + _RHO * (cost - goal).clamp(min=0).square()

    def on_step(self, at: Position, loss: Tensor) -> bool:
        self.step += 1
        return self.cost <= self.goal or self.step == self.steps


class _Slimming:
    """A model, its data and its training to a budget. The arguments are those of `slim`."""

    def __init__(
        self,
        net: nn.Module,
        data: calls.LabelledData,
        validation: calls.LabelledData,
        epochs: int | None,
        lr: float,
        loss: Loss | None,
        multiple: int | None,
        seed: int,
        runtime: str,
        progress: bool | None,
    ) -> None:
        self.net, self.lr, self.multiple = net, lr, multiple
        self.runtime, self.progress = runtime, progress
        parameters = [p for p in net.parameters() if p.requires_grad]
        if not parameters:
            raise VardropError(
                "Expected `net` to have parameters to train, but got none that requires a "
                "gradient. Call net.requires_grad_()."
            )
        self.device = parameters[0].device
        self.source = _make_source(data, self.device)
        self.generator = torch.Generator().manual_seed(seed)
        held_out = list(calls.labelled_batches(validation, "validation"))
        self.validation = calls.map_tensors(lambda t: t.to(self.device), held_out)
        first = probes.to_arguments(self.validation[0][0])
        self.timed = calls.map_tensors(lambda t: t[:_TIMED_ROWS].clone() if t.dim() else t, first)
        self.example = calls.slice_batch(self.timed, 0, 1)
        probes.check_runs(net, self.example)
        counted = self.source.steps or sum(1 for _ in self.source.batches(self.generator))
        self.num_epochs = epochs or max(5, math.ceil(_STEPS / counted))
        self.epoch_steps, self.steps = counted, self.num_epochs * counted
        with report_arguments("loss", "validation"):
            self.score = slim_report.make_score(net, self.validation, loss)
            self.before = self.measure(net)

    def measure(self, net: nn.Module) -> float:
        """The score of a model on validation data."""
        return self.score.measure(*probes.outputs(net, self.validation, "validation"))

    def train_to(self, kind: str, limit: float) -> Shrunk:
        """A model within a budget, trained to the end."""
        net = decompose_layers(copy.deepcopy(self.net))
        gates = UnitGates(net, self.example)
        quantity: Quantity = "bytes" if kind == "bytes" else "macs"

        def cost(mask: Tensor) -> float:
            return float(gates.cost(mask, quantity))

        measure = partial(self._time, net, gates) if kind == "latency" else cost
        widths = [(self.multiple, 1)] if self.multiple else _list_widths(gates, cost, limit)
        narrow = self._narrow(gates, kind, limit, widths, measure)
        goal = cost(narrow) if kind == "latency" else limit
        fraction = min(_MOST_GATE_STEPS, _GATE_STEPS * max(1.0, -math.log2(max(goal, 1e-3))))
        gate_steps = min(max(1, round(fraction * self.steps)), max(1, self.steps - 1))
        with ShowProgress(f"slim ({kind}={limit:g})", self.steps, self.progress) as line:
            with gates.acting(net):
                price = _Price(gates, quantity, goal, gate_steps)
                at = self._minimize(net, line, Position(), price)
            for width in widths[:1] if kind == "latency" else widths:
                mask = gates.choose(lambda mask: measure(mask) <= limit, *width)
                if cost(mask) >= _USED * goal:
                    break
            small, plan = self._cut(net, gates, mask)
            self._minimize(small, line, at)
        norms = [m for m in small.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        if norms and len(self.example) == 1:  # measure the statistics for the final weights
            some = islice(self.source.batches(self.generator), _BATCHNORM_BATCHES)
            reestimate_batchnorm(small, (probes.to_arguments(batch.x)[0] for batch in some))
        return Shrunk(small.eval(), dataclasses.replace(plan, notes=(*gates.notes, *plan.notes)))

    def _minimize(
        self, net: nn.Module, line: ShowProgress, start: Position, price: _Price | None = None
    ) -> Position:
        """Train a model, with gates if there is a price. An interrupted epoch is continued."""
        prices = [] if price is None else [price]
        groups = [{"params": [p for p in net.parameters() if p.requires_grad]}]
        groups += [{"params": list(p.gates.parameters())} for p in prices]

        def loss(batch: TrainBatch, at: Position) -> Tensor:
            output = calls.output_tensor(calls.call_net(net, calls.clone_batch(batch.x)))
            with report_arguments("loss", "data"):
                task_loss = self.score.loss(output, batch.y)
            return task_loss if price is None else task_loss + price.penalty()

        def continue_epoch(at: Position) -> Iterable[TrainBatch]:
            if at.step == 0:
                self._epoch = self.source.batches(self.generator)
            return self._epoch

        done = start.epoch * self.epoch_steps + start.step
        # With gates the rate rises all the time.
        steps, warmup = (price.steps, 1.0) if price else (self.steps - done, _WARMUP)

        def schedule(at: Position) -> tuple[float, float]:
            """One cycle: up for a fraction of the steps, then down to zero."""
            step = at.epoch * self.epoch_steps + at.step - done
            part = min(1.0, step / max(1, steps))  # epochs of a stream may differ in length
            if part < warmup:
                rate = _FIRST + (1 - _FIRST) * (1 - math.cos(math.pi * part / warmup)) / 2
            else:
                rate = (1 + math.cos(math.pi * (part - warmup) / max(1 - warmup, 1e-9))) / 2
            return self.lr * rate, 0.0 if price is None else price.gate_lr

        net.train()
        return minimize(
            loss,
            continue_epoch,
            torch.optim.Adam(groups),
            epochs=self.num_epochs,
            schedule=schedule,
            callbacks=[line, *prices],
            start=start._replace(stopped=False),
        )

    def _time(self, net: nn.Module, gates: UnitGates, mask: Tensor) -> float:
        """The measured time of a cut model, as a fraction of the time of the given model."""
        nets = {"before": self.net, "after": self._cut(net, gates, mask).net}
        seconds = slim_report.latencies(nets, self.timed, (self.runtime,))[self.runtime]
        return seconds["after"] / seconds["before"]

    def _narrow(
        self, gates: UnitGates, kind: str, limit: float, widths: _Widths, measure: _Measure
    ) -> Tensor:
        """A mask of evenly narrowed layers that meets a latency. Other budgets are only checked."""
        if (least := measure(gates.evenly(0, *widths[-1]))) > limit:
            raise VardropError(
                f"Expected `{kind}` to be at least {math.ceil(1000 * least) / 1000:g}, the cost of "
                f"the narrowest model with multiples of {widths[-1][0]} units, but got {limit:g}. "
                "Ask for a larger fraction, or slim a model with wider or fewer layers."
            )
        low, high = 0.0, 1.0
        for _ in range(_TRIES if kind == "latency" else 0):
            middle = (low + high) / 2
            is_fast = measure(gates.evenly(middle, *widths[0])) <= limit
            low, high = (middle, high) if is_fast else (low, middle)
        return gates.evenly(low, *widths[0])

    def _cut(self, net: nn.Module, gates: UnitGates, mask: Tensor) -> Shrunk:
        """The plain model with the means of the gates in the mask, without the other units."""
        folded = copy.deepcopy(net)
        gates.fold(folded, mask)
        return shrink(folded, self.example, progress=False)

    def find_smallest(self, max_drop: float) -> Shrunk:
        """The smallest of a few models that loses at most `max_drop`, or the best if none does."""
        tried: list[tuple[float, float, Shrunk]] = []  # fraction of the MACs, drop of the score
        gates = UnitGates(decompose_layers(copy.deepcopy(self.net)), self.example)
        least = float(gates.cost(gates.evenly(0, self.multiple or 1)))
        ladder = sorted({max(fraction, least) for fraction in _LADDER}, reverse=True)

        def holds(fraction: float) -> bool:
            candidate = self.train_to("macs", fraction)
            drop = self.score.drop(self.before, self.measure(candidate.net))
            tried.append((fraction, drop, candidate))
            return drop <= max_drop

        low = next((fraction for fraction in ladder if not holds(fraction)), None)
        if low == ladder[0]:
            any(holds(fraction) for fraction in _MILD if fraction > low)
        elif low is not None:
            holds(math.sqrt(low * tried[-2][0]))
        good = [entry for entry in tried if entry[1] <= max_drop]
        return (min(good, key=lambda e: e[0]) if good else min(tried, key=lambda e: e[1]))[2]

    def report(self, small: Shrunk, kind: str, limit: float, runtimes: tuple[str, ...]) -> Slimmed:
        """Both models with their scores and costs, and warnings."""
        nets = {"before": self.net, "after": small.net}
        times: dict[str, dict[str, float]] = {}
        untimed = []
        for way in runtimes:
            try:
                times |= slim_report.latencies(nets, self.timed, (way,))
            except (VardropError, ImportError, OSError, *probes.CODE_ERRORS) as failure:
                if way == "torch":
                    raise
                untimed.append(f"Not timed by {way}: {str(failure).partition(chr(10))[0][:200]}")
        before, after = (
            Cost(
                score=self.measure(net),
                macs=sum(c.macs for c in layer_costs(net, self.example).values()),
                weights=sum(p.numel() for p in net.parameters()),
                bytes=sum(t.nbytes for t in net.state_dict().values()),
                latency={way: seconds[name] for way, seconds in times.items()},
            )
            for name, net in nets.items()
        )
        rows = next(len(t) for t in calls.tensors_in(self.timed) if t.dim())
        notes = (*small.plan.notes, *untimed)
        slimmed = Slimmed(
            small.net, before, after, self.score.name, small.plan, notes, rows, self.runtime
        )
        drop = self.score.drop(before.score, after.score)
        texts = tuple(slim_report.budget_warnings(slimmed, drop, kind, limit))
        for text in texts:
            warnings.warn(text, stacklevel=3)
        return dataclasses.replace(slimmed, notes=(*notes, *texts))
