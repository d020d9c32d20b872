"""The threshold that held-out data allow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vardrop._core.checks import check_integer, check_net, check_number
from vardrop._core.errors import VardropError, import_optional
from vardrop.compression.mask import decompose_layers, rules, zero_pruned_weights
from vardrop.compression.pack import count_packed_bytes
from vardrop.compression.probes import Data, Metric, batches, first_rows, score, to_arguments
from vardrop.compression.shrink import shrink_traced
from vardrop.compression.trace_units import trace_units
from vardrop.noisy import Relevance

_SPARSEST = 1e-3  # the smallest fraction of weights that is tried


@dataclass(frozen=True)
class Point:
    """One threshold: the score without what it drops, and the fraction that it drops."""

    threshold: float
    score: float
    sparsity: float
    bytes: int | None = None
    macs: int | None = None


@dataclass(frozen=True)
class Threshold:
    """A chosen threshold (`float(t)`), the score of the full net, and the points of the curve."""

    value: float
    reference: float
    points: tuple[Point, ...]

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        lines = [f"threshold {self.value:.4g}; the full net scores {self.reference:.4f}"]
        for p in self.points:
            extra = "".join(f"  {v} {n}" for n, v in (("bytes", p.bytes), ("MACs", p.macs)) if v)
            mark = "*" if p.threshold == self.value else " "
            lines.append(
                f"{mark} {p.threshold:9.4f}  sparsity {p.sparsity:.4f}  score {p.score:.4f}{extra}"
            )
        return "\n".join(lines)

    def plot(self, ax: Any = None) -> Any:
        """Score against the fraction of weights that are left; returns the matplotlib axes."""
        if ax is None:
            ax = import_optional("matplotlib.figure").Figure().subplots()
        left = [max(1 - p.sparsity, 1e-6) for p in self.points]
        ax.semilogx(left, [p.score for p in self.points], marker=".")
        ax.axhline(self.reference, linestyle=":")
        ax.set_xlabel("fraction of weights left")
        ax.set_ylabel("score")
        return ax


def choose_threshold(
    net: nn.Module,
    validation: Data,
    metric: Metric,
    *,
    max_drop: float | None = None,
    sparsity: float | None = None,
    bytes: int | None = None,
    macs: int | None = None,
    points: int = 31,
) -> Threshold:
    """Sweep the relevance threshold on held-out data and take the one that meets one budget.

    The thresholds are quantiles of the net's own scores, evenly spaced in the logarithm of the
    fraction that is kept. Do not choose it on test data.

    Args:
        net: a noisy net whose modules share one rule (`vardrop.relevance`).
        validation: inputs and targets, two tensors or a list of batches.
        metric: `metric(output, target)`, higher is better, such as an accuracy.
        max_drop: the sparsest threshold whose score is at most this much below the full net's.
        sparsity: the densest threshold that drops at least this fraction.
        bytes: the densest threshold whose packed file is at most this long.
        macs: the densest threshold with at most this many multiplications per example.
        points: how many thresholds to try.

    >>> import torch, vardrop as vd
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.sparse_vd())
    >>> data = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    >>> accuracy = lambda output, y: (output.argmax(1) == y).float().mean()
    >>> t = choose_threshold(net, data, accuracy, sparsity=0.5)
    >>> [p.sparsity for p in t.points if p.threshold == float(t)][0] >= 0.5
    True
    """
    budget = {"max_drop": max_drop, "sparsity": sparsity, "bytes": bytes, "macs": macs}
    budgets = {k: v for k, v in budget.items() if v is not None}
    if len(budgets) != 1:
        raise VardropError(
            f"Expected one of `max_drop`, `sparsity`, `bytes` and `macs`, but got {list(budgets)}."
        )
    ((kind, limit),) = budgets.items()
    check_net(net)
    check_number(kind, limit, at_most=1 if kind == "sparsity" else None)
    check_integer("points", points)
    data = batches(validation, "validation")
    never = {n: -math.inf if r.keep_above else math.inf for n, r in rules(net).items()}
    full = zero_pruned_weights(net, never)[0]  # nothing is dropped
    reference = score(full, data, metric)
    example, graph = first_rows(to_arguments(data[0][0])), None
    if kind in ("bytes", "macs"):  # the units are the same at every threshold
        graph = trace_units(decompose_layers(full), example)
    curve = []
    for threshold in _candidates(_pool_scores(net), points):
        masks = [r.kept for r in rules(net, threshold).values()]
        share = sum(int((~k).sum()) for k in masks) / sum(k.numel() for k in masks)
        if graph is None:
            small = zero_pruned_weights(net, threshold)[0]
            curve.append(Point(threshold, score(small, data, metric), share))
        else:
            shrunk = shrink_traced(net, example, threshold, True, graph)
            size, left = count_packed_bytes(shrunk), shrunk.plan.total("macs")[1]
            curve.append(Point(threshold, score(shrunk.net, data, metric), share, size, left))
    return Threshold(_best(curve, kind, limit, reference).threshold, reference, tuple(curve))


def _pool_scores(net: nn.Module) -> Relevance:
    """The scores of all modules together; an error where their rules differ."""
    relevances = list(rules(net, 0.0).values())
    scores = torch.cat([r.score.detach().flatten().double() for r in relevances])
    return Relevance(scores, 0.0, relevances[0].keep_above, relevances[0].kind)


def _candidates(pooled: Relevance, points: int) -> list[float]:
    """Thresholds from the densest to the sparsest, each between two neighbouring scores."""
    ordered = pooled.score.sort(descending=pooled.keep_above).values
    ordered = ordered[ordered.isfinite()]
    fractions = torch.logspace(0, math.log10(_SPARSEST), points, dtype=torch.float64)
    counts = (fractions * len(pooled.score)).long().clamp(0, len(ordered) - 1).tolist()
    return list(dict.fromkeys(float(ordered[k]) for k in counts))


def _best(curve: list[Point], kind: str, limit: float, reference: float) -> Point:
    """The last point that loses little enough, or the first one that is small enough."""
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
