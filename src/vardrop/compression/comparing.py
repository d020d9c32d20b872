"""Nets on data: the threshold that held-out data allow, and two nets side by side."""

from __future__ import annotations

import math
import tempfile
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vardrop import metrics
from vardrop._core.calls import untouched
from vardrop._core.checks import check_integer, check_net, check_number
from vardrop._core.errors import VardropError, needed
from vardrop.compression.files import densify, save
from vardrop.compression.masks import masked, rules
from vardrop.compression.packing import packed_bytes
from vardrop.compression.running import (
    Data,
    Metric,
    as_inputs,
    batches,
    called,
    first_rows,
    outputs,
    score,
    seconds,
)
from vardrop.compression.shrinking import layer_costs, planned
from vardrop.noisy import Relevance, evaluating

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
            ax = needed("matplotlib.figure").Figure().subplots()
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
    given = {k: v for k, v in budget.items() if v is not None}
    if len(given) != 1:
        raise VardropError(
            f"Expected one of `max_drop`, `sparsity`, `bytes` and `macs`, but got {list(given)}."
        )
    ((kind, limit),) = given.items()
    check_net(net)
    check_number(kind, limit, at_most=1 if kind == "sparsity" else None)
    check_integer("points", points)
    data = batches(validation, "validation")
    reference = score(masked(net, _never(net))[0], data, metric)
    curve = tuple(_point(net, t, data, metric, kind) for t in _candidates(_pooled(net), points))
    return Threshold(_best(curve, kind, limit, reference).threshold, reference, curve)


def _never(net: nn.Module) -> dict[str, float]:
    """Thresholds that drop nothing."""
    return {n: -math.inf if r.keep_above else math.inf for n, r in rules(net).items()}


def _pooled(net: nn.Module) -> Relevance:
    """The scores of all modules together; an error where their rules differ."""
    found = list(rules(net, 0.0).values())
    scores = torch.cat([r.score.detach().flatten().double() for r in found])
    return Relevance(scores, 0.0, found[0].keep_above, found[0].kind)


def _candidates(pooled: Relevance, points: int) -> list[float]:
    """Thresholds from the densest to the sparsest, each between two neighbouring scores."""
    ordered = pooled.score.sort(descending=pooled.keep_above).values
    ordered = ordered[ordered.isfinite()]
    fractions = torch.logspace(0, math.log10(_SPARSEST), points, dtype=torch.float64)
    kept = (fractions * len(pooled.score)).long().clamp(0, len(ordered) - 1).tolist()
    return list(dict.fromkeys(float(ordered[k]) for k in kept))


def _point(
    net: nn.Module, threshold: float, data: list[tuple[Any, Tensor]], metric: Metric, kind: str
) -> Point:
    found = rules(net, threshold)
    dropped = sum(int((~r.kept).sum()) for r in found.values())
    sparsity = dropped / sum(r.score.numel() for r in found.values())
    size = multiplications = None
    if kind in ("bytes", "macs"):
        example = first_rows(as_inputs(data[0][0]))
        plan, small = planned(net, example, threshold, drop_inputs=True)
        size, multiplications = packed_bytes(small, plan), plan.total("macs")[1]
        return Point(threshold, score(small, data, metric), sparsity, size, multiplications)
    return Point(threshold, score(masked(net, threshold)[0], data, metric), sparsity)


def _best(curve: tuple[Point, ...], kind: str, limit: float, reference: float) -> Point:
    if kind == "max_drop":
        met = [p for p in curve if p.score >= reference - limit]
        if met:
            return met[-1]
    else:
        met = [
            p
            for p in curve
            if (p.sparsity >= limit if kind == "sparsity" else getattr(p, kind) <= limit)
        ]
        if met:
            return met[0]
    best = max(curve, key=lambda p: p.score) if kind == "max_drop" else curve[-1]
    raise VardropError(
        f"Expected a threshold with `{kind}` within {limit}, but the nearest is {best}. "
        "Loosen the budget, or train longer."
    )


@dataclass(frozen=True)
class Measurements:
    """What one classifier scores and costs; `auroc` is of its entropy out of distribution."""

    accuracy: float
    nll: float
    ece: float
    auroc: float | None
    latency: float
    macs: int
    bytes: int


@dataclass(frozen=True)
class Comparison:
    """Two nets side by side; print it as a table."""

    before: Measurements
    after: Measurements

    def __str__(self) -> str:
        lines = [f"{'':9} {'before':>12} {'after':>12}"]
        for field in fields(Measurements):
            pair = (getattr(self.before, field.name), getattr(self.after, field.name))
            if None not in pair:
                lines.append(f"{field.name:9} {pair[0]:12.5g} {pair[1]:12.5g}")
        return "\n".join(lines)


def compare(
    before: nn.Module,
    after: nn.Module,
    test: Data,
    ood: Tensor | None = None,
    foreign: Tensor | None = None,
) -> Comparison:
    """Accuracy, NLL, ECE, AUROC out of distribution, latency, MACs and bytes of two classifiers.

    Args:
        before, after: plain nets that return logits (N, classes).
        test: inputs and labels.
        ood: inputs out of distribution, which a net should be less sure about.
        foreign: the name that `ood` had; it goes with the next version.

    The latency is of one batch of `test` in seconds, the bytes are those of `save` on disk, the
    MACs those of one example.

    >>> import torch
    >>> net = torch.nn.Linear(4, 3)
    >>> result = compare(net, net, (torch.randn(8, 4), torch.zeros(8, dtype=torch.long)))
    >>> result.before.macs
    12
    """
    check_net(before, "before")
    check_net(after, "after")
    if foreign is not None:
        warnings.warn("`foreign` is called `ood` now.", DeprecationWarning, stacklevel=2)
        ood = foreign
    return Comparison(_measured(before, test, ood), _measured(after, test, ood))


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(1)


def _measured(net: nn.Module, test: Data, ood: Tensor | None) -> Measurements:
    logits, y = outputs(net, test, "test")
    probs = logits.double().softmax(1)
    x = untouched(as_inputs(batches(test, "test")[0][0]))
    costs = layer_costs(densify(net)[0], first_rows(x))
    auroc = None
    if ood is not None:
        other = outputs(net, (ood, torch.zeros(len(ood))))[0].double().softmax(1)
        auroc = float(metrics.auroc(_entropy(probs), _entropy(other)))
    with torch.no_grad(), evaluating(net):
        latency = seconds(lambda: called(net, x), budget=0.2)
    with tempfile.TemporaryDirectory() as folder:
        size = save(net, Path(folder) / "net.safetensors")
    return Measurements(
        float(metrics.accuracy(probs, y)),
        float(metrics.nll_from_log_probs(logits.double().log_softmax(1), y)),
        float(metrics.ece(probs, y)),
        auroc,
        latency,
        sum(c.macs for c in costs.values()),
        size,
    )
