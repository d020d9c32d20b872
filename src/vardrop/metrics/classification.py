"""Scores of class probabilities, their calibration, and the ranking of examples by uncertainty."""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import nll_loss, one_hot

from vardrop._core.checks import check_choice, check_integer, check_shape
from vardrop._core.errors import VardropError
from vardrop.metrics.validate import (
    check_classification,
    check_values,
    check_weight,
    weighted_mean,
)

Scheme = Literal["width", "mass"]


def accuracy(probs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Fraction of examples whose most probable class is the label.

    1/N sum_n [argmax_k p_nk = y_n]. A tie goes to the lowest class index.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,).
        weight: how many examples each example counts for, shape (N,). One if None.

    Returns:
        scalar in [0, 1].

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
    tensor(0.5000)

    Gneiting & Raftery 2007, "Strictly proper scoring rules, prediction, and estimation" (the
    zero-one score).
    """
    probs, y = check_classification(probs, y)
    return weighted_mean((probs.argmax(dim=1) == y).to(probs.dtype), weight)


def nll(probs: Tensor, y: Tensor) -> Tensor:
    """Mean negative log-likelihood of the labels, from probabilities.

    -1/N sum_n log p_n,y_n. It is infinite if a label has probability zero. If probabilities may
    underflow, use `nll_from_log_probs`.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,).

    Returns:
        scalar in nats, at least 0.

    >>> nll(torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([0, 1]))
    tensor(0.6931)

    Good 1952, "Rational decisions".
    """
    probs, y = check_classification(probs, y)
    return nll_loss(probs.log(), y)


def nll_from_log_probs(log_probs: Tensor, y: Tensor) -> Tensor:
    """Mean negative log-likelihood of the labels, from log-probabilities.

    -1/N sum_n log p_n,y_n.

    Args:
        log_probs: logarithms of class probabilities, shape (N, K). -inf is probability zero.
        y: class indices, shape (N,).

    Returns:
        scalar in nats, at least 0.

    >>> log_probs = torch.tensor([[0.0, -200.0]]).log_softmax(dim=1)
    >>> nll_from_log_probs(log_probs, torch.tensor([1]))
    tensor(200.)

    Good 1952, "Rational decisions".
    """
    return nll_loss(*check_classification(log_probs, y, logarithms=True))


def brier(probs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Brier score: squared distance between the probabilities and the one-hot label.

    1/N sum_n sum_k (p_nk - [y_n = k])^2. The sum runs over all classes as in the paper, so with two
    classes it is twice the score of the one event.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,).
        weight: how many examples each example counts for, shape (N,). One if None.

    Returns:
        scalar in [0, 2].

    >>> brier(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 0]))
    tensor(0.2500)

    Brier 1950, "Verification of forecasts expressed in terms of probability".
    """
    probs, y = check_classification(probs, y)
    return weighted_mean((probs - one_hot(y, probs.shape[1])).square().sum(dim=1), weight)


def bin_index(values: Tensor, bins: int, scheme: Scheme = "width") -> Tensor:
    """Return the bin of each of the `values`: bins of equal width in [0, 1], or of equal mass.

    Bins are closed on the right, as in Guo et al. (2017). Equal values always share a bin, so the
    result does not depend on the order of the examples. With many ties some bins stay empty.
    """
    check_integer("bins", bins)
    check_choice("scheme", scheme, get_args(Scheme))
    cuts = torch.arange(1, bins, device=values.device)
    if scheme == "width":
        # Dividing integers gives the float nearest to each edge, so that 0.2 meets the edge 3 / 15.
        edges = cuts.to(values.dtype) / bins
    else:
        last_of_bin = (cuts * values.numel() + bins - 1) // bins - 1
        edges = values.flatten().sort().values[last_of_bin]
    return torch.bucketize(values, edges)


def bin_mean(values: Tensor, index: Tensor, bins: int) -> Tensor:
    """Return the mean of the `values` in each bin, shape (bins,). NaN for an empty bin."""
    return values.new_zeros(bins).index_add(0, index, values) / index.bincount(minlength=bins)


class ReliabilityCurve(NamedTuple):
    """Mean confidence, accuracy and number of examples of each bin, each of shape (bins,).

    Args:
        confidence: the mean confidence.
        accuracy: the fraction of correct predictions.
        count: the number of examples.
    """

    confidence: Tensor
    accuracy: Tensor
    # The field hides the method `tuple.count`, which has no use on a curve.
    count: Tensor  # type: ignore[assignment]


def _top_label(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence in the most probable class and whether that class is the label."""
    probs, y = check_classification(probs, y)
    confidence, predicted = probs.max(dim=1)
    return confidence, (predicted == y).to(probs.dtype)


def reliability_curve(
    probs: Tensor, y: Tensor, bins: int = 15, scheme: Scheme = "width"
) -> ReliabilityCurve:
    """Accuracy as a function of confidence, in bins.

    For bin b, conf_b = mean of max_k p_nk and acc_b = mean of [argmax_k p_nk = y_n] over the
    examples n whose confidence falls in b.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,).
        bins: number of bins.
        scheme: "width" cuts [0, 1] into equal widths. "mass" gives each bin equally many examples,
            except that examples of equal confidence stay together.

    Returns:
        confidence, accuracy and count, each of shape (bins,). Confidence and accuracy of an empty
        bin are NaN, which plotting libraries leave out.

    >>> probs = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]])
    >>> curve = reliability_curve(probs, torch.tensor([0, 1, 1]), bins=4)
    >>> curve.accuracy, curve.count
    (tensor([   nan,    nan, 0.5000, 1.0000]), tensor([0, 0, 2, 1]))

    DeGroot & Fienberg 1983, "The comparison and evaluation of forecasters"; Niculescu-Mizil &
    Caruana 2005, "Predicting good probabilities with supervised learning".
    """
    confidence, correct = _top_label(probs, y)
    index = bin_index(confidence, bins, scheme)
    return ReliabilityCurve(
        confidence=bin_mean(confidence, index, bins),
        accuracy=bin_mean(correct, index, bins),
        count=index.bincount(minlength=bins),
    )


def ece(
    probs: Tensor, y: Tensor, bins: int = 15, scheme: Scheme = "width", weight: Tensor | None = None
) -> Tensor:
    """Expected calibration error of the most probable class.

    sum_b n_b / N |acc_b - conf_b|, with the bins of `reliability_curve`. The estimate is biased
    upwards: it stays above zero for a calibrated model, and more so with few examples per bin.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,).
        bins: number of bins.
        scheme: "width" cuts [0, 1] into equal widths. "mass" gives each bin equally many examples.
        weight: how many examples each example counts for, shape (N,). One if None.

    Returns:
        scalar in [0, 1].

    >>> ece(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))
    tensor(0.2500)

    Naeini, Cooper & Hauskrecht 2015, "Obtaining well calibrated probabilities using Bayesian
    binning"; Guo et al. 2017, "On calibration of modern neural networks"; for equal mass, Nguyen &
    O'Connor 2015, "Posterior calibration and exploratory analysis for NLP models".
    """
    confidence, correct = _top_label(probs, y)
    index, gap = bin_index(confidence, bins, scheme), confidence - correct
    counts = torch.ones_like(gap) if weight is None else check_weight(weight, gap).to(gap)
    # count * |mean - mean| is |sum - sum|, which needs no division by an empty bin.
    return gap.new_zeros(bins).index_add(0, index, gap * counts).abs().sum() / counts.sum()


def auroc(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """Area under the ROC curve of out-of-distribution detection.

    P(s_out > s_in) + P(s_out = s_in) / 2 over all pairs of examples.

    Args:
        scores_in: scores of in-distribution examples, shape (N,).
        scores_out: scores of out-of-distribution examples, shape (M,). They should be higher.

    Returns:
        scalar in [0, 1]. 0.5 for a score that carries no information.

    >>> auroc(torch.tensor([0.1, 0.4]), torch.tensor([0.4, 0.9]))
    tensor(0.8750)

    Hanley & McNeil 1982, "The meaning and use of the area under a receiver operating characteristic
    (ROC) curve"; for this use, Hendrycks & Gimpel 2017, "A baseline for detecting misclassified and
    out-of-distribution examples in neural networks".
    """
    scores_in = check_values("scores_in", scores_in, ndim=1)
    scores_out = check_values("scores_out", scores_out, ndim=1)
    dtype = torch.promote_types(scores_in.dtype, scores_out.dtype)
    scores_in, scores_out = scores_in.to(dtype).sort().values, scores_out.to(dtype)
    below = torch.searchsorted(scores_in, scores_out)
    not_above = torch.searchsorted(scores_in, scores_out, right=True)
    # A tie is counted once and a win twice, in whole numbers, so ties are exact.
    twice_wins = (below + not_above).sum().to(scores_in.dtype)
    return twice_wins / (2 * scores_in.numel() * scores_out.numel())


class RiskCoverage(NamedTuple):
    """Fraction of examples with a prediction and their mean error, each of shape (N,).

    Args:
        coverage: the fraction of examples with a prediction.
        risk: the mean error of these examples.
    """

    coverage: Tensor
    risk: Tensor


def risk_coverage(uncertainty: Tensor, errors: Tensor) -> RiskCoverage:
    """Mean error of the remaining examples when the most uncertain examples are rejected.

    At coverage i / N, risk_i = 1/i sum of the errors of the i least uncertain examples. Examples of
    equal uncertainty each count with their mean error, which is the expected risk when ties are
    broken at random.

    Args:
        uncertainty: uncertainty of each example, shape (N,).
        errors: error of each example, shape (N,): 0/1 or boolean mistakes, or a loss from 0 on.

    Returns:
        coverage 1/N, ..., 1 and the risk there, each of shape (N,).

    >>> risk_coverage(torch.tensor([0.3, 0.1]), torch.tensor([True, False]))
    RiskCoverage(coverage=tensor([0.5000, 1.0000]), risk=tensor([0.0000, 0.5000]))

    El-Yaniv & Wiener 2010, "On the foundations of noise-free selective classification"; Geifman &
    El-Yaniv 2017, "Selective classification for deep neural networks".
    """
    uncertainty = check_values("uncertainty", uncertainty, ndim=1)
    check_shape("errors", errors, uncertainty.shape, "uncertainty")
    errors = errors.to(torch.promote_types(errors.dtype, uncertainty.dtype))
    errors = check_values("errors", errors, ndim=1)
    if errors.min() < 0:
        raise VardropError(f"Expected `errors` to be non-negative, but got {errors.min():.6g}.")
    examples = errors.numel()
    ascending, order = uncertainty.sort()
    # The position of the first equal value names the group of ties.
    group = torch.searchsorted(ascending, ascending)
    expected = bin_mean(errors[order], group, examples)[group]
    count = torch.arange(1, examples + 1, device=errors.device).to(errors.dtype)
    return RiskCoverage(coverage=count / examples, risk=expected.cumsum(dim=0) / count)


def aurc(uncertainty: Tensor, errors: Tensor) -> Tensor:
    """Area under the risk-coverage curve.

    1/N sum_i risk_i, with the risk of `risk_coverage`.

    Args:
        uncertainty: uncertainty of each example, shape (N,).
        errors: error of each example, shape (N,): 0/1 or boolean mistakes, or a loss from 0 on.

    Returns:
        scalar. Lower is better. It is the mean error if uncertainty carries no information.

    >>> aurc(torch.tensor([0.3, 0.1]), torch.tensor([True, False]))
    tensor(0.2500)

    Geifman, Uziel & El-Yaniv 2019, "Bias-reduced uncertainty estimation for deep neural
    classifiers".
    """
    return risk_coverage(uncertainty, errors).risk.mean()
