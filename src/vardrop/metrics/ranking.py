"""How well a score ranks cases: out-of-domain detection and selective prediction."""

from typing import NamedTuple

import torch
from torch import Tensor

from vardrop.metrics.binning import bin_mean
from vardrop.metrics.checks import check_shape, check_vector


def _sorted_scores(scores_in: Tensor, scores_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return both sets of scores in ascending order and in one dtype."""
    scores_in = check_vector("scores_in", scores_in)
    scores_out = check_vector("scores_out", scores_out)
    dtype = torch.promote_types(scores_in.dtype, scores_out.dtype)
    return scores_in.to(dtype).sort().values, scores_out.to(dtype).sort().values


def _count_at_least(ascending: Tensor, thresholds: Tensor) -> Tensor:
    """Return how many of the `ascending` values reach each threshold."""
    return ascending.numel() - torch.searchsorted(ascending, thresholds)


def auroc(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """Area under the ROC curve for telling out-of-domain from in-domain cases.

    Formula: P(s_out > s_in) + P(s_out = s_in) / 2 over all pairs of cases.

    Args:
        scores_in: Scores of in-domain cases, shape (N,).
        scores_out: Scores of out-of-domain cases, shape (M,); higher means more out of domain.

    Returns:
        Scalar in [0, 1]; 0.5 for a score that carries no information.

    Example:
        >>> auroc(torch.tensor([0.1, 0.4]), torch.tensor([0.4, 0.9]))
        tensor(0.8750)

    Reference: Hanley and McNeil (1982), The Meaning and Use of the Area under a Receiver Operating
    Characteristic (ROC) Curve; for this use, Hendrycks and Gimpel (2017), A Baseline for Detecting
    Misclassified and Out-of-Distribution Examples in Neural Networks.
    """
    scores_in, scores_out = _sorted_scores(scores_in, scores_out)
    below = torch.searchsorted(scores_in, scores_out)
    not_above = torch.searchsorted(scores_in, scores_out, right=True)
    # A tie is counted once and a win twice, in whole numbers, so ties are exact.
    twice_wins = (below + not_above).sum().to(scores_in.dtype)
    return twice_wins / (2 * scores_in.numel() * scores_out.numel())


def aupr(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """Area under the precision-recall curve with out-of-domain cases as positives.

    Formula: average precision sum_t (R_t - R_t-1) P_t over the distinct thresholds t, which is the
    mean over out-of-domain cases of the precision at their own score. Tied cases enter together.

    Args:
        scores_in: Scores of in-domain cases, shape (N,).
        scores_out: Scores of out-of-domain cases, shape (M,); higher means more out of domain.

    Returns:
        Scalar in [0, 1]; about M / (M + N) for a score that carries no information.

    Example:
        >>> aupr(torch.tensor([0.1, 0.4]), torch.tensor([0.4, 0.9]))
        tensor(0.8333)

    Reference: Davis and Goadrich (2006), The Relationship between Precision-Recall and ROC Curves;
    for this use, Hendrycks and Gimpel (2017), A Baseline for Detecting Misclassified and
    Out-of-Distribution Examples in Neural Networks.
    """
    scores_in, scores_out = _sorted_scores(scores_in, scores_out)
    hits = _count_at_least(scores_out, scores_out).to(scores_out.dtype)
    false_alarms = _count_at_least(scores_in, scores_out)
    return (hits / (hits + false_alarms)).mean()


def fpr95(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """False-positive rate when at least 95 % of the out-of-domain cases are detected.

    Formula: share of s_in >= t, for the highest t that at least 95 % of s_out reach. Some papers
    take in-domain cases as positives instead: `fpr95(-scores_out, -scores_in)` is their number.

    Args:
        scores_in: Scores of in-domain cases, shape (N,).
        scores_out: Scores of out-of-domain cases, shape (M,); higher means more out of domain.

    Returns:
        Scalar in [0, 1]; lower is better.

    Example:
        >>> fpr95(torch.tensor([0.1, 0.2, 0.3, 0.6]), torch.tensor([0.5, 0.9]))
        tensor(0.2500)

    Reference: Hendrycks, Mazeika and Dietterich (2019), Deep Anomaly Detection with Outlier
    Exposure.
    """
    scores_in, scores_out = _sorted_scores(scores_in, scores_out)
    # Detecting 95 % leaves out at most 5 %; whole numbers avoid rounding 0.95 * M.
    missed = scores_out.numel() * 5 // 100
    return (scores_in >= scores_out[missed]).to(scores_in.dtype).mean()


class RiskCoverage(NamedTuple):
    """Share of cases answered and mean error among them, each of shape (N,)."""

    coverage: Tensor
    risk: Tensor


def risk_coverage(uncertainty: Tensor, errors: Tensor) -> RiskCoverage:
    """Mean error of the cases that are kept when the most uncertain ones are rejected.

    Formula: at coverage i / N, risk_i = 1/i sum of the errors of the i least uncertain cases.
    Cases of equal uncertainty each count with their mean error, which is the expected risk when
    ties are broken at random.

    Args:
        uncertainty: Uncertainty of each case, shape (N,).
        errors: Error of each case, shape (N,): 0/1 or boolean mistakes, or any loss.

    Returns:
        Coverage 1/N, ..., 1 and the risk there, each of shape (N,).

    Example:
        >>> risk_coverage(torch.tensor([0.3, 0.1]), torch.tensor([True, False]))
        RiskCoverage(coverage=tensor([0.5000, 1.0000]), risk=tensor([0.0000, 0.5000]))

    Reference: El-Yaniv and Wiener (2010), On the Foundations of Noise-free Selective
    Classification; Geifman and El-Yaniv (2017), Selective Classification for Deep Neural Networks.
    """
    uncertainty = check_vector("uncertainty", uncertainty)
    check_shape("errors", errors, uncertainty.shape, "uncertainty")
    errors = errors.to(torch.promote_types(errors.dtype, uncertainty.dtype))
    errors = check_vector("errors", errors)
    cases = errors.numel()
    ascending, order = uncertainty.sort()
    # The position of the first equal value names the group of ties.
    group = torch.searchsorted(ascending, ascending)
    expected = bin_mean(errors[order], group, cases)[group]
    kept = torch.arange(1, cases + 1, device=errors.device).to(errors.dtype)
    return RiskCoverage(coverage=kept / cases, risk=expected.cumsum(dim=0) / kept)


def aurc(uncertainty: Tensor, errors: Tensor) -> Tensor:
    """Area under the risk-coverage curve.

    Formula: 1/N sum_i risk_i, with the risk of `risk_coverage`.

    Args:
        uncertainty: Uncertainty of each case, shape (N,).
        errors: Error of each case, shape (N,): 0/1 or boolean mistakes, or any loss.

    Returns:
        Scalar; lower is better, and the mean error if uncertainty carries no information.

    Example:
        >>> aurc(torch.tensor([0.3, 0.1]), torch.tensor([True, False]))
        tensor(0.2500)

    Reference: Geifman, Uziel and El-Yaniv (2019), Bias-Reduced Uncertainty Estimation for Deep
    Neural Classifiers.
    """
    return risk_coverage(uncertainty, errors).risk.mean()
