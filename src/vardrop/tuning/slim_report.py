"""The result of `slim`: the small model, and the scores, costs and latencies of both models."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vardrop._core.calls import LabelledData, call_net, tensors_in
from vardrop._core.checks import check_choice
from vardrop._core.errors import VardropError, import_optional, report_errors
from vardrop.compression import ShrinkPlan
from vardrop.compression.probes import Inputs, outputs, time_interleaved
from vardrop.export import export_onnx
from vardrop.likelihoods import Categorical
from vardrop.tuning.fine_tune import Loss

RUNTIMES = ("torch", "compiled", "onnxruntime")
_COLLAPSE = {"accuracy": 0.05, "rmse": 0.25}  # a larger drop of the score is a warning
_TIME_TOLERANCE = 1.1  # a measured budget may be missed by this factor
_UNITS = {"macs": "MACs", "weights": "weights", "bytes": "bytes"}


@dataclass(frozen=True)
class Score:
    """How a model is scored: the loss that trains it, and the score that people read."""

    loss: Loss
    name: str  # accuracy, rmse or loss
    measure: Callable[[Tensor, Tensor], float]

    def drop(self, before: float, after: float) -> float:
        """How much worse a score is: in accuracy, as a fraction of the RMSE, or in the loss."""
        if self.name == "accuracy":
            return before - after
        return after / max(before, 1e-12) - 1 if self.name == "rmse" else after - before


def make_score(net: nn.Module, data: LabelledData, loss: Loss | None) -> Score:
    """The loss and the score for a model and its data."""
    output, target = outputs(net, data, "validation")
    is_class = not target.is_floating_point()
    if is_class and output.dim() == target.dim() + 1:
        likelihood = loss if isinstance(loss, Categorical) else Categorical()

        def accuracy(output: Tensor, target: Tensor) -> float:
            hits = output.argmax(likelihood.class_axis) == target
            return float(hits[likelihood.valid_mask(target)].double().mean())

        score = Score(functional.cross_entropy if loss is None else loss, "accuracy", accuracy)
    elif loss is not None:
        score = Score(loss, "loss", lambda o, y: float(loss(o, y)))
    elif is_class or output.shape != target.shape:
        raise VardropError(
            "Expected targets to be classes (N, ...) of outputs (N, classes, ...), or numbers of "
            f"the shape of the output, but got {target.dtype} of shape {tuple(target.shape)} and "
            f"outputs of shape {tuple(output.shape)}. Reshape them, or pass `loss`."
        )
    else:
        # The price of the cost expects a loss of order one, in any unit of the target.
        variance = max(float(target.double().var()), 1e-12)
        score = Score(
            lambda o, y: functional.mse_loss(o, y) / variance,
            "rmse",
            lambda o, y: float((o - y).double().square().mean().sqrt()),
        )
    checked = score.loss(output, target)
    if not isinstance(checked, Tensor) or checked.dim() or not bool(checked.isfinite()):
        raise VardropError(
            "Expected `loss` to give one finite number for `net` on `validation`, but got "
            f"{checked}. Pass a trained net, and a loss that is a mean over the batch."
        )
    return score


@dataclass(frozen=True)
class Cost:
    """One model: its score on validation data, MACs per example, weights, bytes, latency.

    The bytes are of its parameters and buffers. `latency` holds seconds per batch by runtime.
    """

    score: float
    macs: int
    weights: int
    bytes: int
    latency: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Slimmed:
    """A model that `slim` made smaller. Print it.

    Args:
        net: the small model, a plain `nn.Module` in evaluation mode.
        before: the score and the costs of the given model.
        after: the score and the costs of the small model.
        score: the kind of score: accuracy (higher is better), rmse or loss (lower is better).
        plan: the removed units, layer by layer.
        notes: units that could not be removed and why, and warnings.
        rows: the number of rows of the timed batch.
        runtime: in which `latency` is measured.
    """

    net: nn.Module
    before: Cost
    after: Cost
    score: str
    plan: ShrinkPlan
    notes: tuple[str, ...]
    rows: int
    runtime: str = "torch"

    def left(self, quantity: str) -> float:
        """The cost of the slim model as a fraction of the cost before.

        Args:
            quantity: `macs`, `weights`, `bytes`, or a runtime for the time in it. `latency` is the
                time in the `runtime` that `slim` was called with.

        Returns:
            The fraction.
        """
        quantity = self.runtime if quantity == "latency" else quantity
        check_choice("quantity", quantity, (*_UNITS, *self.before.latency))
        before, after = ({**vars(c), **c.latency}[quantity] for c in (self.before, self.after))
        return float(after / before)

    def __str__(self) -> str:
        both = self.before, self.after
        table = [
            ["", "before", "after", "left"],
            [f"{self.score} on validation data", *(f"{c.score:.4f}" for c in both), ""],
        ]
        for name, unit in _UNITS.items():
            table.append([unit, *(f"{getattr(c, name):,}" for c in both), f"{self.left(name):.2f}"])
        for runtime in self.before.latency:
            times = (f"{1000 * c.latency[runtime]:.3f}" for c in both)
            label = f"ms in {runtime}, {self.rows} rows"
            table.append([label, *times, f"{self.left(runtime):.2f}"])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip()
            for name, *cells in table
        ]
        return "\n".join([*lines, *self.notes, self.plan.proof])


def latencies(
    nets: Mapping[str, nn.Module], inputs: Inputs, runtimes: tuple[str, ...] = RUNTIMES
) -> dict[str, dict[str, float]]:
    """Seconds that models take for one batch, by runtime, then by model.

    The models take turns, so that other load on the machine affects all of them. The best of many
    tries counts. onnxruntime uses as many threads as torch.

    Args:
        nets: plain models by name.
        inputs: the arguments of each of them.
        runtimes: "torch", "compiled" (by `torch.compile`, which takes a while), "onnxruntime".

    Returns:
        The seconds by runtime, then by model.

    >>> seconds = latencies({"net": nn.Linear(4, 2)}, (torch.zeros(8, 4),), ("torch",))
    >>> seconds["torch"]["net"] > 0
    True
    """
    copies, seconds = {name: copy.deepcopy(net).eval() for name, net in nets.items()}, {}
    with torch.no_grad():
        for runtime in runtimes:
            check_choice("runtimes", runtime, RUNTIMES)
            calls = {name: _make_call(runtime, net, inputs) for name, net in copies.items()}
            seconds[runtime] = time_interleaved(calls, rounds=5)
    return seconds


def _make_call(runtime: str, net: nn.Module, inputs: Inputs) -> Callable[[], object]:
    """A call of a model in a runtime."""
    if runtime != "onnxruntime":
        compiled = torch.compile(net) if runtime == "compiled" else net
        return partial(call_net, cast(nn.Module, compiled), inputs)
    onnxruntime = import_optional("onnxruntime", "compress")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        export_onnx(net, inputs, path)
        with report_errors(lambda e: f"onnxruntime cannot load the model: {e}"):
            session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
    pairs = zip(session.get_inputs(), tensors_in(inputs), strict=True)
    return partial(session.run, None, {node.name: t.cpu().numpy() for node, t in pairs})


def budget_warnings(slimmed: Slimmed, drop: float, kind: str, limit: float) -> Iterator[str]:
    """Warnings about a budget, with a remedy. `drop` is the drop of the score."""
    score, before, after = slimmed.score, slimmed.before, slimmed.after
    if kind == "max_drop" and drop > limit:
        yield (
            f"No net within max_drop={limit:g} was found: the best {score} is {after.score:.4g}, "
            f"of {before.score:.4g}. Train the net longer before, or give more epochs."
        )
    tolerance = _TIME_TOLERANCE if kind == "latency" else 1 + 1e-9
    if kind != "max_drop" and slimmed.left(kind) > limit * tolerance:
        yield (
            f"The budget {kind}={limit:g} was not reached: {slimmed.left(kind):.3g} is left. Ask "
            "for a smaller fraction."
        )
    if after.weights == before.weights:
        yield "No unit was removed. Ask for a smaller fraction."
    elif kind != "max_drop" and drop > _COLLAPSE.get(score, math.inf):
        yield (
            f"The {score} on validation data went from {before.score:.4g} to {after.score:.4g}. "
            "Give more epochs, the learning rate of your training, or a larger budget."
        )
