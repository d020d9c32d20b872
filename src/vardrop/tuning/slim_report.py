"""What slimming gives: the small net, and what both nets score, cost and take by the clock."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from vardrop._core.calls import call, tensors_in
from vardrop._core.checks import check_choice
from vardrop._core.errors import needed
from vardrop.compression import ShrinkPlan
from vardrop.compression.probes import Inputs, time_interleaved
from vardrop.export import export_onnx

WAYS = ("torch", "compiled", "onnxruntime")
_COLLAPSE = {"accuracy": 0.05, "rmse": 0.25}  # losses that are worth a word
_CLOCK = {"latency": 1.1}  # how far a measured budget may be missed
_UNITS = {"score": "", "macs": "MACs", "weights": "weights", "bytes": "bytes"}


@dataclass(frozen=True)
class Cost:
    """One net: its score on validation data, multiplications per example, weights, bytes, latency.

    The bytes are those of its parameters and buffers. `latency` holds seconds per batch by way of
    running it.
    """

    score: float
    macs: int
    weights: int
    bytes: int
    latency: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Slimmed:
    """A net that `slim` made smaller; print it.

    Args:
        net: the small net, a plain `nn.Module` in evaluation mode.
        before: what the given net scores and costs.
        after: what the small net scores and costs.
        score: what the score is: accuracy (higher is better), rmse or loss (lower is better).
        plan: what was taken out, layer by layer.
        notes: what has to be known: what could not be taken out and why, and dead ends.
        rows: how many rows the timed batch has.
    """

    net: nn.Module
    before: Cost
    after: Cost
    score: str
    plan: ShrinkPlan
    notes: tuple[str, ...]
    rows: int

    def left(self, quantity: str) -> float:
        """What is left of `macs`, `weights`, `bytes`, or of the time by `torch`, `onnxruntime`, ...

        The time by torch is also called `latency`.
        """
        quantity = "torch" if quantity == "latency" else quantity
        pairs = [c.latency if quantity in c.latency else vars(c) for c in (self.before, self.after)]
        if quantity not in pairs[0]:
            known = (*_UNITS, *self.before.latency)
            check_choice("quantity", quantity, tuple(k for k in known if k != "score"))
        return pairs[1][quantity] / pairs[0][quantity]

    def __str__(self) -> str:
        b, a = self.before, self.after
        rows: list[tuple[str, ...]] = [("", "before", "after", "left")]
        rows.append((f"{self.score} on validation data", f"{b.score:.4f}", f"{a.score:.4f}", ""))
        for name in ("macs", "weights", "bytes"):
            pair = (f"{getattr(c, name):,}" for c in (b, a))
            rows.append((_UNITS[name], *pair, f"{self.left(name):.2f}"))
        for way in b.latency:
            pair = (f"{1000 * c.latency[way]:.3f}" for c in (b, a))
            rows.append((f"ms in {way}, {self.rows} rows", *pair, f"{self.left(way):.2f}"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join(
                [
                    row[0].ljust(widths[0]),
                    *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
                ]
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *self.notes, self.plan.proof])


def latencies(
    nets: Mapping[str, nn.Module], inputs: Inputs, ways: tuple[str, ...] = WAYS
) -> dict[str, dict[str, float]]:
    """Seconds that nets take for one batch, by way of running them, then by net.

    The nets take turns, so that other load hits all alike; the best of many tries counts. A thread
    of torch is a thread of onnxruntime.

    Args:
        nets: plain nets by name.
        inputs: the arguments of each of them.
        ways: "torch", "compiled" (by `torch.compile`, which takes a while), "onnxruntime".

    >>> found = latencies({"net": nn.Linear(4, 2)}, (torch.zeros(8, 4),), ("torch",))
    >>> found["torch"]["net"] > 0
    True
    """
    for way in ways:
        check_choice("ways", way, WAYS)
    own = {name: copy.deepcopy(net).eval() for name, net in nets.items()}
    with torch.no_grad():
        return {
            way: time_interleaved(
                {name: _CALLS[way](net, inputs) for name, net in own.items()}, rounds=5
            )
            for way in ways
        }


def _compiled(net: nn.Module, inputs: Inputs) -> Callable[[], Any]:
    return partial(call, cast(nn.Module, torch.compile(net)), inputs)


def _in_onnxruntime(net: nn.Module, inputs: Inputs) -> Callable[[], Any]:
    runtime = needed("onnxruntime", "compress")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        export_onnx(net, path, inputs)
        session = runtime.InferenceSession(
            path.read_bytes(), options, providers=["CPUExecutionProvider"]
        )
    names = [given.name for given in session.get_inputs()]
    feed = dict(zip(names, (t.cpu().numpy() for t in tensors_in(inputs)), strict=True))
    return partial(session.run, None, feed)


_CALLS: dict[str, Callable[[nn.Module, Inputs], Callable[[], Any]]] = {
    "torch": lambda net, inputs: partial(call, net, inputs),
    "compiled": _compiled,
    "onnxruntime": _in_onnxruntime,
}


def timed(
    nets: Mapping[str, nn.Module], inputs: Inputs, ways: tuple[str, ...]
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """The latencies by the ways that work here, and why the others do not."""
    found: dict[str, dict[str, float]] = {}
    notes = []
    for way in ways:
        try:
            found |= latencies(nets, inputs, (way,))
        except Exception as failure:  # no compiler, no package, or a net that it does not take
            if way == "torch":
                raise
            reason = str(failure).partition("\n")[0][:200]
            notes.append(f"Not timed by {way}: {reason}")
    return found, notes


def dead_ends(found: Slimmed, lost: float, kind: str, limit: float) -> Iterator[str]:
    """What went wrong by a budget, and what to try; `lost` is the loss of score."""
    score, before, after = found.score, found.before, found.after
    if kind == "max_drop" and lost > limit:
        yield (
            f"No net within max_drop={limit:g} was found: the best {score} is {after.score:.4g}, "
            f"of {before.score:.4g}. Train the net longer before, or give more epochs."
        )
    elif kind != "max_drop" and found.left(kind) > limit * _CLOCK.get(kind, 1 + 1e-9):
        yield (
            f"The budget {kind}={limit:g} was not reached: {found.left(kind):.3g} is left. Every "
            "layer keeps a unit, and what the notes name stays whole. Ask for more, or slim a net "
            "with wider or fewer layers."
        )
    if after.weights == before.weights:
        yield "No unit was taken out. Ask for a smaller budget."
    elif kind != "max_drop" and lost > _COLLAPSE.get(score, math.inf):
        yield (
            f"The {score} on validation data went from {before.score:.4g} to {after.score:.4g}. "
            "Give more epochs, the learning rate of your own training, or a larger budget."
        )
