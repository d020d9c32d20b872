"""Split-conformal prediction: sets and intervals with guaranteed coverage."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vardrop._core.checks import check_number
from vardrop._core.errors import VardropError
from vardrop.prediction.prediction import Interval, Prediction


@dataclass(frozen=True)
class Conformal:
    """A split-conformal rule: the largest score that still belongs to the set.

    Classification: the set of classes with 1 - p <= quantile. Regression: mean +- quantile * std.
    Where a row has several targets (outputs, pixels), the sets hold all of them together. The rule
    holds for predictions like those it was fitted on: by moments if `analytic`, else by draws.
    """

    level: float
    quantile: float
    analytic: bool = False

    def check_mode(self, analytic: bool) -> None:
        """Raise unless predictions are of the mode that the rule was fitted on."""
        if analytic != self.analytic:
            fitted, given = ("moments", "sample") if self.analytic else ("sample", "moments")
            raise VardropError(
                f'Expected predictions of mode="{fitted}", on which this conformal rule was '
                f'fitted, but got mode="{given}", whose variances are others. Fit it again: '
                f'vardrop.conformal(predictions of mode="{given}", y).'
            )

    def classes(self, p: Prediction) -> Tensor:
        """The prediction sets of new rows, (N, C, ...), True for the classes inside."""
        self.check_mode(p.analytic)
        return 1 - p.probs <= self.quantile

    def interval(self, p: Prediction) -> Interval:
        """The prediction intervals of new rows."""
        self.check_mode(p.analytic)
        if p.classifies:
            raise VardropError("Expected a regression for `interval`, but got classes.")
        half = self.quantile * p.std
        return Interval(p.mean - half, p.mean + half)


def conformal(p: Prediction, y: Tensor, level: float = 0.9) -> Conformal:
    """Fit sets or intervals that cover new targets with at least the given probability.

    P(all targets of a row in their sets) >= level for rows exchangeable with the held-out ones,
    whatever the net: the bound is the ceil((n + 1) level)-th smallest score of n rows. The score of
    a row is the largest of 1 - p[y] or |y - mean| / std over its targets that count: rows are
    exchangeable, the outputs, pixels or tokens of one row are not. Where n is too small for the
    level the bound is infinite, and the set holds everything.

    Args:
        p: the prediction on data that did not train the net.
        y: its targets: classes (N, ...), or values in the shape of `p.mean`.
        level: the coverage that is guaranteed on average over calibration and new data.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import conformal, predict
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
    >>> p = predict(net, torch.randn(50, 4), samples=8)
    >>> conformal(p, p.probs.argmax(1)).classes(p).shape
    torch.Size([50, 3])

    Vovk, Gammerman & Shafer 2005; Lei et al. 2018, "Distribution-free predictive inference for
    regression", sec. 2.2; Sadinle, Lei & Wasserman 2019, "Least ambiguous set-valued classifiers".
    """
    check_number("level", level, above=0, below=1)
    p.likelihood.check_target(p.mean, y)
    rule = conformal_rule(_scores(p, y).view(len(p), -1).amax(1), level)
    return replace(rule, analytic=p.analytic)


def conformal_rule(scores: Tensor, level: float, weight: Tensor | None = None) -> Conformal:
    """The rule that the scores of held-out rows give; an infinite bound where they are too few.

    Args:
        scores: of n rows, (n,).
        level: the coverage.
        weight: of each row, (n,), which sum to the number of exchangeable units, such as one over
            the size of its group; ones by default.
    """
    weight = torch.ones(len(scores)) if weight is None else weight
    ordered, order = scores.double().sort()
    reached = weight.double()[order].cumsum(0)
    wanted = level * (float(weight.double().sum()) + 1) * (1 - 1e-12)  # the sums are rounded
    inside = reached >= wanted
    return Conformal(level, float(ordered[inside][0]) if bool(inside.any()) else math.inf)


def _scores(p: Prediction, y: Tensor) -> Tensor:
    """How far each target is from the prediction, (N, ...)."""
    axis, counted = p.likelihood.class_axis, p.likelihood.valid_mask(y)
    if axis is not None and p.probs.shape == p.log_probs.shape:
        chosen = p.probs.gather(axis, y.where(counted, 0).unsqueeze(axis)).squeeze(axis)
        return (1 - chosen).where(counted, 0)  # a target that does not count is in every set
    if p.classifies:
        raise VardropError(
            f"Expected classes or values for `conformal`, but got {p.likelihood!r}. "
            "Give the net two classes."
        )
    if not bool((p.std > 0).all()):
        raise VardropError(
            "Expected a positive `std` in every row, but got 0. "
            "Predict with likelihood=vardrop.Gaussian(std)."
        )
    return (y - p.mean).abs() / p.std
