"""Proper scores of class probabilities."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import nll_loss, one_hot

from vardrop.metrics.calibration import bin_index, bin_mean
from vardrop.metrics.checks import (
    check_class_scores,
    check_classification,
    check_labels,
    check_sums,
)


def accuracy(probs: Tensor, y: Tensor) -> Tensor:
    """Fraction of rows whose most probable class is the label.

    1/N sum_n [argmax_k p_nk = y_n]; a tie goes to the lowest class index.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,).

    Returns:
        scalar in [0, 1].

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
    tensor(0.5000)

    Gneiting & Raftery 2007, "Strictly proper scoring rules, prediction, and estimation" (the
    zero-one score).
    """
    probs, y = check_classification(probs, y)
    return (probs.argmax(dim=1) == y).to(probs.dtype).mean()


def nll(probs: Tensor, y: Tensor) -> Tensor:
    """Mean negative log-likelihood of the labels, from probabilities.

    -1/N sum_n log p_n,y_n. It is infinite when a label has probability zero; where probabilities
    may underflow, use `nll_from_log_probs`.

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
        log_probs: logarithms of class probabilities, shape (N, K); -inf stands for zero.
        y: class indices, shape (N,).

    Returns:
        scalar in nats, at least 0.

    >>> log_probs = torch.tensor([[0.0, -200.0]]).log_softmax(dim=1)
    >>> nll_from_log_probs(log_probs, torch.tensor([1]))
    tensor(200.)

    Good 1952, "Rational decisions".
    """
    checked = check_class_scores("log_probs", log_probs)
    check_sums("log_probs", checked.exp().sum(dim=1), log_probs.dtype)
    check_labels(y, *checked.shape)
    return nll_loss(checked, y.long())


def brier(probs: Tensor, y: Tensor) -> Tensor:
    """Brier score: squared distance between the probabilities and the one-hot label.

    1/N sum_n sum_k (p_nk - [y_n = k])^2. The sum runs over all classes as in the paper, so with two
    classes it is twice the score of the one event.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,).

    Returns:
        scalar in [0, 2].

    >>> brier(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 0]))
    tensor(0.2500)

    Brier 1950, "Verification of forecasts expressed in terms of probability".
    """
    probs, y = check_classification(probs, y)
    return (probs - one_hot(y, probs.shape[1])).square().sum(dim=1).mean()


class BrierDecomposition(NamedTuple):
    """Parts of the Brier score, each a scalar summed over the classes; see `score`."""

    reliability: Tensor
    resolution: Tensor
    uncertainty: Tensor
    within_bin_variance: Tensor
    within_bin_covariance: Tensor

    @property
    def score(self) -> Tensor:
        """The Brier score that the parts add up to."""
        between = self.reliability - self.resolution + self.uncertainty
        return between + self.within_bin_variance - self.within_bin_covariance


def brier_decomposition(probs: Tensor, y: Tensor, bins: int = 15) -> BrierDecomposition:
    """Split the Brier score into reliability, resolution, uncertainty and within-bin terms.

    brier = REL - RES + UNC + WBV - WBC. With o_nk = [y_n = k], base rate o_k, and bin means P_nk
    and O_nk of the probabilities and outcomes of class k in the bin of p_nk: REL = 1/N sum (P -
    O)^2, RES = 1/N sum (O - o_k)^2, UNC = sum_k o_k (1 - o_k), WBV = 1/N sum (p - P)^2, WBC = 2/N
    sum (p - P)(o - O), where sums run over n and k. The last two vanish when all probabilities in a
    bin are equal.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,).
        bins: number of bins of equal width for each class.

    Returns:
        the five parts; their `score` equals `brier(probs, y)` up to rounding.

    >>> probs, y = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.1, 0.9]]), torch.tensor([0, 1, 1])
    >>> parts = brier_decomposition(probs, y, bins=2)
    >>> parts.reliability, parts.resolution
    (tensor(0.0367), tensor(0.1111))
    >>> torch.allclose(parts.score, brier(probs, y))
    True

    Murphy 1973, "A new vector partition of the probability score"; Stephenson, Coelho & Jolliffe
    2008, "Two extra components in the Brier score decomposition".
    """
    probs, y = check_classification(probs, y)
    rows, classes = probs.shape
    outcome = one_hot(y, classes).to(probs.dtype)
    base_rate = outcome.mean(dim=0)
    # Each class has its own row of bins: cell = class * bins + bin.
    cell = bin_index(probs, bins) + bins * torch.arange(classes, device=probs.device)
    cells = classes * bins
    mean_prob = bin_mean(probs.flatten(), cell.flatten(), cells)[cell]
    mean_outcome = bin_mean(outcome.flatten(), cell.flatten(), cells)[cell]
    prob_rest, outcome_rest = probs - mean_prob, outcome - mean_outcome
    return BrierDecomposition(
        reliability=(mean_prob - mean_outcome).square().sum() / rows,
        resolution=(mean_outcome - base_rate).square().sum() / rows,
        uncertainty=(base_rate * (1 - base_rate)).sum(),
        within_bin_variance=prob_rest.square().sum() / rows,
        within_bin_covariance=2 * (prob_rest * outcome_rest).sum() / rows,
    )
