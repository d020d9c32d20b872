"""Choose the pruning threshold on validation data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from vardrop._core.calls import LabelledData, labelled_batches
from vardrop._core.checks import check_integer, check_net, check_number
from vardrop._core.errors import VardropError
from vardrop._core.progress import track
from vardrop.compression.mask import rules, zero_pruned_weights
from vardrop.compression.probes import Metric, score

_SPARSEST = 1e-3  # the smallest fraction of weights that is tried


@dataclass(frozen=True)
class Point:
    """One threshold and the pruned model.

    Args:
        threshold: the threshold.
        score: of the pruned model.
        sparsity: the fraction of pruned weights or units.
    """

    threshold: float
    score: float
    sparsity: float


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
        rows = (
            f"{'*' if p.threshold == self.value else ' '} {p.threshold:9.4f}  "
            f"sparsity {p.sparsity:.4f}  score {p.score:.4f}"
            for p in self.points
        )
        head = f"threshold {self.value:.4g}, the full model scores {self.reference:.4f}"
        return "\n".join([head, *rows])


def choose_threshold(
    net: nn.Module,
    data: LabelledData,
    metric: Metric,
    *,
    max_drop: float | None = None,
    sparsity: float | None = None,
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
    kind, limit = ("max_drop", max_drop) if sparsity is None else ("sparsity", sparsity)
    if limit is None or None not in (max_drop, sparsity):
        raise VardropError(
            f"Expected one of `max_drop` and `sparsity`, but got {max_drop} and {sparsity}."
        )
    check_net(net)
    check_number(kind, limit, at_most=1 if kind == "sparsity" else None)
    check_integer("points", points)
    examples = list(labelled_batches(data))
    never = {n: -math.inf if r.keep_above else math.inf for n, r in rules(net).items()}
    reference = score(zero_pruned_weights(net, never)[0], examples, metric)
    curve = []
    # Candidates from the densest to the sparsest, which are scores of modules with one rule.
    relevances = list(rules(net, 0.0).values())
    scores = torch.cat([r.score.detach().flatten().double() for r in relevances])
    ordered = scores[scores.isfinite()].sort(descending=relevances[0].keep_above).values
    fractions = torch.logspace(0, math.log10(_SPARSEST), points, dtype=torch.float64)
    counts = (fractions * len(scores)).long().clamp(0, len(ordered) - 1)
    candidates = dict.fromkeys(ordered[counts].tolist())
    for threshold in track(candidates, "choose_threshold", progress=progress):
        masks = [r.kept for r in rules(net, threshold).values()]
        share = sum(int((~k).sum()) for k in masks) / sum(k.numel() for k in masks)
        masked_score = score(zero_pruned_weights(net, threshold)[0], examples, metric)
        curve.append(Point(threshold, masked_score, share))
    if kind == "sparsity":
        met, nearest = [p for p in curve if p.sparsity >= limit], curve[-1]
    else:
        met = [p for p in reversed(curve) if p.score >= reference - limit]
        nearest = max(curve, key=lambda p: p.score)
    if not met:
        raise VardropError(
            f"Expected a threshold with `{kind}` within {limit}, but the nearest is {nearest}. "
            "Loosen the budget, or train longer."
        )
    return Threshold(met[0].threshold, reference, tuple(curve))
