"""Calibration of class probabilities: is a prediction of confidence p right with frequency p?"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vardrop._core.checks import check_choice, check_integer
from vardrop.metrics.validate import check_classification, check_weight

Scheme = Literal["width", "mass"]


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


def bin_sum(values: Tensor, index: Tensor, bins: int) -> Tensor:
    """Return the sum of the `values` in each bin, shape (bins,)."""
    return values.new_zeros(bins).index_add(0, index, values)


def bin_mean(values: Tensor, index: Tensor, bins: int) -> Tensor:
    """Return the mean of the `values` in each bin, shape (bins,). NaN for an empty bin."""
    return bin_sum(values, index, bins) / index.bincount(minlength=bins)


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
    probs: Tensor,
    y: Tensor,
    bins: int = 15,
    scheme: Scheme = "width",
    weight: Tensor | None = None,
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
    return bin_sum(gap * counts, index, bins).abs().sum() / counts.sum()
