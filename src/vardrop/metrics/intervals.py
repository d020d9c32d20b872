"""How sure a score is: by a bootstrap over its rows, or by repetitions with other seeds.

A score of weighted rows is a function from weights (B, N) to B scores, so that all resamples of the
bootstrap are scored at once, and two nets on the same resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vardrop._core.errors import needed

Weighted = Callable[[Tensor], Tensor]
LEVEL = 0.95
_DRAWS, _FEWER = 1000, 200  # resamples; fewer where rows are so many that scores are normal
_MANY = 5000
_AT_ONCE = 1 << 22  # weights in memory


class Estimate(NamedTuple):
    """A number, its standard error, and the ends of its 95 % interval; None where not known."""

    value: float
    error: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def sign(self) -> int:
        """-1 or 1 where the whole interval is on one side of zero, else 0."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return 0
        return 1 if self.low > 0 else -1


def average(rows: Tensor) -> Weighted:
    """The mean of a number per row."""
    values = rows.double().flatten()
    return lambda weights: weights @ values / weights.sum(1)


def class_scores(probs: Tensor, log_probs: Tensor, y: Tensor) -> dict[str, Weighted]:
    """Scores of class probabilities, as `evaluate` names them, of weighted rows.

    The calibration error is not among them: resampled rows make it larger.

    Args:
        probs: shape (N, K).
        log_probs: of the labels, shape (N,).
        y: class indices, shape (N,).
    """
    probs, guess = probs.double(), probs.argmax(1)
    hits = (guess == y).double()
    truth = torch.nn.functional.one_hot(y, probs.shape[1]).double()
    guessed = torch.nn.functional.one_hot(guess, probs.shape[1]).double()

    def balanced(weights: Tensor) -> Tensor:
        return (weights @ (truth * hits[:, None]) / (weights @ truth)).nanmean(1)

    def f1(weights: Tensor) -> Tensor:
        both = weights @ truth + weights @ guessed
        return (2 * (weights @ (truth * guessed)) / both).nanmean(1)

    def apart(weights: Tensor) -> Tensor:
        several = range(probs.shape[1] if probs.shape[1] > 2 else 1)  # of two both are the same
        areas = [_area(probs[:, k], truth[:, k], weights) for k in several]
        return torch.stack(areas, 1).nanmean(1)

    return {
        "accuracy": average(hits),
        "balanced_accuracy": balanced,
        "auroc": apart,
        "f1": f1,
        "nll": average(-log_probs),
        "brier": average((probs - truth).square().sum(1)),
    }


def _area(scores: Tensor, truth: Tensor, weights: Tensor) -> Tensor:
    """The area under the ROC curve of each row of weights; ties count half."""
    ordered, order = scores.sort()
    own, weights = truth[order], weights[:, order]
    below = torch.nn.functional.pad((weights * (1 - own)).cumsum(1), (1, 0))
    first = torch.searchsorted(ordered, ordered)
    last = torch.searchsorted(ordered, ordered, right=True)
    ties = bool((last - first > 1).any())
    losers = below[:, first] + below[:, last] if ties else below[:, :-1] + below[:, 1:]
    own = weights * own
    return (own * losers).sum(1) / (2 * own.sum(1) * below[:, -1])


def number_scores(
    mean: Tensor, y: Tensor, lower: Tensor, upper: Tensor, log_probs: Tensor | None
) -> dict[str, Weighted]:
    """Scores of predicted numbers, as `evaluate` names them, of weighted rows; all of shape (N,).

    Args:
        mean: predictive means.
        y: what happened.
        lower, upper: ends of the 95 % intervals.
        log_probs: of what happened, where they are known.
    """
    errors = (mean - y).double()
    squares, truth = average(errors.square()), y.double()
    moments = average(truth - truth.mean()), average((truth - truth.mean()).square())
    inside = (lower <= y) & (y <= upper)
    found: dict[str, Weighted] = {
        "rmse": lambda weights: squares(weights).sqrt(),
        "mae": average(errors.abs()),
        "r2": lambda weights: (
            1 - squares(weights) / (moments[1](weights) - moments[0](weights).square())
        ),
        "coverage95": average(inside),
        "width95": average(upper - lower),
    }
    return found if log_probs is None else {**found, "nll": average(-log_probs)}


def bootstrap(
    scores: Mapping[str, Weighted], rows: int, weight: Tensor | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Scores of 1000 resamples of the rows, the same ones at every call; 200 above 5000 rows.

    >>> drawn = bootstrap({"mean": average(torch.arange(100.0))}, 100)["mean"]
    >>> bool((drawn.std() - 2.89).abs() < 0.2)  # the deviation of the rows over the root of 100
    True
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[Tensor]] = {name: [] for name in scores}
    share = torch.ones(rows).double() if weight is None else weight.double().flatten()
    for count in _chunks(rows):
        chosen = torch.randint(rows, (count, rows), generator=generator)
        counts = torch.zeros(count, rows, dtype=torch.float64)
        counts.scatter_add_(1, chosen, torch.ones(1, dtype=torch.float64).expand(count, rows))
        for name, score in scores.items():
            found[name].append(score(counts * share))
    return {name: torch.cat(parts) for name, parts in found.items()}


def _chunks(rows: int) -> list[int]:
    draws = _DRAWS if rows <= _MANY else _FEWER
    size = min(draws, max(1, _AT_ONCE // rows))
    whole, rest = divmod(draws, size)
    return [size] * whole + [rest] * bool(rest)


def estimated(value: float, draws: Tensor) -> Estimate:
    """A value with the error and the interval that resamples give it, where they are defined.

    The ends are quantiles of 1000 resamples, and with fewer those of a normal distribution.
    """
    known = draws[draws.isfinite()]
    if len(known) < len(draws) // 2 or not math.isfinite(value):
        return Estimate(value)
    error = float(known.std())
    if len(draws) < _DRAWS:
        return Estimate(value, error, value - 1.96 * error, value + 1.96 * error)
    ends = known.quantile(torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=known.dtype))
    return Estimate(value, error, *ends.tolist())


def repeated(
    values: Sequence[float],
    ratio: float = 0.0,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Estimate:
    """The mean of repetitions, its standard error s / sqrt(n), and Student's interval.

    Where every repetition tests on rows of its own that the others train on, they are not
    independent, and the interval is that of s sqrt(1 / n + ratio).

    Args:
        values: one per repetition.
        ratio: rows of the test over rows of the training; 0 where all test on the same rows.
        bounds: the least and the largest value there can be.

    >>> repeated([1.0, 2.0, 3.0]).error
    0.5773502691896258

    Nadeau & Bengio 2003, "Inference for the generalization error", sec. 3.
    """
    count, found = len(values), torch.tensor(values, dtype=torch.float64)
    mean = float(found.mean())
    if count < 2 or not bool(found.isfinite().all()):
        return Estimate(mean)
    spread = float(found.std())
    wide = float(needed("scipy.stats").t.ppf((1 + LEVEL) / 2, count - 1))
    half = wide * spread * math.sqrt(1 / count + ratio)
    low, high = max(bounds[0], mean - half), min(bounds[1], mean + half)
    return Estimate(mean, spread / math.sqrt(count), low, high)
