"""Uncertainty of a score: a bootstrap over its examples, or repetitions with other seeds.

A weighted score is a function from weights (B, N) of the examples to B scores. So all resamples of
the bootstrap are scored at once, and two models are scored on the same resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from vardrop._core.errors import import_optional

WeightedScore = Callable[[Tensor], Tensor]
LEVEL = 0.95
_DRAWS, _FEWER = 1000, 200  # resamples, fewer if the examples are so many that scores are normal
_MANY = 5000
_AT_ONCE = 1 << 22  # weights in memory


class Estimate(NamedTuple):
    """A number, its standard error, and the ends of its 95% interval. None if not available."""

    value: float
    error: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def sign(self) -> int:
        """-1 or 1 if the whole interval is on one side of zero, else 0."""
        if self.low is None or self.high is None:
            return 0
        return (self.low > 0) - (self.high < 0)


def average(numbers: Tensor) -> WeightedScore:
    """The weighted mean of one number per example."""
    flat = numbers.double().flatten()
    return lambda weights: weights @ flat / weights.sum(1)


def class_scores(probs: Tensor, log_probs: Tensor, y: Tensor) -> dict[str, WeightedScore]:
    """Weighted scores of class probabilities, by the names that `evaluate` uses.

    The calibration error is not one of them, because resampling increases it.

    Args:
        probs: shape (N, K).
        log_probs: of the labels, shape (N,).
        y: class indices, shape (N,).
    """
    classes, probs = probs.shape[1], probs.double()
    truth, predicted = one_hot(y, classes).double(), one_hot(probs.argmax(1), classes).double()
    correct = truth * predicted

    def auroc(weights: Tensor) -> Tensor:
        areas = []  # under the ROC curve of each class. Ties count half
        for k in range(classes if classes > 2 else 1):  # the areas of two classes are equal
            ascending, order = probs[:, k].sort()
            positive = weights[:, order] * truth[order, k]
            below = pad((weights[:, order] - positive).cumsum(1), (1, 0))
            first = torch.searchsorted(ascending, ascending)
            last = torch.searchsorted(ascending, ascending, right=True)
            twice_wins = (positive * (below[:, first] + below[:, last])).sum(1)
            areas.append(twice_wins / (2 * positive.sum(1) * below[:, -1]))
        return torch.stack(areas, 1).nanmean(1)

    return {
        "accuracy": average(correct.sum(1)),
        "balanced_accuracy": lambda w: (w @ correct / (w @ truth)).nanmean(1),
        "auroc": auroc,
        "f1": lambda w: (2 * (w @ correct) / (w @ truth + w @ predicted)).nanmean(1),
        "nll": average(-log_probs),
        "brier": average((probs - truth).square().sum(1)),
    }


def number_scores(
    mean: Tensor, y: Tensor, lower: Tensor, upper: Tensor, log_probs: Tensor | None
) -> dict[str, WeightedScore]:
    """Weighted scores of predicted numbers, by the names that `evaluate` uses. Shapes are (N,).

    Args:
        mean: predictive means.
        y: observed numbers.
        lower: lower ends of the 95% intervals.
        upper: upper ends of the 95% intervals.
        log_probs: of the observed numbers, if available.
    """
    errors, truth = (mean - y).double(), y.double()
    squares, centered = average(errors.square()), truth - truth.mean()
    first, second = average(centered), average(centered.square())
    scores: dict[str, WeightedScore] = {
        "rmse": lambda weights: squares(weights).sqrt(),
        "mae": average(errors.abs()),
        "r2": lambda w: 1 - squares(w) / (second(w) - first(w).square()),
        "coverage95": average((lower <= y) & (y <= upper)),
        "width95": average(upper - lower),
    }
    return scores if log_probs is None else {**scores, "nll": average(-log_probs)}


def bootstrap(
    scores: Mapping[str, WeightedScore], rows: int, weight: Tensor | None = None
) -> dict[str, Tensor]:
    """Scores of 1000 resamples of the examples, or of 200 with more than 5000 examples.

    The resamples are the same at every call.

    Args:
        scores: weighted scores by name.
        rows: the number of examples.
        weight: weights of the examples, shape (rows,). One if None.

    Returns:
        One score per resample, by name.

    >>> draws = bootstrap({"mean": average(torch.arange(100.0))}, 100)["mean"]
    >>> bool((draws.std() - 2.89).abs() < 0.2)  # the standard deviation of the examples over 10
    True
    """
    generator = torch.Generator().manual_seed(0)
    resampled: dict[str, list[Tensor]] = {name: [] for name in scores}
    weight = torch.ones(rows).double() if weight is None else weight.double().flatten()
    draws = _DRAWS if rows <= _MANY else _FEWER
    size = max(1, _AT_ONCE // rows)
    for start in range(0, draws, size):
        chosen = torch.randint(rows, (min(size, draws - start), rows), generator=generator)
        counts = torch.zeros(chosen.shape, dtype=torch.float64)
        counts.scatter_add_(1, chosen, counts.new_ones(1).expand_as(counts))
        for name, score in scores.items():
            resampled[name].append(score(counts * weight))
    return {name: torch.cat(chunks) for name, chunks in resampled.items()}


def bootstrap_estimate(value: float, draws: Tensor) -> Estimate:
    """A value with the standard error and the interval of its resamples.

    The ends are quantiles of 1000 resamples. With fewer they are quantiles of a normal
    distribution. There is no interval if half of the resamples are not finite.
    """
    finite = draws[draws.isfinite()]
    if len(finite) < len(draws) // 2 or not math.isfinite(value):
        return Estimate(value)
    error = float(finite.std())
    if len(draws) < _DRAWS:
        return Estimate(value, error, value - 1.96 * error, value + 1.96 * error)
    ends = finite.quantile(torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=finite.dtype))
    return Estimate(value, error, *ends.tolist())


def repetition_estimate(
    values: Sequence[float], ratio: float = 0.0, bounds: tuple[float, float] = (-math.inf, math.inf)
) -> Estimate:
    """The mean of repetitions, its standard error s / sqrt(n), and Student's interval.

    If every repetition tests on other examples, which the other repetitions train on, they are not
    independent. The interval is then computed with s sqrt(1 / n + ratio).

    Args:
        values: one per repetition.
        ratio: test examples over training examples, or 0 if all repetitions have one test set.
        bounds: the least and the largest possible value.

    Returns:
        The estimate, without error and interval if there is one value or if one is not finite.

    >>> repetition_estimate([1.0, 2.0, 3.0]).error
    0.5773502691896258

    Nadeau & Bengio 2003, "Inference for the generalization error", sec. 3.
    """
    count, tensor = len(values), torch.tensor(values, dtype=torch.float64)
    mean = float(tensor.mean())
    if count < 2 or not bool(tensor.isfinite().all()):
        return Estimate(mean)
    std = float(tensor.std())
    quantile = float(import_optional("scipy.stats").t.ppf((1 + LEVEL) / 2, count - 1))
    half = quantile * std * math.sqrt(1 / count + ratio)
    low, high = max(bounds[0], mean - half), min(bounds[1], mean + half)
    return Estimate(mean, std / math.sqrt(count), low, high)
