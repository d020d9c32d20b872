"""Ranking of examples by a score: out-of-distribution detection and selective prediction."""

from typing import NamedTuple

import torch
from torch import Tensor

from vardrop._core.errors import VardropError
from vardrop.metrics.calibration import bin_mean
from vardrop.metrics.validate import check_shape, check_values


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
