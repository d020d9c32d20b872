"""Choose the pruning threshold on validation data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from vardrop._core.calls import LabelledData, labelled_batches, slice_batch
from vardrop._core.checks import check_integer, check_net, check_number
from vardrop._core.errors import VardropError
from vardrop._core.progress import track
from vardrop.compression.mask import decompose_layers, rules, zero_pruned_weights
from vardrop.compression.pack import count_packed_bytes
from vardrop.compression.probes import Metric, score, to_arguments
from vardrop.compression.shrink import shrink_traced
from vardrop.compression.trace_units import trace_units
from vardrop.noisy import Relevance

_SPARSEST = 1e-3  # the smallest fraction of weights that is tried


@dataclass(frozen=True)
class Point:
    """One threshold and the pruned model.

    Args:
        threshold: the threshold.
        score: of the pruned model.
        sparsity: the fraction of pruned weights or units.
        bytes, macs: of the pruned model, if they were computed.
    """

    threshold: float
    score: float
    sparsity: float
    bytes: int | None = None
    macs: int | None = None


@dataclass(frozen=True)
class Threshold:
    """A chosen threshold, which `float` returns.

    Args:
        value: the threshold.
        reference: the score of the full model.
        points: all thresholds that were tried.
    """

    value: float
    reference: float
    points: tuple[Point, ...]

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        lines = [f"threshold {self.value:.4g}, the full model scores {self.reference:.4f}"]
        for p in self.points:
            mark = "*" if p.threshold == self.value else " "
            line = f"{mark} {p.threshold:9.4f}  sparsity {p.sparsity:.4f}  score {p.score:.4f}"
            sizes = (f"  {n} {unit}" for unit, n in (("bytes", p.bytes), ("MACs", p.macs)) if n)
            lines.append(line + "".join(sizes))
        return "\n".join(lines)


def choose_threshold(
    net: nn.Module,
    data: LabelledData,
    metric: Metric,
    *,
    max_drop: float | None = None,
    sparsity: float | None = None,
    bytes: int | None = None,
    macs: int | None = None,
    points: int = 31,
    progress: bool | None = None,
) -> Threshold:
    """Sweep the relevance threshold on validation data and choose the one that meets one budget.

    The thresholds are quantiles of the model's relevance scores, evenly spaced in the logarithm of
    the remaining fraction. Do not use test data.

    Args:
        net: a noisy model whose modules share one rule (`vardrop.relevance`). It is left unchanged,
            also after Ctrl-C.
        data: inputs and targets that were not used for training: a pair (x, y) or batches.
        metric: `metric(output, target)`, higher is better, such as an accuracy.
        max_drop: choose the sparsest threshold whose score is at most this much lower than the
            score of the full model.
        sparsity: choose the densest threshold that prunes at least this fraction.
        bytes: choose the densest threshold whose packed file has at most this size.
        macs: choose the densest threshold with at most this many multiplications per example.
        points: the number of thresholds to try.
        progress: show a progress line on standard error; None shows it on a terminal.

    Returns:
        The threshold, which `shrink` takes, and the curve.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd())
    >>> data = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    >>> accuracy = lambda output, y: (output.argmax(1) == y).float().mean()
    >>> t = choose_threshold(net, data, accuracy, sparsity=0.5)
    >>> [p.sparsity for p in t.points if p.threshold == float(t)][0] >= 0.5
    True
    """
    limits = {"max_drop": max_drop, "sparsity": sparsity, "bytes": bytes, "macs": macs}
    budgets = {kind: limit for kind, limit in limits.items() if limit is not None}
    if len(budgets) != 1:
        raise VardropError(
            f"Expected one of `max_drop`, `sparsity`, `bytes` and `macs`, but got {list(budgets)}."
        )
    ((kind, limit),) = budgets.items()
    check_net(net)
    check_number(kind, limit, at_most=1 if kind == "sparsity" else None)
    check_integer("points", points)
    examples = list(labelled_batches(data))
    never = {n: -math.inf if r.keep_above else math.inf for n, r in rules(net).items()}
    full = zero_pruned_weights(net, never)[0]
    reference = score(full, examples, metric)
    example, graph = slice_batch(to_arguments(examples[0][0]), 0, 1), None
    if kind in ("bytes", "macs"):  # the units are the same at every threshold
        graph = trace_units(decompose_layers(full), example)
    curve = []
    candidates = _candidates(list(rules(net, 0.0).values()), points)
    for threshold in track(candidates, "choose_threshold", progress=progress):
        masks = [r.kept for r in rules(net, threshold).values()]
        share = sum(int((~k).sum()) for k in masks) / sum(k.numel() for k in masks)
        if graph is None:
            small = zero_pruned_weights(net, threshold)[0]
            curve.append(Point(threshold, score(small, examples, metric), share))
        else:
            shrunk = shrink_traced(net, example, threshold, True, graph)
            size, left = count_packed_bytes(shrunk), shrunk.plan.total("macs")[1]
            curve.append(Point(threshold, score(shrunk.net, examples, metric), share, size, left))
    return Threshold(_best(curve, kind, limit, reference).threshold, reference, tuple(curve))


def _candidates(relevances: list[Relevance], points: int) -> list[float]:
    """Thresholds from the densest to the sparsest, which are scores of modules with one rule."""
    scores = torch.cat([r.score.detach().flatten().double() for r in relevances])
    ordered = scores.sort(descending=relevances[0].keep_above).values
    ordered = ordered[ordered.isfinite()]
    fractions = torch.logspace(0, math.log10(_SPARSEST), points, dtype=torch.float64)
    counts = (fractions * len(scores)).long().clamp(0, len(ordered) - 1).tolist()
    return list(dict.fromkeys(float(ordered[k]) for k in counts))


def _best(curve: list[Point], kind: str, limit: float, reference: float) -> Point:
    """The sparsest point that loses little enough, or the densest that is small enough."""
    if kind == "max_drop":
        met = [p for p in reversed(curve) if p.score >= reference - limit]
        nearest = max(curve, key=lambda p: p.score)
    else:
        sign = -1 if kind == "sparsity" else 1
        met = [p for p in curve if sign * getattr(p, kind) <= sign * limit]
        nearest = curve[-1]
    if not met:
        raise VardropError(
            f"Expected a threshold with `{kind}` within {limit}, but the nearest is {nearest}. "
            "Loosen the budget, or train longer."
        )
    return met[0]
