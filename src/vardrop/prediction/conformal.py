"""Split-conformal prediction: sets and intervals with guaranteed coverage."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vardrop._core.checks import check_number, check_type
from vardrop._core.errors import VardropError
from vardrop.prediction.prediction import Interval, Prediction


@dataclass(frozen=True)
class Conformal:
    """A split-conformal rule: the largest score that still belongs to the set.

    Classification: the set of classes with 1 - p <= quantile. Regression: mean +- quantile * std.
    If an example has several targets (outputs, pixels), the sets contain all of them together with
    the given probability. The rule is valid for predictions of the mode it was fitted on.

    Args:
        level: the coverage.
        quantile: the largest score.
        analytic: whether the rule was fitted on predictions of mode="moments".
    """

    level: float
    quantile: float
    analytic: bool = False

    def check_mode(self, analytic: bool) -> None:
        """Raise an error unless predictions are of the mode that the rule was fitted on.

        Args:
            analytic: whether the mode is "moments".
        """
        if analytic != self.analytic:
            modes = ("moments", "sample") if self.analytic else ("sample", "moments")
            raise VardropError(
                f'Expected predictions of mode="{modes[0]}", on which this conformal rule was '
                f'fitted, but got mode="{modes[1]}". Fit the rule again on predictions of '
                f'mode="{modes[1]}".'
            )

    def classes(self, p: Prediction) -> Tensor:
        """The prediction sets of new examples.

        Args:
            p: a prediction of classes.

        Returns:
            A mask (N, C, ...), True for the classes in the set.
        """
        self.check_mode(p.analytic)
        return 1 - p.probs <= self.quantile

    def interval(self, p: Prediction) -> Interval:
        """The prediction intervals of new examples.

        Args:
            p: a prediction of values.

        Returns:
            The bounds.
        """
        self.check_mode(p.analytic)
        if p.classifies:
            raise VardropError("Expected a regression for `interval`, but got classes.")
        half = self.quantile * p.std
        return Interval(p.mean - half, p.mean + half)


def conformal(p: Prediction, y: Tensor, level: float = 0.9) -> Conformal:
    """Fit sets or intervals that contain new targets with at least the given probability.

    P(all targets of an example in their sets) >= level for examples that are exchangeable with the
    held-out ones, for any model. The bound is the ceil((n + 1) level)-th smallest score of n
    examples. The score of an example is the largest of 1 - p[y] or |y - mean| / std over its
    targets, because examples are exchangeable, but the outputs, pixels or tokens of one example are
    not. If n is too small for the level, the bound is infinite and the set contains everything.

    Args:
        p: a prediction for data that was not used for training.
        y: targets, classes (N, ...) or values in the shape of `p.mean`.
        level: the coverage that is guaranteed on average over calibration and new data.

    Returns:
        The fitted rule.

    >>> import torch, vardrop as vd
    >>> from vardrop.prediction import conformal, predict
    >>> net = vd.convert(torch.nn.Linear(4, 3), vd.bayes_by_backprop())
    >>> p = predict(net, torch.randn(50, 4), samples=8)
    >>> conformal(p, p.probs.argmax(1)).classes(p).shape
    torch.Size([50, 3])

    Vovk, Gammerman & Shafer 2005; Lei et al. 2018, "Distribution-free predictive inference for
    regression", sec. 2.2; Sadinle, Lei & Wasserman 2019, "Least ambiguous set-valued classifiers".
    """
    check_type("p", p, Prediction, "a prediction of vardrop.predict")
    p.likelihood.check_target(p.mean, y)
    axis, counted = p.likelihood.class_axis, p.likelihood.valid_mask(y)
    if axis is not None and p.probs.shape == p.log_probs.shape:
        chosen = p.probs.gather(axis, y.where(counted, 0).unsqueeze(axis)).squeeze(axis)
        scores = (1 - chosen).where(counted, 0)  # an ignored target is in every set
    elif p.classifies:
        raise VardropError(
            f"Expected classes or values for `conformal`, but got {p.likelihood!r}. "
            "Use a model with two classes."
        )
    elif not bool((p.std > 0).all()):
        raise VardropError(
            "Expected a positive `std` for every example, but got 0. "
            "Predict with likelihood=vardrop.Gaussian(std)."
        )
    else:
        scores = (y - p.mean).abs() / p.std
    rule = conformal_rule(scores.view(len(p), -1).amax(1), level)
    return replace(rule, analytic=p.analytic)


def conformal_rule(scores: Tensor, level: float, weight: Tensor | None = None) -> Conformal:
    """The rule from the scores of held-out examples; the bound is infinite if they are too few.

    Args:
        scores: of n examples, (n,).
        level: the coverage.
        weight: of each example, (n,). The weights sum to the number of exchangeable units: one over
            the size of an example's group, for example. Ones by default.

    Returns:
        The fitted rule.
    """
    check_number("level", level, above=0, below=1)
    weight = torch.ones(len(scores)) if weight is None else weight
    ordered, order = scores.double().sort()
    reached = weight.double()[order].cumsum(0)
    wanted = level * (float(weight.double().sum()) + 1) * (1 - 1e-12)  # the sums are rounded
    inside = reached >= wanted
    return Conformal(level, float(ordered[inside][0]) if bool(inside.any()) else math.inf)
